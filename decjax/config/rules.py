"""Conditions across the sections of a config, as data; `check` words every refusal."""

from collections.abc import Callable
import inspect
import math
from typing import Any, NamedTuple

from decjax import registry, tasks
from decjax.config.setup import Setup, boundary_ratios
from decjax.config.spec import Averaging, Choice, Layers, RunSpec, StageMessages, plain_fields
from decjax.optim.method import Method
from decjax.pipeline.source import Source

CONSENSUS = ("consensus_every", "consensus_first", "consensus_last")


class Rule(NamedTuple):
    """A condition that the value of a field must meet.

    Attributes:
        path: of the field, such as "pipeline.delay".
        broken: whether a run breaks the rule; called only for values other than the field's default, unless `always` is set.
        why: what is wrong, behind "path=value".
        fix: what to do.
        always: call `broken` for the default value, too.
    """

    path: str
    broken: Callable[[RunSpec], Any]
    why: Callable[[RunSpec], str]
    fix: Callable[[RunSpec], str] = lambda spec: "leave it out"
    always: bool = False


def _value(spec: RunSpec, path: str) -> Any:
    """The value at a path; of a part's section, its name or one of its options."""
    section, _, field = path.rpartition(".")
    held: Any = getattr(spec, section) if section else spec
    if section == "reducer" and held and field in plain_fields(type(spec.averaging)):
        held = spec.averaging
    if isinstance(held, Choice):
        return held.name if field == "name" else held.options.get(field)
    return getattr(held, field, None)


def _default(path: str) -> Any:
    section, _, field = path.rpartition(".")
    declared = {"": RunSpec, "pipeline": Layers, "boundary": StageMessages, "reducer": Averaging}.get(section)
    option = plain_fields(declared).get(field) if declared else None
    return option.default if option else None


def check(spec: RunSpec) -> None:
    """Raise a ValueError for values that exclude each other."""
    for rule in RULES:
        value = _value(spec, rule.path)
        if (rule.always or (value is not None and value != _default(rule.path))) and rule.broken(spec):
            raise ValueError(f"{rule.path}={value!r}{rule.why(spec)}; {rule.fix(spec)}")
    if spec.source:
        factory = registry.part("source", spec.source.name).factory
        assert isinstance(factory, type) and issubclass(factory, Source)
        factory.check(spec)


def _every(spec: RunSpec) -> int:
    return spec.method.options.get("every", 1)


def _warm_steps(spec: RunSpec) -> int:
    """The steps after `start` in which the reducer does not compress yet."""
    return (spec.reducer.options.get(spec.trait("reducer", "warm_steps")) or 0) if spec.reducer else 0


def _communicates(spec: RunSpec) -> bool:
    return not spec.trait("method", "alone") or any(getattr(spec, name) for name in CONSENSUS)


def _models(spec: RunSpec) -> tuple[str, ...]:
    return registry.partners("task", spec.task.name, "model")


def _undivided(spec: RunSpec) -> str:
    """An option of the model that a tensor-parallel group cannot divide evenly; empty: none."""
    sizes = spec.trait("model", "divisible") or ()
    assert spec.model or not sizes
    return next((size for size in sizes if spec.model and spec.model.options[size] % spec.tensor), "")


def _multiples(spec: RunSpec) -> list[int]:
    """The batch sizes next to the given one that all workers can share."""
    return sorted({max(1, spec.batch_size // spec.workers + more) * spec.workers for more in (0, 1)})


def _late(spec: RunSpec) -> int:
    return spec.pipeline.delay * (spec.pipeline.stages - 1)


def _of_method(spec: RunSpec) -> str:
    return f" with method {spec.method.name!r}"


def _no_effect(path: str, broken: Callable[[RunSpec], Any], why: Callable[[RunSpec], str], **more: Any) -> Rule:
    return Rule(path, broken, lambda spec: f" has no effect with {why(spec)}", **more)


def _are_stages(text: str, most: int) -> bool:
    """Whether a text says how many stages compress, itself or by the name of a rule."""
    return 1 <= int(text) <= most if text.isdecimal() else text in registry.names("stages")


def _one_stage(spec: RunSpec) -> str:
    return f"pipeline.stages={spec.pipeline.stages}"


def _sharded(kind: str) -> str:
    """Return which parts of a kind can act on the shards of arrays, as a fix."""
    found = [name for name in registry.names(kind) if registry.part(kind, name).traits.get("sharded")]
    return f"use {kind} {', '.join(map(repr, found))}, or fsdp=1"


# What several devices per worker need: (what, whether a run has it, the fix).
FSDP_NEEDS = (
    ("stages=1 and tensor=1", lambda spec: spec.devices_of_worker == spec.fsdp, "use either fsdp, or stages and tensor"),
    ("engine 'fused'", lambda spec: spec.engine != "split", "leave engine out"),
    ("workers with a whole model", lambda spec: spec.source is None, "use fsdp=1"),
)

RULES = (
    Rule("workers", lambda spec: spec.workers < 1, lambda spec: " must be at least 1", lambda spec: "use workers=1 or more", True),
    Rule(
        "topology",
        lambda spec: spec.workers == 1,
        lambda spec: " needs at least 2 workers, got 1",
        lambda spec: "use method 'local' for a single worker",
    ),
    Rule(
        "batch_size",
        lambda spec: spec.batch_size < 1 or spec.batch_size % spec.workers,
        lambda spec: f" is not a positive multiple of workers={spec.workers}",
        lambda spec: f"use {' or '.join(map(str, _multiples(spec)))}",
        True,
    ),
    Rule(
        "elastic.min_workers",
        lambda spec: spec.elastic.min_workers > spec.workers,
        lambda spec: f" is more than workers={spec.workers}",
        lambda spec: f"use at most {spec.workers}",
        True,
    ),
    Rule(
        "model.name",
        lambda spec: spec.model and spec.model.name not in _models(spec),
        lambda spec: f" is not a model of task {spec.task.name!r}",
        lambda spec: f"use one of {', '.join(_models(spec))}, or give your own model the trait tasks=({spec.task.name!r},)",
        True,
    ),
    Rule(
        "tensor",
        _undivided,
        lambda spec: f" does not divide model.{_undivided(spec)}={spec.model and spec.model.options[_undivided(spec)]}",
        lambda spec: f"use tensor={math.gcd(spec.model.options[_undivided(spec)] if spec.model else 1, spec.tensor)}",
    ),
    *(
        Rule("fsdp", lambda spec, fits=fits: not fits(spec), lambda spec, needs=needs: f" needs {needs}", lambda spec, fix=fix: fix)
        for needs, fits, fix in FSDP_NEEDS
    ),
    *(
        Rule(
            "fsdp",
            lambda spec, kind=kind: getattr(spec, kind) is not None and not spec.trait(kind, "sharded"),
            lambda spec, kind=kind: f" needs a {kind} that acts on shards",
            lambda spec, kind=kind: _sharded(kind),
        )
        for kind in ("mixer", "reducer")
    ),
    Rule(
        "fsdp",
        lambda spec: not spec.simulate and spec.batch_per_worker % (spec.fsdp * spec.pipeline.microbatches),
        lambda spec: (
            f" does not divide the {spec.batch_per_worker // spec.pipeline.microbatches} examples of a worker's (micro)batch"
        ),
        lambda spec: f"use a batch_size of a multiple of {spec.workers * spec.fsdp * spec.pipeline.microbatches}",
    ),
    _no_effect("across_hosts", lambda spec: spec.fsdp == 1, lambda spec: "fsdp=1"),
    Rule(
        "tensor_codec",
        lambda spec: spec.tensor == 1,
        lambda spec: f" codes sums of the devices of a tensor-parallel group, got tensor=1{' with simulate' * spec.simulate}",
        lambda spec: "leave it empty" if spec.simulate else "use tensor=2, or leave it empty",
    ),
    Rule(
        "tensor_codec",
        lambda spec: spec.model and "product" not in inspect.signature(registry.part("model", spec.model.name).factory).parameters,
        lambda spec: f": model {spec.model and spec.model.name!r} has no parameter product",
        lambda spec: "leave it empty, or give the model one",
    ),
    Rule(
        "method.every",
        lambda spec: _every(spec) > spec.steps,
        lambda spec: f" is more than steps={spec.steps}, so nothing would be exchanged",
        lambda spec: f"use at most {spec.steps}, or method 'local'",
    ),
    Rule(
        "method.strength",
        lambda spec: spec.method.options["strength"] == 0,
        lambda spec: ", so nothing would be mixed",
        lambda spec: "use more than 0 and at most 1, or method 'local'",
    ),
    Rule(
        "reducer.start",
        lambda spec: spec.averaging.start and spec.averaging.start * _every(spec) >= spec.steps,
        lambda spec: f" is not reached in steps={spec.steps}, so the reducer would never be used",
        lambda spec: f"use less than {-(-spec.steps // _every(spec))}, or reducer 'mean'",
    ),
    Rule(
        "reducer.start",
        lambda spec: _warm_steps(spec) and (spec.averaging.start + _warm_steps(spec)) * _every(spec) >= spec.steps,
        lambda spec: (
            f": reducer.{spec.trait('reducer', 'warm_steps')}={_warm_steps(spec)} after it does not end within steps={spec.steps}, so "
            "nothing would be compressed"
        ),
        lambda spec: f"use a shorter {spec.trait('reducer', 'warm_steps')}, or reducer 'mean'",
        True,
    ),
    Rule(
        "reducer.stages",
        lambda spec: not _are_stages(spec.averaging.stages, spec.pipeline.stages),
        lambda spec: (
            f" must be a number from 1 to stages={spec.pipeline.stages}, {', '.join(map(repr, registry.names('stages')))}, or empty for all"
        ),
        lambda spec: "use a number in this range",
    ),
    *(_no_effect(f"reducer.{name}", lambda spec: spec.pipeline.stages == 1, _one_stage) for name in ("stages", "cluster")),
    *(
        _no_effect(f"pipeline.{name}", lambda spec: spec.pipeline.stages == 1, _one_stage)
        for name in plain_fields(Layers)
        if name not in ("stages", "microbatches")
    ),
    *(_no_effect(f"boundary.{name}", lambda spec: spec.pipeline.stages == 1, _one_stage) for name in plain_fields(StageMessages)),
    *(
        _no_effect(
            f"boundary.{name}",
            lambda spec, codec=codec: not getattr(spec.boundary, codec),
            lambda spec, codec=codec: f"boundary.{codec}=''",
        )
        for codec, names in {"backward": ("when", "error"), "forward": ("forward_error", "slots", "reuse_indices")}.items()
        for name in names
    ),
    _no_effect(
        "pipeline.autoencoder_init",
        lambda spec: spec.pipeline.autoencoder == 0,
        lambda spec: "pipeline.autoencoder=0",
        fix=lambda spec: "leave it out, or give a width",
    ),
    Rule(
        "pipeline.delay",
        lambda spec: not spec.optimizer,
        lambda spec: f"{_of_method(spec)}, which is an optimizer itself and cannot take late gradients",
        lambda spec: "leave it out, or use method 'allreduce'",
    ),
    Rule(
        "pipeline.delay",
        lambda spec: _late(spec) >= spec.steps,
        lambda spec: (
            f" with stages={spec.pipeline.stages}: the first stage's gradients come {_late(spec)} steps late, so it would not change in "
            f"steps={spec.steps}"
        ),
        lambda spec: f"use a smaller delay, or more than {_late(spec)} steps",
    ),
    Rule(
        "pipeline.fused_embedding",
        lambda spec: not spec.trait("method", "averages_gradients"),
        lambda spec: f"{_of_method(spec)}, which does not average the gradients of a tied table over workers",
        lambda spec: "leave it out, or use method 'allreduce'",
    ),
    *(
        _no_effect(
            name,
            lambda spec: spec.trait("method", "averages_gradients"),
            lambda spec: f"method {spec.method.name!r}, whose replicas are equal",
        )
        for name in CONSENSUS
    ),
    *(
        Rule(
            name,
            lambda spec: spec.trait("method", "anchored"),
            lambda spec: (
                f": method {spec.method.name!r} would separate the replicas again, since each worker has its own slow parameters"
            ),
        )
        for name in CONSENSUS
    ),
    *(
        _no_effect(name, lambda spec: not _communicates(spec), lambda spec: f"method {spec.method.name!r}, which sends nothing")
        for name in ("bucket_bytes", "local_size")
    ),
    *(
        Rule(
            f"eval.{name}",
            lambda spec, name=name, least=least: spec.trait("task", "evaluated_once") and getattr(spec.eval, name) != least,
            lambda spec: f" has no effect with task {spec.task.name!r}, which has one example for validation",
            always=True,
        )
        for name, least in (("num_windows", 0), ("batch_size", 1))
    ),
)


def check_parts(setup: Setup) -> None:
    """Raise a ValueError for values that do not fit the parts that were made of them."""
    spec, task, method = setup.spec, setup.task, setup.method
    if spec.boundary:
        _check_boundary(setup)
    setup.trace_start()
    if spec.tensor > 1 and not task.divided:
        model = f" with model {spec.model.name!r}" if spec.model else ""
        raise ValueError(f"tensor={spec.tensor}: task {spec.task.name!r}{model} has no parameters to divide; use tensor=1")
    if spec.tensor_codec and task.parts:
        _check_sums(spec, task)
    check_engine(spec.engine, method)
    if spec.simulate and method.between_steps:
        raise ValueError(
            "simulate with measured speed: times of simulated workers do not reflect a network; leave simulate out, or give the "
            "speeds, as reducer.speed='1; 1.8; 3; 4'"
        )


def check_engine(engine: str, method: Method) -> None:
    """Raise a ValueError for engine "split" with a method whose exchange needs the gradient."""
    if engine == "split" and not method.exchange:
        raise ValueError(
            "engine 'split' needs an exchange that does not depend on the gradient: method 'decentralized' "
            "with order 'awc' and a static phase, or 'allreduce' with stale; use engine 'fused'"
        )


def _check_boundary(setup: Setup) -> None:
    """Raise a ValueError if a codec makes messages between stages larger than they are uncompressed."""
    spec = setup.spec
    tokens = setup.task.examples(spec.batch_per_worker // spec.pipeline.microbatches)
    assert setup.source.division is not None  # A boundary implies stages.
    activation = setup.source.division.activation(tokens.shape[0], tokens.shape[1] - 1)
    B, T, D = activation.shape
    for name, ratio in zip(("backward", "forward"), boundary_ratios(spec, (B * T // spec.tensor, D), activation.dtype)):
        if ratio > 1:
            raise ValueError(
                f"boundary.{name}={getattr(spec.boundary, name)!r} makes messages of {ratio:.3g} times the bytes of the "
                f"uncompressed {activation.dtype} values; use a lower rank, fewer bits or values, or leave it empty"
            )


def _check_sums(spec: RunSpec, task: tasks.Task) -> None:
    B, T1 = task.examples(spec.batch_per_worker // spec.pipeline.microbatches).shape
    assert task.parts  # The caller checked.
    x_BxTxD, K = task.parts.activation(B, T1 - 1), spec.tensor
    uncoded_bytes = 2 * (K - 1) / K * x_BxTxD.size * x_BxTxD.dtype.itemsize
    coded_bytes = registry.make("product", "coded", codec=spec.tensor_codec).num_bytes((B * (T1 - 1), x_BxTxD.shape[-1]), K)
    if coded_bytes > uncoded_bytes:
        raise ValueError(
            f"tensor_codec={spec.tensor_codec!r} sends {coded_bytes} bytes for a sum of {x_BxTxD.dtype} values that takes "
            f"{uncoded_bytes:.0f} uncoded; use fewer bits, or leave it empty"
        )
