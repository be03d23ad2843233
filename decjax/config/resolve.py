"""From a config to a checked `RunSpec`; no device of the run is used and no data is read."""

from collections.abc import Mapping, MutableMapping
import copy
import dataclasses
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from decjax import registry
from decjax.config import rules
from decjax.config.spec import CHOICES, SECTIONS, SIMULATED_WORKERS, VERSION, Averaging, Choice, RunSpec, around, plain_fields
from decjax.errors import config_errors


def resolve(
    config: ml_collections.ConfigDict | MutableMapping[str, Any], num_devices: int | None = None, platform: str = "cpu"
) -> RunSpec:
    """Return the run that a config describes: checked, with the numbers of workers and of compressing stages filled in.

    Mixers that derive their strength from a codec try the codec on JAX's default device, so set the device count or join other
    processes first.

    Args:
        config: made by a file such as `configs/lm.py`, or the contents of a config.json.
        num_devices: how many devices `workers=0` fills; None: `SIMULATED_WORKERS`.
        platform: of the devices; on a single one that is not a CPU, the workers of `workers=0` are simulated.

    Raises:
        ConfigError: if the config describes no possible run.
    """
    with config_errors():
        spec = read(config)
        if not spec.workers:
            config = copy.deepcopy(config)  # A deep copy keeps references, so that fields which depend on `workers` follow it.
            config["simulate"] = spec.simulate or (num_devices == 1 and platform != "cpu")
            fitting = (num_devices or SIMULATED_WORKERS) // spec.devices_of_worker
            config["workers"] = SIMULATED_WORKERS if config["simulate"] else max(1, fitting)
            spec = read(config)
        rules.check(spec)
        spec = _with_stages(spec)
        rules.check_parts(spec.setup)
        return spec


def read(config: ml_collections.ConfigDict | Mapping[str, Any]) -> RunSpec:
    """Return the run that a config describes, with each value checked only by itself; `workers` may still be 0 (automatic).

    Raises:
        ConfigError: if a field is missing, unknown, of another type or out of range.
    """
    with config_errors():
        return _spec(_plain(config))


def _with_stages(spec: RunSpec) -> RunSpec:
    """Return the spec with the number of compressing stages in place of the name of a rule that decides it, such as "auto"."""
    rule = spec.averaging.stages
    if not rule or rule.isdecimal():
        return spec
    spec = spec.replace(averaging=dataclasses.replace(spec.averaging, stages=""))
    return spec.replace(averaging=dataclasses.replace(spec.averaging, stages=str(registry.make("stages", rule, spec))))


class Size(NamedTuple):
    """How large a run is.

    Attributes:
        workers: N.
        params: values in the model's parameters.
        tokens: items (tokens, images) that a worker reads in a step.
        fsdp: L, devices of a worker.
    """

    workers: int
    params: int
    tokens: int
    fsdp: int


def size(config: ml_collections.ConfigDict | MutableMapping[str, Any]) -> Size:
    """Return the size of a run, from its config alone: no device is started and no data is read."""
    spec = resolve(config, SIMULATED_WORKERS * read(config).fsdp)
    task = spec.setup.task
    leaves = jax.tree.leaves(jax.eval_shape(lambda: task.init(jax.random.key(0))))
    return Size(spec.workers, sum(leaf.size for leaf in leaves), spec.batch_per_worker * task.items, spec.fsdp)


def message_ratio(codec: str) -> float:
    """Return the bytes of a codec's message ÷ those of its fp32 values, for 2^20 values; a ValueError if the codec is unknown."""
    values = 2**20
    return registry.make("codec", codec).num_bytes((values,), np.float32) / (4 * values)


# -- Reading ----------------------------------------------------------------------------------------------------------


def _plain(config: ml_collections.ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """The config as nested dicts of plain values, with references resolved."""
    try:
        text = config.to_json() if isinstance(config, ml_collections.ConfigDict) else json.dumps(config)
    except TypeError as error:
        raise ValueError(f"the config holds a value that JSON cannot store ({error}); use numbers and texts") from error
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"config={text[:40]} must be a dict of fields; see configs/lm.py")
    if (version := document.pop("version", VERSION)) != VERSION:
        raise ValueError(f"config.version={version}: this decjax reads version {VERSION}; use the decjax that wrote it")
    return document


def _spec(document: dict[str, Any]) -> RunSpec:
    method, task = _part(document, "method"), registry.part("task", _name(document.get("task"), "task"))
    chooses = method.traits.get("chooses", ())
    parts = {"schedule", "method", *chooses} | ({"topology"} if "mixer" in chooses else set())
    parts |= {"model"} if registry.partners("task", task.name, "model") else set()
    plain = plain_fields(RunSpec)
    required = {name for name, option in plain.items() if option.is_required} | parts | {"task", "data"}
    for field in sorted(document.keys() - required - plain.keys() - SECTIONS.keys() - {"source"}):
        raise ValueError(f"config.{field} has no effect with method {method.name!r} and task {task.name!r}; leave it out")
    for field in sorted(required - document.keys()):
        raise ValueError(f"config lacks {field}; add it, as configs/lm.py does")
    values: dict[str, Any] = {kind: _choice(document, kind) if kind in document else None for kind in (*CHOICES, "reducer")}
    if (topology := document.get("topology")) is not None:
        registry.parse("topology", _name(topology, "topology"))
    if reducer := values["reducer"]:
        own = {name: reducer.options[name] for name in around(reducer.name)}
        values["averaging"] = Averaging(**own)
        values["reducer"] = Choice(reducer.name, {name: value for name, value in reducer.options.items() if name not in own})
    return RunSpec(
        task=Choice(task.name, registry.complete("task", task.name, _section(document, "data"))),
        topology=topology,
        **values,
        **registry.fill("", {name: document[name] for name in plain.keys() & document.keys()}, plain),
        **{name: kind(**_filled(name, _section(document, name), kind)) for name, kind in SECTIONS.items()},
    )


def _section(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"config.{name}={registry.shown(section)} must be a section of fields; see configs/lm.py")
    return section


def _filled(name: str, section: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    known = plain_fields(kind)
    if unknown := section.keys() - known.keys():
        raise ValueError(f"{name}.{min(unknown)} is unknown; use {', '.join(known)}")
    return registry.fill(f"{name}.", section, known)


def _name(name: Any, kind: str) -> str:
    if name is None:
        raise ValueError(f"config lacks {kind}; add it, as configs/lm.py does")
    if not isinstance(name, str):
        raise ValueError(
            f"config.{kind}={registry.shown(name)} must be a name; python -m launch.parts {kind.removesuffix('.name')} lists them"
        )
    return name


def _part(document: Mapping[str, Any], kind: str) -> registry.Entry:
    return registry.part(kind, _name(_section(document, kind).get("name"), f"{kind}.name"))


def _choice(document: Mapping[str, Any], kind: str) -> Choice:
    name = _part(document, kind).name
    section = {field: value for field, value in _section(document, kind).items() if field != "name"}
    extra = {field: plain_fields(Averaging)[field] for field in around(name)} if kind == "reducer" else {}
    own = {field: value for field, value in section.items() if field not in extra}
    options = registry.complete(kind, name, own) | registry.fill(f"{kind}.", section, extra)
    for option, value in options.items():
        if option.endswith("dtype") and value is not None and not _is_floating(value):
            raise ValueError(f"{kind}.{option}={registry.shown(value)} must be a floating-point type, such as 'bfloat16'")
    return Choice(name, options)


def _is_floating(dtype: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
