"""The flag --model of launch.plan, launch.plan_layouts and launch.place: a config, or numbers such as `params=65e6,tokens=1600`."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, TypeVar

from absl import flags

from decjax import costmodel, registry, topology
from decjax.contrib import layouts
from decjax.costmodel.profile import LARGEST, MAX_BUCKETS, Amount, Rate, Size
from decjax.options import Range
from launch import command, config_file

if TYPE_CHECKING:
    import ml_collections

    from decjax import config, train

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer; hidden=0 stands for 4·width."""

    depth: Size
    width: Size
    heads: Size
    vocabulary: Size
    context: Size
    batch: Size
    hidden: Annotated[int, Range(0, 2**40)] = 0
    tied: Annotated[int, Range(0, 1)] = 0
    bytes: Rate = 4.0

    def transformer(self) -> layouts.Transformer:
        return layouts.Transformer(
            self.depth,
            self.width,
            self.heads,
            self.vocabulary,
            self.context,
            self.batch,
            self.hidden,
            bool(self.tied),
            value_bytes=self.bytes,
            gradient_bytes=self.bytes,
            parameter_bytes=4 + (self.bytes if self.bytes < 4 else 0),
        )


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Parameters of a model, their bytes, and times of one worker's step."""

    params: Annotated[float, Range(1, LARGEST)]
    tokens: Amount | None = None
    forward_s: Amount | None = None
    backward_s: Amount | None = None
    buckets: Annotated[int, Range(1, MAX_BUCKETS)] = 1
    bytes: Rate = 4.0
    optimizer_s: Amount = 0.0
    combine_s: Amount = 0.0

    def workload(self, cluster: costmodel.Cluster, compute_s: float | None) -> costmodel.Workload:
        """Return the workload: with the given times, or 1/3 and 2/3 of a step's time, which may follow from tokens and flops."""
        times = {name: time_s for name in ("forward_s", "backward_s") if (time_s := getattr(self, name)) is not None}
        problem = f"--compute_s={compute_s} and --model: {', '.join(times)} both set the time of a step"
        command.check((compute_s is None or not times, problem, "give one"))
        if compute_s is None and not times and self.tokens and cluster.flops:
            compute_s = 6 * self.params * self.tokens / cluster.flops
        forward_s, backward_s = (
            times.values() if len(times) == 2 else (compute_s and compute_s / 3, compute_s and 2 * compute_s / 3)
        )
        if forward_s is None or backward_s is None:
            fix = "give forward_s and backward_s, --compute_s, or tokens and a profile with flops"
            command.refuse("--model: the compute time of a step is missing", fix)
        B, num_bytes = self.buckets, self.params * self.bytes
        return costmodel.Workload(
            forward_s, (backward_s / B,) * B, (num_bytes / B,) * B, optimizer_s=self.optimizer_s, combine_s=self.combine_s
        )


EXAMPLES = {Sizes: "depth=52,width=1920,heads=24,vocabulary=51200,context=1024,batch=512", Numbers: "params=65e6,tokens=1600"}


def is_config(text: str) -> bool:
    """Return whether a --model is a config, such as configs/lm.py:workers=8."""
    return text.partition(":")[0].endswith(".py")


def has_sizes(text: str) -> bool:
    """Return whether a --model has the sizes of a transformer."""
    return any(part.strip().startswith(("depth=", "layers=")) for part in text.split(","))


def parse(text: str, cls: type[T]) -> T:
    """Parse `Sizes` or `Numbers`; `layers` is an alias of `depth`."""
    known, given = registry.options_of(cls), {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        key = "depth" if key == "layers" else key
        command.check(
            (key not in given, f"--model: {key} is given twice", "leave one out"),
            (key in known, f"--model: {key!r} is unknown", f"use some of {', '.join(known)}, or a .json or .py file"),
        )
        number = registry.literal(value)
        is_whole = known[key].kind is int and isinstance(number, float) and number.is_integer()  # As in batch=1e3.
        given[key] = int(number) if is_whole else number
    missing = [key for key, option in known.items() if option.is_required and key not in given]
    command.check((not missing, f"--model: {', '.join(missing[:1])} is missing", f"write it as in {EXAMPLES[cls]}"))
    return cls(**registry.fill("--model: ", given, known))


def size(text: str, fsdp: int | None = None) -> "config.Size":
    """Return the size of a config's run, with another number of devices per worker unless that is None."""
    from decjax import config  # It imports JAX, which takes seconds.

    return config.size(_config(text, fsdp))


def memory(text: str, fsdp: int | None = None) -> "train.DeviceMemory":
    """Return the memory that a device needs for a config's run, with another number of devices per worker unless that is None."""
    from decjax import config, train

    chosen = _config(text, fsdp)
    return train.predict_memory(config.resolve(chosen, config.SIMULATED_WORKERS * config.read(chosen).fsdp))


def _config(text: str, fsdp: int | None) -> "ml_collections.ConfigDict":
    chosen = config_file.get_config(text)
    if fsdp:
        chosen.fsdp = fsdp
    return chosen


def transformer(text: str) -> layouts.Transformer:
    """Return the transformer of a config or of sizes."""
    if not is_config(text):
        return parse(text, Sizes).transformer()
    from decjax import config  # It imports JAX, which takes seconds.
    from decjax.contrib import selective

    return selective.transformer(config.resolve(config_file.get_config(text)))


def resized(cluster: costmodel.Cluster, flag: str, number: int | None) -> costmodel.Cluster:
    """Return a cluster with the number of workers of a flag or, if that is None, of a config or the profile."""
    name = f"--{flag}" if flags.FLAGS[flag].present else flag
    most, count = topology.MAX_WORKERS, cluster.num_workers if number is None else number
    command.check((count <= most, f"{name}={count} must be at most {most}", f"use --{flag}={most}, or fewer"))
    try:
        return cluster if number is None else cluster.resize(number)
    except ValueError as error:
        command.refuse(str(error).replace("workers=", f"{name}=").replace("workers", flag))
