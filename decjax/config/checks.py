"""Checks of a config: the range of each number, and values that exclude each other."""

from collections.abc import Callable, Mapping
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import buckets, pipeline, registry, tasks
from decjax.config.spec import AUTO, CONSENSUS, RunSpec
from decjax.optim.method import Method
from decjax.pipeline import sums

ENGINES = ("auto", "fused", "split")
LARGEST = 2**31 - 1  # of whole numbers
# (Minimum, maximum). The maxima of sizes are generous; they keep a typo from exhausting memory.
BOUNDS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "steps": (1, LARGEST),
    "log_every": (1, LARGEST),
    **dict.fromkeys(CONSENSUS, (0, LARGEST)),
    "clip_norm": (0, math.inf),
    "workers": (0, 2**16),
    "local_size": (1, 2**16),
    "tensor": (1, 2**12),
    "batch_size": (0, 2**26),
    "bucket_bytes": (0, 2**40),
    "eval.every": (1, LARGEST),
    "eval.num_windows": (0, LARGEST),
    "eval.batch_size": (1, 2**20),
    "checkpoint.every": (1, LARGEST),
    "checkpoint.keep": (1, LARGEST),
    "elastic.heartbeat_s": (0.2, 86400),
    "elastic.min_workers": (1, 2**16),
    "pipeline.stages": (1, 2**10),
    "pipeline.microbatches": (1, 2**12),
    "pipeline.chunks": (1, 2**8),
    "pipeline.autoencoder": (0, 2**20),
    "pipeline.delay": (0, 2**10),
    "boundary.slots": (0, 2**20),
    "mixer.rounds": (1, 2**8),
    "mixer.rank": (1, 2**12),
    "reducer.rank": (1, 2**14),
    "reducer.start": (0, LARGEST),
    "method.every": (1, LARGEST),
    "method.strength": (0, 1),
    "method.strength_power": (0, math.inf),
    "schedule.final_fraction": (0, 1),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.eps": (0, math.inf),
    "method.weight_decay": (0, math.inf),
    "method.eps": (0, math.inf),
    "optimizer.window": (1, LARGEST),
}
# Fields that must be at least 0 and less than 1.
DECAYS = (
    "optimizer.b1",
    "optimizer.b2",
    "optimizer.adam_b1",
    "optimizer.adam_b2",
    "optimizer.momentum",
    "method.b1",
    "method.b2",
    "method.momentum",
    "method.quasi_momentum",
    "method.outer_momentum",
)


def check_values(document: Mapping[str, Any]) -> None:
    """Raise a ValueError for a number out of range or an unknown dtype."""
    for path, value in jax.tree_util.tree_leaves_with_path(document):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.endswith("dtype") and isinstance(value, str):
            _check_dtype(name, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name}={value}: must be finite; use a number such as 0.1")
        least, most = BOUNDS.get(name, (-math.inf, LARGEST if isinstance(value, int) else math.inf))
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
        if value > most:
            raise ValueError(f"{name}={value}: must be at most {most}")
        if name in DECAYS and not 0 <= value < 1:
            raise ValueError(f"{name}={value}: must be at least 0 and less than 1")


def _check_dtype(name: str, value: str) -> None:
    try:
        is_valid = value in registry.NONE or jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"{name}={registry.shown(value)} must be a floating-point type, such as 'bfloat16'")


def check_engine(engine: str, method: Method) -> None:
    """Raise a ValueError for an unknown exchange engine, or "split" with a method whose exchange needs the gradient."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown; use one of {', '.join(ENGINES)}")
    if engine == "split" and not method.exchange:
        raise ValueError(
            "engine 'split' needs an exchange that does not depend on the gradient: method 'decentralized' "
            "with order 'awc' and a static phase, or 'allreduce' with stale; use engine 'fused'"
        )


def check_timing(spec: RunSpec, method: Method) -> None:
    """Raise a ValueError for simulated workers with a method that depends on the measured speed of training."""
    if spec.simulate and method.timing:
        raise ValueError(
            "simulate with measured speed: times of simulated workers do not reflect a network; leave simulate out, or give the "
            "speeds, as reducer.speed='1; 1.8; 3; 4'"
        )


def check_together(spec: RunSpec) -> None:
    """Raise a ValueError for values that exclude each other."""
    n, batch_size = spec.workers, spec.batch_size
    if n < 1:
        raise ValueError(f"workers={n}: at least one worker is needed; use workers=1 or more")
    if n == 1 and spec.topology is not None:
        name = registry.parse("topology", spec.topology)[0]
        raise ValueError(f"topology {name!r} needs at least 2 workers, got 1; use method 'local' for a single worker")
    if batch_size < 1 or batch_size % n:
        multiples = dict.fromkeys(max(1, batch_size // n + more) * n for more in (0, 1))
        raise ValueError(
            f"batch_size={batch_size} is not a positive multiple of workers={n}; use {' or '.join(map(str, multiples))}"
        )
    if (least := spec.elastic.min_workers) > n:
        raise ValueError(f"elastic.min_workers={least}: there are {n} workers; use at most so many")
    for section, name in (("schedule", "learning_rate"), ("method", "outer_learning_rate")):
        rate = getattr(spec, section).options.get(name, 1.0)
        if not rate > 0:
            raise ValueError(f"{section}.{name}={rate} must be positive; use a number such as 1e-3")
    _check_model(spec)
    _check_tensor_codec(spec)
    _check_communicates(spec)
    _check_stages(spec)
    if spec.tables is not None:
        _check_tables(spec)


def check_divided(spec: RunSpec, task: tasks.Task) -> None:
    """Raise a ValueError for a tensor-parallel group with a task that does not divide its parameters."""
    if spec.tensor > 1 and not task.divided:
        model = f" with model {spec.model.name!r}" if spec.model else ""
        raise ValueError(f"tensor={spec.tensor}: task {spec.task.name!r}{model} has no parameters to divide; use tensor=1")


def check_sums(spec: RunSpec, task: tasks.Task) -> None:
    """Raise a ValueError for a codec that makes the messages of sums within a layer larger."""
    if not spec.tensor_codec or not task.parts:
        return
    B, T1 = task.examples(spec.each // spec.pipeline.microbatches).shape
    x_BxTxD, K = task.parts.activation(B, T1 - 1), spec.tensor
    uncoded_bytes = 2 * (K - 1) / K * x_BxTxD.size * x_BxTxD.dtype.itemsize
    coded_bytes = sums.num_bytes(registry.make("codec", spec.tensor_codec), (B * (T1 - 1), x_BxTxD.shape[-1]), K)
    if coded_bytes > uncoded_bytes:
        raise ValueError(
            f"tensor_codec={spec.tensor_codec!r} sends {coded_bytes} bytes for a sum of {x_BxTxD.dtype} values that takes "
            f"{uncoded_bytes:.0f} uncoded; use fewer bits, or leave it empty"
        )


def _check_tensor_codec(spec: RunSpec) -> None:
    """Raise a ValueError for coded sums without a tensor-parallel group, or with a model that cannot code them."""
    if not spec.tensor_codec:
        return
    sums.check(registry.make("codec", spec.tensor_codec))
    if spec.tensor == 1:
        fix = "leave it empty" if spec.simulate else "use tensor=2, or leave it empty"
        raise ValueError(
            f"tensor_codec={spec.tensor_codec!r} codes sums of the devices of a tensor-parallel group, got tensor=1"
            f"{' with simulate' * spec.simulate}; {fix}"
        )
    if spec.model and "product" not in inspect.signature(registry.part("model", spec.model.name).factory).parameters:
        raise ValueError(
            f"tensor_codec={spec.tensor_codec!r}: model {spec.model.name!r} has no parameter product; leave it empty, or give the model "
            "one"
        )


def _check_model(spec: RunSpec) -> None:
    """Raise a ValueError for a model that the task cannot train, or sizes that are not divisible by a tensor-parallel group."""
    if not spec.model:
        return
    name, options = spec.model
    models = registry.partners("task", spec.task.name, "model")
    if name not in models:
        raise ValueError(
            f"config.model.name={name!r} is not a model of task {spec.task.name!r}; use one of {', '.join(models)}, or give your own "
            f"model the trait tasks=({spec.task.name!r},)"
        )
    for size in registry.part("model", name).traits.get("divisible", ()):
        if options[size] % spec.tensor:
            raise ValueError(
                f"model.{size}={options[size]} is not divisible by tensor={spec.tensor}, the devices that "
                f"divide it; use tensor={math.gcd(options[size], spec.tensor)}"
            )


class Needs(NamedTuple):
    """A condition under which an option has an effect.

    Attributes:
        path: of the option in a config.
        default: the value that has no effect.
        met: whether a run meets the condition.
        why: the reason for refusing the option otherwise.
        fix: an alternative to leaving it out, after a comma.
    """

    path: str
    default: Any
    met: Callable[[RunSpec], bool]
    why: Callable[[RunSpec], str]
    fix: str = ""


def _trait(spec: RunSpec, kind: str, name: str) -> Any:
    return registry.part(kind, getattr(spec, kind).name).traits.get(name)


def _communicates(spec: RunSpec) -> bool:
    return not _trait(spec, "method", "alone") or any(getattr(spec, name) for name in CONSENSUS)


NEEDS = (
    *(
        Needs(
            name,
            0,
            lambda spec: not _trait(spec, "method", "averages_gradients"),
            lambda spec: f" changes nothing with method {spec.method.name!r}, whose replicas are equal",
        )
        for name in CONSENSUS
    ),
    *(
        Needs(
            name,
            0,
            lambda spec: not _trait(spec, "method", "anchored"),
            lambda spec: (
                f": method {spec.method.name!r} would separate the replicas again, since each worker has its own slow parameters"
            ),
        )
        for name in CONSENSUS
    ),
    *(
        Needs(name, default, _communicates, lambda spec: f" changes nothing with method {spec.method.name!r}, which sends nothing")
        for name, default in (("bucket_bytes", buckets.BUCKET_BYTES), ("local_size", 1))
    ),
    *(
        Needs(
            f"eval.{name}",
            default,
            lambda spec: not _trait(spec, "task", "evaluated_once"),
            lambda spec: f" changes nothing with task {spec.task.name!r}, which has one example for validation",
        )
        for name, default in (("num_windows", 0), ("batch_size", 1))
    ),
    Needs(
        "pipeline.autoencoder_init",
        "random",
        lambda spec: spec.pipeline.autoencoder > 0,
        lambda spec: " changes nothing with pipeline.autoencoder=0",
        ", or give a width",
    ),
)


def check_needs(spec: RunSpec) -> None:
    """Raise a ValueError for an option whose condition in `NEEDS` is not met."""
    for path, default, met, why, fix in NEEDS:
        value: Any = spec
        for name in path.split("."):
            value = getattr(value, name)
        if value != default and not met(spec):
            raise ValueError(f"{path}={value!r}{why(spec)}; leave it out{fix}")


def _check_communicates(spec: RunSpec) -> None:
    """Raise a ValueError for a run that would never communicate, or never compress."""
    every, averaging = spec.method.options.get("every", 1), spec.averaging
    if every > spec.steps:
        raise ValueError(
            f"method.every={every} is more than steps={spec.steps}, so nothing would be exchanged; use at most "
            f"{spec.steps}, or method 'local'"
        )
    if spec.method.options.get("strength") == 0:
        raise ValueError("method.strength=0, so nothing would be mixed; use more than 0 and at most 1, or method 'local'")
    if not averaging:
        return
    if averaging.start and averaging.start * every >= spec.steps:
        raise ValueError(
            f"reducer.start={averaging.start} is not reached in steps={spec.steps}, so reducer {averaging.reducer.name!r} would "
            f"never be used; use less than {-(-spec.steps // every)}, or reducer 'mean'"
        )
    option = registry.part("reducer", averaging.reducer.name).traits.get("warm_steps", "")
    warm_steps = averaging.reducer.options.get(option) or 0
    if (averaging.start + warm_steps) * every >= spec.steps:
        raise ValueError(
            f"reducer.{option}={warm_steps} after reducer.start={averaging.start} does not end within steps={spec.steps}, so "
            f"reducer {averaging.reducer.name!r} would compress nothing; use a shorter {option}, or reducer 'mean'"
        )


def _check_stages(spec: RunSpec) -> None:
    """Raise a ValueError for pipeline options that the number of stages, the optimizer, the steps or the method does not allow."""
    stages, text = spec.pipeline.stages, spec.averaging and spec.averaging.stages
    if text and text != AUTO and not (text.isdecimal() and 1 <= int(text) <= stages):
        raise ValueError(f"reducer.stages={text!r}: must be a number from 1 to stages={stages}, {AUTO!r}, or empty for all")
    if spec.pipeline.delay and not spec.optimizer:
        raise ValueError(
            f"pipeline.delay={spec.pipeline.delay} with method {spec.method.name!r}, which is an optimizer itself and cannot take "
            "late gradients; leave it out, or use method 'allreduce'"
        )
    if (late := spec.pipeline.delay * (stages - 1)) >= spec.steps:
        raise ValueError(
            f"pipeline.delay={spec.pipeline.delay} with stages={stages}: the first stage's gradients come {late} steps late, so it would "
            f"not change in steps={spec.steps}; use a smaller delay, or more than {late} steps"
        )
    if (init := spec.pipeline.autoencoder_init) not in pipeline.INITS:
        raise ValueError(f"pipeline.autoencoder_init={init!r} is unknown; use one of {', '.join(pipeline.INITS)}")
    if spec.pipeline.fused_embedding and not registry.part("method", spec.method.name).traits.get("averages_gradients"):
        raise ValueError(
            f"pipeline.fused_embedding with method {spec.method.name!r}, which does not average the gradients of a tied table over "
            "workers; leave it out, or use method 'allreduce'"
        )


# Elementwise optimizers. With others, the update of shared parameters would depend on the tables of a worker.
ELEMENTWISE = (
    *"accum_adamw adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw".split(),
    *"radam rmsprop rprop sgd sgdm sign sign_sgd yogi".split(),
)


def _check_tables(spec: RunSpec) -> None:
    """Raise a ValueError for options that divided tables do not support: only gradients of a table's rows may change them."""
    if spec.method.name != "allreduce" or spec.method.options.get("stale"):
        refused = "stale" if spec.method.name == "allreduce" else f"method {spec.method.name!r}"
        raise ValueError(
            f"config.tables with {refused}: divided tables need gradients that are averaged in every step; use method 'allreduce' without "
            "stale, or leave config.tables out"
        )
    for what, value in (
        ("pipeline.stages", spec.pipeline.stages),
        ("pipeline.microbatches", spec.pipeline.microbatches),
        ("tensor", spec.tensor),
    ):
        if value > 1:
            raise ValueError(
                f"{what}={value} with config.tables, which needs the lookups of a whole batch in one program; use {what}=1"
            )
    if (within := (spec.tables or {}).get("within", 0)) > spec.steps:
        raise ValueError(
            f"tables.within={within} is more than steps={spec.steps}, so the bounds would never be reached; use at most "
            f"{spec.steps}"
        )
    if names := [name for name in CONSENSUS if getattr(spec, name)]:
        raise ValueError(f"{names[0]}={getattr(spec, names[0])} with config.tables, which have no replicas; use {names[0]}=0")
    if spec.optimizer and spec.optimizer.name not in ELEMENTWISE:
        raise ValueError(
            f"optimizer {spec.optimizer.name!r} with config.tables: its update of shared parameters would depend on a worker's tables; "
            f"use one of {', '.join(ELEMENTWISE)}"
        )
