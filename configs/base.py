"""What all configs share: workers, method, pipeline, and how often the run logs, evaluates and saves.

A shorthand names parts (`python -m launch.parts` lists them) and may give their options in brackets, such as
`mixer=choco(codec=int4,gamma=0.5)` or `optimizer=lion(b1=0.95)`. The sections of a config hold exactly the options of its parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from decjax import config as parts
from decjax import registry

KEYS = dict(
    workers=int,
    local_size=int,
    simulate=bool,
    steps=int,
    smoke=bool,
    method=str,
    optimizer=str,
    topology=str,
    mixer=str,
    reducer=str,
    order=str,
    codec=str,
    rank=int,
    every=int,
    stale=bool,
    engine=("auto", "fused", "split"),
    scale=("linear", "sqrt"),
)
PIPELINE_KEYS = dict(
    stages=int,
    tensor=int,
    tensor_codec=str,
    microbatches=int,
    schedule=str,
    chunks=int,
    remat=bool,
    backward=str,
    forward=str,
    autoencoder=int,
    autoencoder_init=("random", "pca"),
    fused=bool,
    compressed=str,
    delay=int,
)
PLACES = dict.fromkeys(("order", "every", "stale"), ("method",)) | dict.fromkeys(("codec", "rank"), ("mixer", "reducer"))
STAGED = dict(
    schedule="schedule",
    chunks="chunks",
    remat="remat",
    autoencoder="autoencoder",
    autoencoder_init="autoencoder_init",
    fused="fused_embedding",
    delay="delay",
)
CONSENSUS = dict(consensus_every=0, consensus_first=0, consensus_last=0)
PLAIN = dict(seed=0, local_size=1, simulate=False, tensor=1, tensor_codec="", engine="auto", bucket_bytes=2**18) | CONSENSUS


def get_config(
    given: Mapping[str, Any],
    *,
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
    """The part of a config that does not depend on the task; the config file adds task, data and model.

    Args:
        given: the parsed shorthand.
        steps: length of the run, unless the shorthand gives it.
        batch: examples in a worker's microbatch.
        clip_norm: largest norm of each worker's own gradient; 0: no clipping.
        tuned: `tuned(method, order, optimizer)`, a dict with the learning rate and weight decay for this task.
        tuned_workers: the rates are for so many workers of `batch` examples; `scale` multiplies by 1 there.
        schedule: of the learning rate.
        warmup_steps: of the learning rate; a tenth of the run at most, and one step at least where the schedule needs it.
        defaults: names of parts that replace the usual ones, such as method="allreduce".
        options: further options of the optimizer.

    Raises:
        ValueError: if the shorthand names a part or option that does not fit the others.
    """
    smoke = given.get("smoke", False)
    config = ml_collections.ConfigDict(PLAIN | {name: given[name] for name in PLAIN.keys() & given.keys()})
    workers = ml_collections.FieldReference(given.get("workers", 0))
    config.workers = workers  # 0: one per device; 8 simulated ones on a lone accelerator
    config.steps = given.get("steps", steps)
    config.clip_norm = clip_norm
    _pipeline(config, given)
    config.batch_size = workers * (batch * config.pipeline.microbatches)  # examples per step, over all workers
    names = _parts(config, given, dict(defaults or {}), options or {})
    like: str = registry.part("method", config.method.name).traits.get("like", "adamw")  # what the method itself is like
    optimizer = names.get("optimizer", like).partition("(")[0]
    learning: dict[str, Any] = dict(tuned(config.method.name, config.method.get("order", ""), optimizer))
    learning_rate = learning.pop("learning_rate")
    if "optimizer" in names:
        config.optimizer = parts.choose("optimizer", names["optimizer"], **options or {}, **learning)
    else:  # The method is an optimizer itself.
        config.method.update(learning)
    warmup_steps = max(min(warmup_steps, config.steps // 10), int(schedule == "inverse_sqrt"))
    config.schedule = parts.choose(
        "schedule", schedule, learning_rate=learning_rate, warmup_steps=warmup_steps, final_fraction=0.05
    )
    if "scale" in given:
        config.schedule.learning_rate = _scaled(learning_rate, config, tuned_workers * batch, given["scale"])
    config.log_every = 5 if smoke else 10
    every = 10 if smoke else 500
    config.eval = dict(every=every, num_windows=16 if smoke else 128, batch_size=8, local=True)  # 0 windows: all
    config.checkpoint = dict(every=every, keep=2)
    config.elastic = parts.Elastic()._asdict()
    return config


def by_optimizer(
    known: Mapping[str, tuple[float, float]], others: tuple[float, float]
) -> Callable[[str, str, str], dict[str, float]]:
    """`tuned` of a task where learning rate and weight decay depend on the optimizer only: those of the `known` ones, and of `others`."""

    def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
        return dict(zip(("learning_rate", "weight_decay"), known.get(optimizer, others), strict=True))

    return tuned


def _scaled(learning_rate: float, config: ml_collections.ConfigDict, tuned_batch: int, scale: str) -> Any:
    """The learning rate times (global batch ÷ `tuned_batch`), or times its square root; follows `batch_size`."""
    ratio = config.get_ref("batch_size").to_float() / float(tuned_batch)
    root = (ratio**2) ** 0.25  # Of a negative batch size, too, which has its own error.
    return (ratio if scale == "linear" else root) * learning_rate


def _parts(
    config: ml_collections.ConfigDict, given: Mapping[str, Any], defaults: dict[str, str], own: Mapping[str, Any]
) -> dict[str, str]:
    """Adds the sections of method, mixer, topology and reducer to the config; returns the names of all parts."""
    names = {kind: given[kind] for kind in ("method", "mixer", "reducer", "optimizer") if kind in given}

    if "mixer" in names and (method := _wants("mixer", names["mixer"], "method")):
        names.setdefault("method", method)
    method = names.setdefault("method", defaults.get("method", "decentralized"))
    chooses = _wants("method", method, "chooses") or ()
    for kind in ("mixer", "reducer", "optimizer", "topology"):
        needed = "mixer" if kind == "topology" else kind
        if needed not in chooses and kind in given and kind in ("topology", *names):
            others = "|".join(name for name in registry.names("method") if needed in (_wants("method", name, "chooses") or ()))
            raise ValueError(
                f"config argument {kind}={given[kind]} changes nothing with method={method}; leave it out, or use method={others}"
            )
    if "mixer" in chooses:
        names.setdefault("mixer", _wants("method", method, "mixer") or defaults.get("mixer", "exact"))
        config.mixer = parts.choose("mixer", names["mixer"])
        graph = _wants("mixer", names["mixer"], "topology") or _wants("method", method, "topology")
        graph = graph or defaults.get("topology", "one_peer_exponential")
        config.topology = given.get("topology", graph)
    if "reducer" in chooses:
        names.setdefault("reducer", _wants("method", method, "reducer") or "mean")
        start = {"start": config.steps // 6} if _wants("method", method, "warm") else {}
        config.reducer = parts.choose("reducer", names["reducer"], config.pipeline.stages, **start)
        if "optimizer" in chooses and (optimizer := _wants("reducer", names["reducer"], "optimizer")):
            names.setdefault("optimizer", optimizer)
    if "compressed" in given:
        argument = f"config argument compressed={given['compressed']}"
        if "reducer" not in chooses:
            raise ValueError(f"{argument} changes nothing with method={method}; leave it out")
        if "stages" not in config.reducer:
            raise ValueError(
                f"{argument} says which stages compress; use it with stages=2 or more and a reducer that compresses, as "
                "reducer=powersgd"
            )
        config.reducer.stages = given["compressed"]
    smoke = dict(every=5) if given.get("smoke") and "reducer" in chooses else {}
    order = _wants("mixer", names["mixer"], "order") if "mixer" in chooses else None
    usual = {**({} if "optimizer" in chooses else own), **smoke, **({"order": order} if order else {})}
    config.method = parts.choose("method", method, **usual)
    if given.get("smoke") and "reducer" in chooses and (option := _wants("reducer", names["reducer"], "warm_steps")):
        config.reducer[option] = 2
    _place(config, given)
    if "optimizer" in chooses:
        names.setdefault("optimizer", defaults.get("optimizer", "adamw"))
    return names


def _wants(kind: str, name: str, what: str) -> Any:
    """What a part declares about others, as the mixer that a method is for; None if nothing."""
    return registry.part(kind, name.partition("(")[0]).traits.get(what)


def _place(config: ml_collections.ConfigDict, given: Mapping[str, Any]) -> None:
    """Sets options that have a shorthand key of their own in the section of the part that has them.

    Raises:
        ValueError: if no chosen part has the option, so that nobody takes a run for compressed that is not.
    """
    for key, sections in PLACES.items():
        if key not in given:
            continue
        takers = [section for section in sections if section in config and key in getattr(config, section)]
        if not takers:
            chosen = " and ".join(
                f"{section} {getattr(config, section).name!r}" for section in ("method", "mixer", "reducer") if section in config
            )
            raise ValueError(
                f"config argument {key}={given[key]} changes nothing with {chosen}; leave it out, or choose a part that has "
                f"{key}: python -m launch.parts lists them"
            )
        if (text := given.get(takers[0])) and key in registry.parse(takers[0], text)[1]:
            raise ValueError(f"config argument {key}={given[key]}: {takers[0]}={text} has it, too; leave one out")
        getattr(config, takers[0])[key] = given[key]


def _pipeline(config: ml_collections.ConfigDict, given: Mapping[str, Any]) -> None:
    """Adds the sections of pipeline stages and of compressed messages between them to the config."""
    layers: dict[str, Any] = dict(stages=given.get("stages", 1), microbatches=given.get("microbatches", 1))
    config.pipeline = layers
    if layers["stages"] == 1:
        if idle := [key for key in (*STAGED, "backward", "forward") if given.get(key)]:
            key = idle[0]
            raise ValueError(f"config argument {key}={given[key]} changes nothing with stages=1; leave it out, or use stages=2")
        return
    chunks = 2 if given.get("schedule") == "interleaved" else 1
    staged = {field: given[key] for key, field in STAGED.items() if key in given}
    config.pipeline = parts.Layers(**layers, chunks=chunks)._asdict() | staged
    boundary = {}
    for kind, usual in parts.BOUNDARY.items():
        if given.get(kind):
            boundary |= usual | {kind: given[kind]}
    if boundary:
        config.boundary = boundary
