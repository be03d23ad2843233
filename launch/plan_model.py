"""The flag --model of launch.plan, launch.plan_layouts and launch.place: a config, or numbers such as `params=65e6,tokens=1600`."""

from collections.abc import Callable
from typing import Any, TypeVar

from absl import flags
import ml_collections

from decjax import costmodel, topology
from decjax.costmodel import profile
from launch import command, config_file

T = TypeVar("T")

SIZES = dict(depth=None, width=None, heads=None, vocabulary=None, context=None, batch=None, hidden=0.0, tied=0.0, bytes=4.0)
NUMBERS = dict(params=None, forward_s=None, backward_s=None, tokens=None, buckets=1.0, bytes=4.0, optimizer_s=0.0, combine_s=0.0)
_WHOLE = ("depth", "width", "heads", "vocabulary", "context", "batch", "hidden")
_EXAMPLES = dict(params="such as 65e6", tokens="such as 1600")


def is_config(text: str) -> bool:
    """Return whether a --model is a config, such as configs/lm.py:workers=8."""
    return text.partition(":")[0].endswith(".py")


def has_sizes(text: str) -> bool:
    """Return whether a --model has the sizes of a transformer."""
    return any(part.strip().startswith(("depth=", "layers=")) for part in text.split(","))


def of_config(compute: Callable[[ml_collections.ConfigDict], T], text: str) -> T:
    """Apply a function of `decjax.config` to a config."""
    from decjax import config  # It imports JAX, which takes seconds.

    try:
        return compute(config_file.get_config(text))
    except config.ConfigError as error:
        command.refuse(f"--model={text}: {error}")


def transformer(text: str) -> costmodel.Transformer:
    """Return the transformer of a config or of sizes."""
    if not is_config(text):
        return make_transformer(parse_pairs(text, SIZES))
    from decjax import config

    return of_config(lambda document: config.transformer(config.resolve(document)), text)


def resized(cluster: costmodel.Cluster, flag: str, number: int | None) -> costmodel.Cluster:
    """Return a cluster with the number of workers of a flag or, if that is None, of a config or the profile."""
    count = cluster.num_workers if number is None else number
    name = f"--{flag}" if flags.FLAGS[flag].present else flag
    if count > topology.MAX_WORKERS:
        command.refuse(f"{name}={count} must be at most {topology.MAX_WORKERS}", f"use --{flag}={topology.MAX_WORKERS}, or fewer")
    try:
        return cluster if number is None else cluster.resize(number)
    except ValueError as error:
        command.refuse(name.removesuffix(flag) + str(error).replace("workers", flag))


def parse_pairs(text: str, keys: dict[str, float | None] = NUMBERS) -> dict[str, Any]:
    """Parse numbers such as `params=65e6,tokens=1600`; fill in defaults."""
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        key = "depth" if key == "layers" else key  # an alias
        if key in values:
            command.refuse(f"--model: {key} is given twice", "leave one out")
        if key not in keys:
            command.refuse(f"--model: {key!r} is unknown", f"use some of {', '.join(keys)}, or a .json or .py file")
        values[key] = _number(key, value)
    return keys | values


def _number(key: str, text: str) -> float:
    """Parse the value of a key."""
    least = 0 if key == "hidden" else 1  # 0: 4·width
    try:
        number = float(text)
        if key not in _WHOLE:
            return profile.check_number(f"--model: {key}", number)
        if number.is_integer() and number >= least:
            return number
    except ValueError as error:
        if key not in _WHOLE:
            number_error = str(error) if "must be" in str(error) else ""
            command.refuse(number_error or f"--model: {key}={text!r} must be a number", _EXAMPLES.get(key, ""))
    command.refuse(f"--model: {key}={text!r} must be a whole number of at least {least}")


def times_of(values: dict[str, Any], cluster: costmodel.Cluster, compute_s: float | None) -> tuple[float, float]:
    """Return (forward_s, backward_s): as given, or 1/3 and 2/3 of a step's time, which may follow from tokens and flops."""
    times = {name: values[name] for name in ("forward_s", "backward_s") if values[name] is not None}
    if compute_s is not None and times:
        command.refuse(f"--compute_s={compute_s:g} and --model: {', '.join(times)} both set the time of a step", "give one")
    if len(times) == 2:
        return times["forward_s"], times["backward_s"]
    if compute_s is None and not times and values["tokens"] and cluster.flops:
        compute_s = 6 * values["params"] * values["tokens"] / cluster.flops
    if compute_s is None:
        fix = "give forward_s and backward_s, --compute_s, or tokens and a profile with flops"
        command.refuse("--model: the compute time of a step is missing", fix)
    return compute_s / 3, 2 * compute_s / 3


def check_parameters(values: dict[str, Any]) -> None:
    """Refuse numbers without a positive number of parameters."""
    if not values["params"]:
        problem = "params is missing" if values["params"] is None else "params=0 must be more than 0"
        command.refuse(f"--model: {problem}", "give the number of parameters, such as params=65e6, or a config")


def make_workload(values: dict[str, Any], cluster: costmodel.Cluster, compute_s: float | None) -> costmodel.Workload:
    """Make a workload from the numbers of --model."""
    values = NUMBERS | values
    check_parameters(values)
    forward_s, backward_s = times_of(values, cluster, compute_s)
    buckets = int(values["buckets"])
    if buckets != values["buckets"] or not 1 <= buckets <= profile.MAX_BUCKETS:
        command.refuse(f"--model: buckets={values['buckets']:g} must be a whole number from 1 to {profile.MAX_BUCKETS}")
    return costmodel.Workload(
        forward_s,
        (backward_s / buckets,) * buckets,
        (values["params"] * values["bytes"] / buckets,) * buckets,
        optimizer_s=values["optimizer_s"],
        combine_s=values["combine_s"],
    )


def make_transformer(values: dict[str, Any]) -> costmodel.Transformer:
    """Make a transformer from the sizes of --model."""
    if missing := [key for key, value in values.items() if value is None]:
        example = "depth=52,width=1920,heads=24,vocabulary=51200,context=1024,batch=512"
        command.refuse(f"--model: {missing[0]} is missing", f"write it as in {example}")
    if values["tied"] not in (0, 1):
        command.refuse(f"--model: tied={values['tied']:g} must be 0 or 1")
    num_bytes = profile.check_number("--model: bytes", values["bytes"], profile.Rate)
    sizes = {key: int(values[key]) for key in _WHOLE}
    return costmodel.Transformer(
        batch_size=sizes.pop("batch"),
        tied=bool(values["tied"]),
        value_bytes=num_bytes,
        gradient_bytes=num_bytes,
        parameter_bytes=4 + (num_bytes if num_bytes < 4 else 0),
        **sizes,
    )
