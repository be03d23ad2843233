"""From a config to a checked `RunSpec`; no device of the run is used and no data is read."""

from collections.abc import Mapping, MutableMapping
import copy
import json
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from decjax import registry
from decjax.config import assemble, checks, legacy, sections, selective
from decjax.config.spec import AUTO, CHOICES, GROUPS, PLAIN, SIMULATED_WORKERS, Averaging, Choice, Layers, RunSpec
from decjax.errors import ConfigError


def resolve(
    config: ml_collections.ConfigDict | MutableMapping[str, Any], num_devices: int | None = None, lone_accelerator: bool = False
) -> RunSpec:
    """The run that a config describes: checked, with the numbers of workers and of compressing stages filled in.

    Mixers that derive their strength from a codec try the codec on JAX's default device. Who chooses the number of devices, or joins
    other processes by jax.distributed, does so before.

    Args:
        config: as `configs/lm.py` makes it, or a config.json of any version.
        num_devices: how many devices `workers=0` fills; None: `SIMULATED_WORKERS`.
        lone_accelerator: whether there is exactly one accelerator, on which the workers of `workers=0` are simulated.

    Raises:
        ConfigError: if the config describes no possible run.
    """
    try:
        spec = read(config)
        if not spec.workers:
            config = copy.deepcopy(config)  # A deep copy keeps references, so that fields which depend on `workers` follow it.
            config["simulate"] = spec.simulate or lone_accelerator
            fitting = (num_devices or SIMULATED_WORKERS) // spec.devices_of_worker
            config["workers"] = SIMULATED_WORKERS if config["simulate"] else max(1, fitting)
            spec = read(config)
        checks.check_together(spec)
        return _check_parts(spec)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(f"a number in the config is too large ({error}); use smaller sizes") from error


def read(config: ml_collections.ConfigDict | Mapping[str, Any]) -> RunSpec:
    """The run that a config describes, with each value checked only by itself; `workers` may still be 0 (automatic).

    Raises:
        ConfigError: if a field is missing, unknown, of another type or out of range.
    """
    try:
        return _spec(legacy.modern(_plain(config)))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _plain(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values, with references resolved."""
    try:
        text = config.to_json() if isinstance(config, ml_collections.ConfigDict) else json.dumps(config)
    except TypeError as error:
        raise ValueError(f"the config holds a value that JSON cannot store ({error}); use numbers and texts") from error
    if not isinstance(found := json.loads(text), dict):
        raise ValueError(f"config={text[:40]} must be a dict of fields; see configs/lm.py")
    return found


class Size(NamedTuple):
    """How large a run is.

    Attributes:
        workers: N.
        params: values in the model's parameters.
        tokens: items (tokens, images) that a worker reads in a step.
    """

    workers: int
    params: int
    tokens: int


def size(config: Any) -> Size:
    """The size of a run, from its config alone: no device is started and no data is read."""
    spec = resolve(config)
    task = assemble.on_paper(spec).task
    leaves = jax.tree.leaves(jax.eval_shape(lambda: task.init(jax.random.key(0))))
    return Size(spec.workers, sum(leaf.size for leaf in leaves), spec.each * task.items)


def message_ratio(codec: str) -> float:
    """Bytes of a codec's message ÷ bytes of its float32 values, for an array of 2^20; a ValueError if the codec is unknown."""
    values = 2**20
    return registry.make("codec", codec).num_bytes((values,), np.float32) / (4 * values)


# -- Reading ----------------------------------------------------------------------------------------------------------


def _spec(document: dict[str, Any]) -> RunSpec:
    """The `RunSpec` of a config in today's form, with each value checked by itself."""
    checks.check_values(document)
    method = registry.part("method", _name(document, "method"))
    task = registry.part("task", _field("task", document, str))
    chooses = method.traits.get("chooses", ())
    expected = {*PLAIN, *GROUPS, *chooses, "task", "data", "schedule", "method", "pipeline"}
    expected |= {"topology"} if "mixer" in chooses else set()
    expected |= {"model"} if registry.partners("task", task.name, "model") else set()
    for field in sorted(document.keys() - expected - {"boundary", "tables"}):
        raise ValueError(f"config.{field} changes nothing with method {method.name!r} and task {task.name!r}; leave it out")
    for field in sorted(expected - document.keys()):
        raise ValueError(f"config lacks {field}; a config holds every field, see configs/lm.py")
    layers = _layers(_section(document, "pipeline"))
    chosen: dict[str, Any] = {kind: _choice(document, kind) if kind in expected else None for kind in CHOICES}
    return RunSpec(
        **chosen,
        task=Choice(task.name, sections.check("task", task.name, _section(document, "data"))),
        **{name: _field(name, document, RunSpec.__annotations__[name]) for name in PLAIN},
        topology=_topology(document["topology"]) if "topology" in expected else None,
        averaging=_averaging(document, layers.stages) if "reducer" in expected else None,
        pipeline=layers,
        boundary=_boundary(_section(document, "boundary"), layers.stages),
        tables=sections.tables(_section(document, "tables")) if "tables" in document else None,
        **{name: _group(_section(document, name), name, RunSpec.__annotations__[name]) for name in GROUPS},
    )


def _section(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"config.{name}={registry.shown(found)} must be a section of fields; see configs/lm.py")
    return found


def _field(path: str, section: Mapping[str, Any], kind: type) -> Any:
    field = path.rpartition(".")[2]
    if field not in section:
        raise ValueError(f"config lacks {path}; a config holds every field, see configs/lm.py")
    return registry.checked(path, section[field], registry.Option(kind(), kind, False))


def _group(section: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """A section as a named tuple of type `kind`, whose defaults fill in what an older file lacks."""
    if unknown := section.keys() - set(kind._fields):
        raise ValueError(f"{name}.{min(unknown)} is unknown; use {', '.join(kind._fields)}")
    given = [field for field in kind._fields if field in section or field not in kind._field_defaults]
    return kind(**{field: _field(f"{name}.{field}", section, kind.__annotations__[field]) for field in given})


def _name(document: Mapping[str, Any], kind: str) -> str:
    name = _section(document, kind).get("name")
    if not isinstance(name, str):
        raise ValueError(f"config.{kind}.name={registry.shown(name)} must be a name; python -m launch.parts {kind} lists them")
    return name


def _choice(document: Mapping[str, Any], kind: str, stages: int = 1) -> Choice:
    name = _name(document, kind)
    given = {field: value for field, value in _section(document, kind).items() if field != "name"}
    return Choice(name, sections.check(kind, name, given, stages))


def _averaging(document: Mapping[str, Any], stages: int) -> Averaging:
    name, options = _choice(document, "reducer", stages)
    around = sections.around("reducer", name, stages)
    own = {field: value for field, value in options.items() if field not in around}
    return Averaging(Choice(name, own), **{field: options[field] for field in around})


def _topology(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(
            f"topology={registry.shown(text)} must be a name, as 'ring' or 'base_k(k=2)'; python -m launch.topologies lists them"
        )
    registry.parse("topology", text)
    return text


def _layers(given: dict[str, Any]) -> Layers:
    values = sections.fill("pipeline", given, Layers._field_defaults)
    if values["stages"] == 1 and (idle := [name for name in given if name not in ("stages", "microbatches")]):
        raise ValueError(f"pipeline.{idle[0]}={given[idle[0]]!r} changes nothing with pipeline.stages=1; leave it out")
    return Layers(**values)


def _boundary(given: dict[str, Any], stages: int) -> dict[str, Any] | None:
    """The options of compressed messages between stages, for gradients, activations or both; None if nothing is compressed."""
    if not given:
        return None
    if stages == 1:
        raise ValueError("config.boundary compresses messages between stages, got pipeline.stages=1; leave it out")
    known = {field: value for kind, usual in sections.BOUNDARY.items() if given.get(kind) for field, value in usual.items()}
    own = {name: value for name, value in given.items() if value != "" or name not in sections.BOUNDARY}
    return sections.fill("boundary", own, known)


def _check_parts(spec: RunSpec) -> RunSpec:
    """The spec with "auto" stages decided, after building every part with simulated workers and checking that shapes fit."""
    if spec.averaging and spec.averaging.stages == AUTO:
        in_all = spec._replace(averaging=spec.averaging._replace(stages=""))
        count = selective.choose(spec, assemble.on_paper(in_all))
        spec = spec._replace(averaging=spec.averaging._replace(stages=str(count)))
    setup = assemble.on_paper(spec)
    checks.check_divided(spec, setup.task)
    checks.check_sums(spec, setup.task)
    checks.check_engine(spec.engine, setup.method)
    checks.check_timing(spec, setup.method)
    selective.check_boundary(spec, setup)
    checks.check_needs(spec)
    assemble.trace_start(setup)
    return spec
