"""The base of all configs: workers, method, pipeline, and how often the run logs, evaluates and saves.

A shorthand sets plain fields (`python -m launch.parts config` lists them), names parts (`launch.parts` lists them), which may have
options in brackets, such as `mixer=choco(codec=int4,gamma=0.5)`, and sets single options of the chosen parts, such as `codec=int4`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from configs import shorthand
from decjax import config as parts
from decjax import registry

PLACES = ("method", "mixer", "reducer", "optimizer", "model", "data", "source")  # sections that take an option by its name


def get_config(
    given: Mapping[str, Any],
    *,
    task: str,
    data: Mapping[str, Any] | None = None,
    model: ml_collections.ConfigDict | None = None,
    source: ml_collections.ConfigDict | None = None,
    own: tuple[str, ...] = (),
    steps: int,
    batch: int,
    clip_norm: float,
    tuned: Callable[[str, str, str], Mapping[str, float]],
    tuned_workers: int = 8,
    schedule: str = "cosine",
    warmup_steps: int = 0,
    defaults: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ml_collections.ConfigDict:
    """Return the config of a run; a ValueError if the shorthand names a part or option that does not fit the others.

    Args:
        given: the parsed shorthand.
        task: name of the task.
        data: options of the task.
        model: the section of the model, if the task has a choice of models.
        source: the section of the gradient source, unless it is the whole model or its stages.
        own: keys of the shorthand that the config file itself uses.
        steps: length of the run, unless the shorthand gives it.
        batch: examples in a worker's microbatch.
        clip_norm: largest norm of each worker's local gradient; 0: no clipping.
        tuned: `tuned(method, order, optimizer)`, a dict with the learning rate and weight decay for this task.
        tuned_workers: number of workers of `batch` examples for which the rates were tuned; `scale` is relative to it.
        schedule: of the learning rate.
        warmup_steps: of the learning rate; a tenth of the run at most, and one step at least where the schedule needs it.
        defaults: names of parts that replace the defaults, such as method="allreduce".
        options: further options of the optimizer.
    """
    config = _plain(given, own, steps=steps, batch=batch, clip_norm=clip_norm)
    config.update({name: section for name, section in {"model": model, "source": source}.items() if section})
    config.task, config.data = task, parts.section("task", task, **(data or {}))
    names = _choose(config, given, dict(defaults or {}), options or {})
    left = {key: field for key, field in _left(given, own).items() if not _placed(config, given, key, field, PLACES[:3])}
    like: str = registry.part("method", config.method.name).traits.get("like", "adamw")  # the optimizer that the method resembles
    optimizer = names.get("optimizer", like).partition("(")[0]
    learning = dict(tuned(config.method.name, config.method.get("order", ""), optimizer))
    learning_rate = learning.pop("learning_rate")
    if "optimizer" in names:
        config.optimizer = parts.choose("optimizer", names["optimizer"], **(options or {}), **learning)
    else:  # The method is an optimizer itself.
        config.method.update(learning)
    warmup_steps = max(min(warmup_steps, config.steps // 10), int(schedule == "inverse_sqrt"))
    config.schedule = parts.choose(
        "schedule", schedule, learning_rate=learning_rate, warmup_steps=warmup_steps, final_fraction=0.05
    )
    if "scale" in given:
        config.schedule.learning_rate = _scaled(learning_rate, config, tuned_workers * batch, given["scale"])
    _place(config, given, left)
    return config


def _plain(
    given: Mapping[str, Any], own: tuple[str, ...], *, steps: int, batch: int, clip_norm: float
) -> ml_collections.ConfigDict:
    """Return a config with all plain fields: the defaults, changed by the shorthand."""
    smoke, config = given.get("smoke", False), parts.defaults()
    workers = ml_collections.FieldReference(given.get("workers", 0))
    config.workers = workers  # 0: one per device; 8 simulated ones on a lone accelerator
    config.steps, config.clip_norm = steps, clip_norm
    every = 10 if smoke else 500
    config.log_every, config.eval.every, config.checkpoint.every = 5 if smoke else 10, every, every
    config.eval.num_windows = 16 if smoke else 128
    if given.get("schedule") == "interleaved":
        config.pipeline.chunks = 2
    for key, section, name, _ in parts.shorthand_keys():
        if key in given and key not in ("workers", *own) and section != "reducer":
            setattr(getattr(config, section) if section else config, name, given[key])
    if "batch_size" not in given:
        config.batch_size = workers * (batch * config.pipeline.microbatches)  # examples per step, over all workers
    return config


def _left(given: Mapping[str, Any], own: tuple[str, ...]) -> dict[str, str]:
    """Return the option of a part for each key that is neither a plain field of a run nor one of the config file's own keys."""
    averaging = {key: name for key, section, name, _ in parts.shorthand_keys() if section == "reducer"}
    known = shorthand.keys({})
    return {key: averaging.get(key, key) for key in given if key not in own and (key not in known or key in averaging)}


def by_optimizer(
    known: Mapping[str, tuple[float, float]], others: tuple[float, float]
) -> Callable[[str, str, str], dict[str, float]]:
    """Return the function `tuned` of a task whose learning rate and weight decay depend on the optimizer only."""

    def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
        return dict(zip(("learning_rate", "weight_decay"), known.get(optimizer, others), strict=True))

    return tuned


def _scaled(learning_rate: float, config: ml_collections.ConfigDict, tuned_batch: int, scale: str) -> object:
    """Return the learning rate times (global batch ÷ `tuned_batch`), or times its square root, as a reference to `batch_size`."""
    ratio = config.get_ref("batch_size").to_float() / float(tuned_batch)
    root = (ratio**2) ** 0.25  # also of a negative batch size, which is refused later
    return (ratio if scale == "linear" else root) * learning_rate


def _choose(
    config: ml_collections.ConfigDict, given: Mapping[str, Any], defaults: dict[str, str], own: Mapping[str, Any]
) -> dict[str, str]:
    """Add the sections of method, mixer, topology and reducer to the config; return the names of all parts."""
    names = {kind: given[kind] for kind in ("method", "mixer", "reducer", "optimizer") if kind in given}
    if "mixer" in names and (method := _trait("mixer", names["mixer"], "method")):
        names.setdefault("method", method)
    method = names.setdefault("method", defaults.get("method", "decentralized"))
    chooses = _trait("method", method, "chooses") or ()
    for kind in ("mixer", "reducer", "optimizer", "topology"):
        needed = "mixer" if kind == "topology" else kind
        if needed not in chooses and kind in given:
            others = "|".join(name for name in registry.names("method") if needed in (_trait("method", name, "chooses") or ()))
            raise ValueError(
                f"shorthand {kind}={given[kind]} has no effect with method={method}; leave it out, or use method={others}"
            )
    order = None
    if "mixer" in chooses:
        names.setdefault("mixer", _trait("method", method, "default_mixer") or defaults.get("mixer", "exact"))
        config.mixer = parts.choose("mixer", names["mixer"])
        graph = _trait("mixer", names["mixer"], "graph") or _trait("method", method, "default_topology")
        config.topology = given.get("topology", graph or defaults.get("topology", "one_peer_exponential"))
        order = _trait("mixer", names["mixer"], "order")
    smoke = given.get("smoke") and "reducer" in chooses
    if "reducer" in chooses:
        names.setdefault("reducer", _trait("method", method, "default_reducer") or "mean")
        start = {"start": config.steps // 6} if _trait("method", method, "warm") else {}
        config.reducer = parts.choose("reducer", names["reducer"], **start)
        if "optimizer" in chooses and (optimizer := _trait("reducer", names["reducer"], "optimizer")):
            names.setdefault("optimizer", optimizer)
        if smoke and (option := _trait("reducer", names["reducer"], "warm_steps")):
            config.reducer[option] = 2
    usual = {**({} if "optimizer" in chooses else own), **({"every": 5} if smoke else {}), **({"order": order} if order else {})}
    config.method = parts.choose("method", method, **usual)
    if "optimizer" in chooses:
        names.setdefault("optimizer", defaults.get("optimizer", "adamw"))
    return names


def _trait(kind: str, name: str, trait: str) -> Any:
    """Return a trait of the part in a call form, such as the mixer that a method needs; None if it has none."""
    return registry.part(kind, name.partition("(")[0]).traits.get(trait)


def _place(config: ml_collections.ConfigDict, given: Mapping[str, Any], left: Mapping[str, str]) -> None:
    """Set the options that a shorthand gives by their names; refuse those that no chosen part has."""
    for key, field in left.items():
        if not _placed(config, given, key, field, PLACES):
            _refuse(config, key, given[key], field)


def _placed(config: ml_collections.ConfigDict, given: Mapping[str, Any], key: str, field: str, places: tuple[str, ...]) -> bool:
    """Set an option that a shorthand gives by its name in the first of some sections that has it; return whether one has."""
    section = next((name for name in places if name in config and field in getattr(config, name) and field != "name"), "")
    if not section:
        return False
    if (text := given.get(section)) and section in shorthand.KINDS and field in registry.parse(section, text)[1]:
        raise ValueError(f"shorthand {key}={given[key]}: {section}={text} has it, too; leave one out")
    kind, name = ("task", config.task) if section == "data" else (section, getattr(config, section).name)
    option = registry.part(kind, name).options.get(field)
    is_text = option and isinstance(given[key], str)
    getattr(config, section)[field] = shorthand.from_text(key, given[key], option) if option and is_text else given[key]
    return True


def _refuse(config: ml_collections.ConfigDict, key: str, value: object, field: str) -> None:
    """Raise a ValueError for an option that no chosen part has: a run with an ignored `codec` would not be compressed."""
    kinds = {name: "task" if name == "data" else name for name in PLACES}
    having = [
        name for name, kind in kinds.items() if any(field in registry.part(kind, part).options for part in registry.names(kind))
    ]
    if not having and field == key:
        raise ValueError(f"shorthand key {key!r} is unknown; use some of {', '.join(shorthand.keys({}))}, or an option of a part")
    chosen = [name for name in ("method", *having) if name in config]
    parts_of = {name: config.task if name == "data" else getattr(config, name).name for name in chosen}
    raise ValueError(
        f"shorthand {key}={value or True} has no effect with "
        f"{' and '.join(f'{kinds[name]} {part!r}' for name, part in parts_of.items())}; leave it out, or choose a part that has {field}: "
        "python -m launch.parts lists them"
    )
