"""From a config to a `RunSpec`, with every check there is; no device is needed, no data is read."""

from collections.abc import Mapping, MutableMapping
import copy
import json
from typing import Any, NamedTuple, TypeVar

import jax
import ml_collections
import numpy as np

from decjax import mesh, registry
from decjax.config import assemble, checks, legacy, sections, selective
from decjax.config.spec import AUTO, SIMULATED_WORKERS, Averaging, Choice, Layers, Periodic, RunSpec, Saving
from decjax.errors import ConfigError

PLAIN = tuple(
    "seed steps workers local_size simulate batch_size tensor clip_norm engine bucket_bytes consensus_every log_every task".split()
)
Group = TypeVar("Group", Periodic, Saving)
GROUPS = {"eval": Periodic, "checkpoint": Saving}


def resolve(
    config: ml_collections.ConfigDict | MutableMapping[str, Any], num_devices: int | None = None, lone_accelerator: bool = False
) -> RunSpec:
    """Checks a config and decides all that is automatic in it.

    Args:
        config: as `configs/lm.py` makes it, or a config.json of any version.
        num_devices: that `workers=0` is to fill; None: `SIMULATED_WORKERS`.
        lone_accelerator: whether there is exactly one, on which `workers=0` are simulated.

    Returns:
        The `RunSpec`.

    Raises:
        ConfigError: in one line: the value, the constraint and the fix.
    """
    try:
        spec = read(config)
        if not spec.workers:
            config = copy.deepcopy(config)  # References included, so that fields which follow `workers` do.
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
    """A config's values, each checked by itself; `workers` may be 0.

    Args:
        config: as `configs/lm.py` makes it, or a config.json of any version.

    Raises:
        ConfigError: in one line: the value, the constraint and the fix.
    """
    try:
        return _spec(legacy.modern(_plain(config)))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _plain(config: Any) -> dict[str, Any]:
    """Nested dicts of plain values, references followed."""
    try:
        text = config.to_json() if isinstance(config, ml_collections.ConfigDict) else json.dumps(config)
    except TypeError as error:
        raise ValueError(f"the config holds what no file can hold ({error}); use numbers and words") from error
    if not isinstance(found := json.loads(text), dict):
        raise ValueError(f"config={text[:40]} must be a dict of fields; see configs/lm.py")
    return found


class Size(NamedTuple):
    """How large a run is."""

    workers: int
    params: int  # values
    tokens: int  # that a worker reads in a step


def size(config: Any) -> Size:
    """The size of a run from its config alone: no device is started, no data is read."""
    spec = resolve(config)
    setup = assemble.assemble(spec._replace(tensor=1), mesh.simulated_workers)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: setup.task.init(jax.random.key(0))))
    return Size(spec.workers, sum(leaf.size for leaf in leaves), spec.each * setup.task.items)


def message_ratio(codec: str) -> float:
    """Bytes of a codec's message ÷ bytes of its float32 values; ValueError naming the codecs there are."""
    values = 2**20
    return registry.make("codec", codec).num_bytes((values,), np.float32) / (4 * values)


# -- Reading ----------------------------------------------------------------------------------------------------------


def _spec(document: dict[str, Any]) -> RunSpec:
    """The document's values, each checked by itself."""
    checks.check_numbers(document)
    method = registry.part("method", _name(document, "method"))
    chooses = method.traits.get("chooses", ())
    expected = {
        *PLAIN,
        *GROUPS,
        "data",
        "schedule",
        "method",
        "pipeline",
        *(kind for kind in ("optimizer", "reducer") if kind in chooses),
        *(("mixer", "topology") if "mixer" in chooses else ()),
    }
    task = registry.part("task", _field(document, "config", "task", str))
    expected |= {"model"} if task.traits.get("models") else set()
    for field in sorted(document.keys() - expected - {"boundary"}):
        raise ValueError(f"config.{field} changes nothing with method {method.name!r} and task {task.name!r}; leave it out")
    for field in sorted(expected - document.keys()):
        raise ValueError(f"config lacks {field}; a config holds every field, see configs/lm.py")
    layers = _layers(_section(document, "pipeline"))
    chosen = {
        kind: _choice(document, kind, layers.stages)
        for kind in ("model", "schedule", "optimizer", "method", "mixer")
        if kind in expected
    }
    task_choice = Choice(task.name, sections.check("task", task.name, _section(document, "data")))
    spec = RunSpec(
        document={},
        **{name: _field(document, "config", name, RunSpec.__annotations__[name]) for name in PLAIN if name != "task"},
        task=task_choice,
        model=chosen.get("model"),
        schedule=chosen["schedule"],
        optimizer=chosen.get("optimizer"),
        method=chosen["method"],
        topology=_topology(document["topology"]) if "topology" in expected else None,
        mixer=chosen.get("mixer"),
        averaging=_averaging(document, layers.stages) if "reducer" in expected else None,
        pipeline=layers,
        boundary=_boundary(document.get("boundary"), layers.stages),
        **{name: _group(_section(document, name), name, kind) for name, kind in GROUPS.items()},
    )
    return spec._replace(document=_document(spec))


def _document(spec: RunSpec) -> dict[str, Any]:
    """What config.json holds."""

    def named(choice):
        return {"name": choice.name, **choice.options}

    document = {name: getattr(spec, name) for name in PLAIN} | {"task": spec.task.name, "data": dict(spec.task.options)}
    document |= {
        kind: named(choice) for kind in ("model", "schedule", "optimizer", "method", "mixer") if (choice := getattr(spec, kind))
    }
    if spec.topology:
        document["topology"] = spec.topology
    if averaging := spec.averaging:
        known = sections.fields("reducer", averaging.reducer.name, spec.pipeline.stages)
        around = {name: getattr(averaging, name) for name in ("start", "stages", "cluster") if name in known}
        document["reducer"] = named(averaging.reducer) | around
    shown = Layers._fields if spec.pipeline.stages > 1 else ("stages", "microbatches")
    document["pipeline"] = {name: getattr(spec.pipeline, name) for name in shown}
    if spec.boundary:
        document["boundary"] = dict(spec.boundary)
    return json.loads(json.dumps(document | {"eval": spec.eval._asdict(), "checkpoint": spec.checkpoint._asdict()}))


def _section(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"config.{name}={registry.shown(found)} must be a section of fields; see configs/lm.py")
    return found


def _field(section: Mapping[str, Any], name: str, field: str, kind: type) -> Any:
    path = field if name == "config" else f"{name}.{field}"
    if field not in section:
        raise ValueError(f"config lacks {path}; a config holds every field, see configs/lm.py")
    return registry.checked(path, section[field], registry.Option(kind(), kind, False))


def _group(section: Mapping[str, Any], name: str, kind: type[Group]) -> Group:
    """A section of whole numbers."""
    if unknown := section.keys() - set(kind._fields):
        raise ValueError(f"{name}.{min(unknown)} is unknown; use {', '.join(kind._fields)}")
    return kind(**{field: _field(section, name, field, int) for field in kind._fields})


def _name(document: Mapping[str, Any], kind: str) -> str:
    name = _section(document, kind).get("name")
    if not isinstance(name, str):
        raise ValueError(f"config.{kind}.name={registry.shown(name)} must be a name; python -m launch.parts {kind} lists them")
    return name


def _choice(document: Mapping[str, Any], kind: str, stages: int) -> Choice:
    name, options = _name(document, kind), dict(_section(document, kind))
    del options["name"]
    return Choice(name, sections.check(kind, name, options, stages))


def _averaging(document: Mapping[str, Any], stages: int) -> Averaging:
    name, given = _choice(document, "reducer", stages)
    options = dict(given)
    around = {field: options.pop(field) for field in ("start", "stages", "cluster") if field in options}
    return Averaging(Choice(name, options), **around)


def _topology(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(
            f"topology={registry.shown(text)} must be a name, as 'ring' or 'base_k(k=2)'; python -m launch.topologies lists them"
        )
    registry.parse("topology", text)
    return text


def _layers(given: dict[str, Any]) -> Layers:
    known = {name: registry.Option(default, type(default), False) for name, default in Layers._field_defaults.items()}
    values = _checked("pipeline", given, known)
    if values["stages"] == 1 and (idle := [name for name in given if name not in ("stages", "microbatches")]):
        raise ValueError(f"pipeline.{idle[0]}={given[idle[0]]!r} changes nothing with pipeline.stages=1; leave it out")
    return Layers(**values)


BACKWARD = {
    "backward": registry.Option("", str, False),
    "when": registry.Option("epilogue", str, False),
    "error": registry.Option("carry", str, False),
}
FORWARD = {
    "forward": registry.Option("", str, False),
    "forward_error": registry.Option("none", str, False),
    "slots": registry.Option(0, int, False),
    "reuse_indices": registry.Option(False, bool, False),
}


def _boundary(given: dict[str, Any] | None, stages: int) -> dict[str, Any] | None:
    """Options of messages between stages: of gradients, of activations, or of both."""
    if not given:
        return None
    if stages == 1:
        raise ValueError("config.boundary holds forms of messages between stages, got pipeline.stages=1; leave it out")
    known = {
        name: entry
        for kind, entries in (("backward", BACKWARD), ("forward", FORWARD))
        if given.get(kind)
        for name, entry in entries.items()
    }
    return _checked(
        "boundary", {name: value for name, value in given.items() if value != "" or name not in ("backward", "forward")}, known
    )


def _checked(what: str, given: Mapping[str, Any], known: Mapping[str, registry.Option]) -> dict[str, Any]:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{what}.{unknown[0]} is unknown here; use some of {', '.join(known) or 'none'}")
    return {
        name: registry.checked(f"{what}.{name}", given[name], entry) if name in given else entry.default
        for name, entry in known.items()
    }


# -- Building -----------------------------------------------------------------------------------------------------------


def _check_parts(spec: RunSpec) -> RunSpec:
    """Builds every part for workers that are simulated, looks whether shapes fit, and decides which stages compress."""
    one_device = spec if spec.simulate else spec._replace(tensor=1)
    if spec.averaging and spec.averaging.stages == AUTO:
        setup = assemble.assemble(one_device._replace(averaging=spec.averaging._replace(stages="")), mesh.simulated_workers)
        averaging = spec.averaging._replace(stages=str(selective.choose(spec, setup)))
        spec, one_device = spec._replace(averaging=averaging), one_device._replace(averaging=averaging)
        spec = spec._replace(document=_document(spec))
    setup = assemble.assemble(one_device, mesh.simulated_workers)
    checks.check_engine(spec.engine, setup.method)
    selective.check_boundary(spec, setup)
    assemble.trace_start(setup)
    return spec
