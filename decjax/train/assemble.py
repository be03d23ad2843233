"""From a config to the parts of a run. `ConfigDict` ends here: below are keyword arguments."""

from collections.abc import Callable, Sequence
import copy
import functools
import json
import math
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax

from decjax import mesh, models, pipeline
from decjax import topology as topology_lib
from decjax.tasks import text
from decjax.train import engine, methods, selective
from decjax.train import source as source_lib
from decjax.train import state as state_lib
from decjax.train.errors import ConfigError

SIMULATED_WORKERS = 8  # on a lone accelerator, and forced CPU devices without one
MINIMA = {
    "steps": 1,
    "log_every": 1,
    "consensus_every": 0,
    "sample_bytes": 1,
    "eval.every": 1,
    "eval.batch_size": 1,
    "eval.num_windows": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "model.vocabulary": 256,
    "bucket_bytes": 0,
    "optimizer.clip_norm": 0,
    "optimizer.weight_decay": 0,
    "optimizer.eps": 0,
    "mixing.strength_power": 0,
    "reducer.start": 0,
    "pipeline.stages": 1,
    "pipeline.microbatches": 1,
    "pipeline.autoencoder": 0,
    "tensor": 1,
    "boundary.slots": 0,
}
FRACTIONS = ("mixing.strength", "mixing.gamma", "optimizer.final_fraction")  # 0 to 1
DECAYS = ("optimizer.b1", "optimizer.b2", "optimizer.momentum", "outer.momentum")  # 0 to less than 1
MAX_SEED = 2**32 - 1


class Setup(NamedTuple):
    """All parts of a run."""

    config: ml_collections.ConfigDict  # resolved: what was automatic is filled in
    workers: mesh.Workers
    topology: topology_lib.Topology | None  # None unless the method is decentralized
    method: state_lib.Method
    schedule: optax.Schedule
    model: models.Model
    source: source_lib.Source
    corpus: text.Corpus
    batch: Callable[[int, int], np.ndarray]  # (worker, step) -> tokens_BxT1

    @property
    def beginning(self) -> tuple[Any, ...]:
        """The arguments of `state.init` and `state.abstract`."""
        source, model = self.source, self.model
        return lambda key: source.split(model.init(key)), self.method.tx, self.workers, self.config.seed, source.init


def resolve(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> ml_collections.ConfigDict:
    """Fills in `workers=0`: one worker per device, or 8 simulated ones on a lone accelerator."""
    config = copy.deepcopy(config)  # References included, so that fields which follow `workers` still do.
    if not config.workers:
        if not config.simulate:
            devices = jax.devices() if devices is None else devices
            config.simulate = len(devices) == 1 and jax.process_count() == 1 and devices[0].platform != "cpu"
        config.workers = SIMULATED_WORKERS if config.simulate else max(1, len(devices) // devices_of_worker(config))
    return ml_collections.ConfigDict(json.loads(config.to_json()))


def devices_of_worker(config: ml_collections.ConfigDict) -> int:
    """S·T, devices that hold one worker's model."""
    return max(1, config.pipeline.stages * config.tensor)


def build(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Builds every part of a run, and refuses what cannot be trained.

    Args:
        config: as `configs/lm.py` describes.
        devices: where workers live unless they are simulated; None: `jax.devices()`.

    Returns:
        The `Setup`.

    Raises:
        ConfigError: in one line: the value, the constraint and the fix.
    """
    try:
        config = resolve(config, devices)
        model = models.decoder_lm(**config.model, divide=mesh.divide)
        workers = mesh.make_workers(
            config.workers,
            local_size=config.local_size,
            stages=config.pipeline.stages,
            tensor=config.tensor,
            simulate=config.simulate,
            devices=devices,
            divided=model.divided,
        )
        _check_sizes(config)
        source = make_source(config, model)
        _check_boundary(config, model)
        model = source.division.complete(model) if source.division else model
        schedule = make_schedule(config.optimizer, config.steps)
        if config.reducer.stages == methods.AUTO:
            config.reducer.stages = str(_compressed_stages(config, model, source, workers))
        method, topology = methods.make_method(config, workers, schedule, source)
        engine.choose(config.engine, method, workers)
        # Some mixers and reducers refuse arrays of some shapes, or messages that are no smaller.
        like = state_lib.abstract(lambda key: source.split(model.init(key)), method.tx, workers, config.seed, source.init)
        method.num_bytes(state_lib.one_device(like.params, workers), method.phase(config.steps - 1))
        corpus = text.load_corpus(config.data.path, min_bytes=model.context + 1)
        batch = text.batches(
            corpus,
            context=model.context,
            batch_size=config.batch_size // config.workers,
            num_workers=config.workers,
            seed=config.seed,
            partition=config.data.partition,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Setup(config, workers, topology, method, schedule, model, source, corpus, batch)


def make_source(
    config: ml_collections.ConfigDict, model: models.Model, watch: Callable = lambda boundary: boundary
) -> source_lib.Source:
    """The gradient source of the config's `pipeline`; `watch` wraps what travels between stages, as `pipeline.probed` does."""
    options, boundary = config.pipeline.to_dict(), make_boundary(config.boundary)
    try:
        options["layers"] = tuple(int(layers) for layers in options["layers"].split(",") if layers)
    except ValueError:
        raise ValueError(
            f"pipeline.layers={options['layers']!r} must read like '3,4,4,3', one number for each virtual stage"
        ) from None
    return source_lib.of_model(
        model, batch_size=config.batch_size // config.workers, boundary=boundary and watch(boundary), **options
    )


# Options of `config.boundary` that belong to one of its codecs, as they are without it.
IDLE = {
    "backward": {"when": "epilogue", "error": "carry"},
    "forward": {"forward_error": "none", "slots": 0, "reuse_indices": False},
}


def make_boundary(config: ml_collections.ConfigDict) -> pipeline.Boundary | None:
    """What travels between stages, None: everything as it is; options of codecs that are not there are refused."""
    for codec, defaults in IDLE.items():
        for name, default in defaults.items():
            if not config[codec] and config[name] != default:
                raise ValueError(
                    f"boundary.{name}={config[name]!r} changes nothing without boundary.{codec}, the form of messages; "
                    f"leave it {default!r}, or set boundary.{codec}"
                )
    given = {name: methods.make_codec(config[name]) for name in IDLE if config[name]}
    if not given:
        return None
    return pipeline.coded(**given, **{name: config[name] for defaults in IDLE.values() for name in defaults})


def _check_boundary(config, model) -> None:
    """Refuses messages between stages that a codec makes larger."""
    rows = config.batch_size // config.workers // config.pipeline.microbatches * model.context // config.tensor
    for name, message in zip(IDLE, selective.boundaries(config, (rows, config.model.width)), strict=True):
        if message.ratio > 1:
            raise ValueError(
                f"boundary.{name}={config.boundary[name]!r} makes messages of {message.ratio:.3g} times the bytes of "
                f"{config.model.dtype} values as they are; use a lower rank, fewer bits or values, or leave it empty"
            )


def _compressed_stages(config, model, source, workers) -> int:
    """What `reducer.stages` should be, by the runtime model."""
    methods.check_stages(config)
    shapes = jax.eval_shape(lambda: source.split(model.init(jax.random.key(0))))
    return selective.choose(config, model, selective.one_stage(shapes), methods.make_compressor(config, workers.axis_name))


class Size(NamedTuple):
    """How large a run is."""

    workers: int
    params: int  # values
    tokens: int  # that a worker reads in a step


def size(config: ml_collections.ConfigDict) -> Size:
    """The size of a run from its config alone: no device is started, no data is read.

    Raises:
        ConfigError: in one line: the value, the constraint and the fix.
    """
    config = copy.deepcopy(config)
    config.simulate = True  # Then nobody asks for devices.
    try:
        config = resolve(config)
        _check_sizes(config)
        model = models.decoder_lm(**config.model)
        if division := make_source(config, model).division:
            model = division.complete(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))))
    return Size(config.workers, sum(leaf.size for leaf in leaves), config.batch_size // config.workers * model.context)


def message_ratio(codec: str) -> float:
    """Bytes of a codec's message ÷ bytes of its float32 values.

    Raises:
        ValueError: naming the codecs there are.
    """
    values = 2**20
    return methods.make_codec(codec).num_bytes((values,), np.float32) / (4 * values)


def _check_sizes(config: ml_collections.ConfigDict) -> None:
    def value(name):
        return functools.reduce(lambda node, part: node[part], name.split("."), config)

    for name, least in MINIMA.items():
        if not value(name) >= least:
            raise ValueError(f"{name}={value(name)}: must be at least {least}")

    n, batch_size = config.workers, config.batch_size
    if batch_size < 1 or batch_size % n:
        multiples = dict.fromkeys(max(1, batch_size // n + more) * n for more in (0, 1))
        raise ValueError(
            f"batch_size={batch_size} is not a positive multiple of workers={n}; use {' or '.join(map(str, multiples))}"
        )

    for name in ("heads", "hidden", "vocabulary"):
        if config.model[name] % config.tensor:
            raise ValueError(
                f"model.{name}={config.model[name]} is not divisible by tensor={config.tensor}, the devices that "
                f"divide it; use tensor={math.gcd(config.model[name], config.tensor)}"
            )
    for name in FRACTIONS:
        if not 0 <= value(name) <= 1:
            raise ValueError(f"{name}={value(name)}: must lie between 0 and 1")
    for name in DECAYS:
        if not 0 <= value(name) < 1:
            raise ValueError(f"{name}={value(name)}: must be at least 0 and less than 1")
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"seed={config.seed}: must lie between 0 and {MAX_SEED}")
    for name in ("optimizer.learning_rate", "outer.learning_rate"):
        if not value(name) > 0:
            raise ValueError(f"{name}={value(name)} must be positive")
    for path, number in jax.tree_util.tree_leaves_with_path(config.to_dict()):
        if isinstance(number, float) and not math.isfinite(number):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"{name}={number}: must be finite")


def make_schedule(config: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """Linear warm-up to `learning_rate`, then cosine decay to `final_fraction` of it at the last step."""
    if not 0 <= config.warmup_steps < steps:
        raise ValueError(f"optimizer.warmup_steps={config.warmup_steps} must be less than steps={steps}")
    return optax.warmup_cosine_decay_schedule(
        0.0 if config.warmup_steps else config.learning_rate,
        config.learning_rate,
        config.warmup_steps,
        steps,
        config.final_fraction * config.learning_rate,
    )
