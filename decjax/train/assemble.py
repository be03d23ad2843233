"""From a config to the parts of a run. `ConfigDict` ends here: below are keyword arguments."""

import ast
from collections.abc import Callable, Sequence
import copy
import functools
import json
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax

from decjax import codecs
from decjax import data
from decjax import gossip
from decjax import mesh
from decjax import models
from decjax import optim
from decjax import reduce
from decjax import topology as topology_lib
from decjax.train import engine
from decjax.train.errors import ConfigError
from decjax.train.state import Method

SIMULATED_WORKERS = 8  # on a lone accelerator, and forced CPU devices without one
METHODS = ("decentralized", "allreduce", "local")
MINIMA = {"steps": 1, "log_every": 1, "consensus_every": 0, "sample_bytes": 1, "eval.every": 1, "eval.batch_size": 1,
          "eval.num_windows": 0, "checkpoint.every": 1, "checkpoint.keep": 1, "model.vocabulary": 256,
          "bucket_bytes": 0, "optimizer.clip_norm": 0, "optimizer.weight_decay": 0, "optimizer.eps": 0, "mixing.strength_power": 0}
FRACTIONS = ("mixing.strength", "mixing.gamma", "optimizer.final_fraction")  # 0 to 1
DECAYS = ("optimizer.b1", "optimizer.b2", "optimizer.momentum")  # 0 to less than 1
MAX_SEED = 2**32 - 1


class Setup(NamedTuple):
    """All parts of a run."""

    config: ml_collections.ConfigDict  # resolved: what was automatic is filled in
    workers: mesh.Workers
    topology: topology_lib.Topology | None  # None unless the method is decentralized
    method: Method
    schedule: optax.Schedule
    model: models.Model
    gradients: Callable  # the gradient source, (params, tokens_BxT1, key) -> (loss, grads)
    corpus: data.Corpus
    batch: Callable[[int, int], np.ndarray]  # (worker, step) -> tokens_BxT1


def resolve(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> ml_collections.ConfigDict:
    """Fills in `workers=0`: one worker per device, or 8 simulated ones on a lone accelerator."""
    config = copy.deepcopy(config)  # References included, so that fields which follow `workers` still do.
    if not config.workers:
        if not config.simulate:
            devices = jax.devices() if devices is None else devices
            config.simulate = len(devices) == 1 and jax.process_count() == 1 and devices[0].platform != "cpu"
        config.workers = SIMULATED_WORKERS if config.simulate else len(devices)
    return ml_collections.ConfigDict(json.loads(config.to_json()))


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
        workers = mesh.make_workers(config.workers, local_size=config.local_size, simulate=config.simulate, devices=devices)
        _check_sizes(config)
        schedule = make_schedule(config.optimizer, config.steps)
        method, topology = make_method(config, workers, schedule)
        engine.choose(config.engine, method)
        model = models.decoder_lm(**config.model)
        corpus = data.load_corpus(config.data.path, min_bytes=model.context + 1)
        batch = data.batches(
            corpus.train, context=model.context, batch_size=config.batch_size // config.workers,
            num_workers=config.workers, seed=config.seed, partition=config.data.partition)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    gradients = jax.value_and_grad(lambda params, tokens_BxT1, key: model.nll(params, tokens_BxT1, key).mean())
    return Setup(config, workers, topology, method, schedule, model, gradients, corpus, batch)


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
    return codecs.make(codec).num_bytes((values,), np.float32) / (4 * values)


def _check_sizes(config: ml_collections.ConfigDict) -> None:
    n, batch_size = config.workers, config.batch_size
    if batch_size < 1 or batch_size % n:
        multiples = dict.fromkeys(max(1, batch_size // n + more) * n for more in (0, 1))
        raise ValueError(f"batch_size={batch_size} is not a positive multiple of workers={n}; "
                         f"use {' or '.join(map(str, multiples))}")

    def value(name):
        return functools.reduce(lambda node, part: node[part], name.split("."), config)

    for name, least in MINIMA.items():
        if not value(name) >= least:
            raise ValueError(f"{name}={value(name)}: must be at least {least}")
    for name in FRACTIONS:
        if not 0 <= value(name) <= 1:
            raise ValueError(f"{name}={value(name)}: must lie between 0 and 1")
    for name in DECAYS:
        if not 0 <= value(name) < 1:
            raise ValueError(f"{name}={value(name)}: must be at least 0 and less than 1")
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"seed={config.seed}: must lie between 0 and {MAX_SEED}")
    if not config.optimizer.learning_rate > 0:
        raise ValueError(f"optimizer.learning_rate={config.optimizer.learning_rate} must be positive")


def make_schedule(config: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """Linear warm-up to `learning_rate`, then cosine decay to `final_fraction` of it at the last step."""
    if not 0 <= config.warmup_steps < steps:
        raise ValueError(f"optimizer.warmup_steps={config.warmup_steps} must be less than steps={steps}")
    return optax.warmup_cosine_decay_schedule(
        0.0 if config.warmup_steps else config.learning_rate, config.learning_rate, config.warmup_steps, steps,
        config.final_fraction * config.learning_rate)


def _adamw(config, schedule):
    return optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)


def _accumulated_adamw(config, schedule):
    return optim.accumulated_adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps,
                                   weight_decay=config.weight_decay, window=config.window)


def _momentum_sgd(config, schedule):
    return optax.chain(optax.add_decayed_weights(config.weight_decay), optax.sgd(schedule, momentum=config.momentum))


OPTIMIZERS = {"adamw": _adamw, "accum_adamw": _accumulated_adamw, "sgdm": _momentum_sgd}


def make_optimizer(config: ml_collections.ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """What one worker does with its gradient: clipping by its own global norm, then the named optimizer."""
    optimizer = OPTIMIZERS[_known("optimizer", config.name, OPTIMIZERS)](config, schedule)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer


def _known(what: str, name: str, valid) -> str:
    if name not in valid:
        raise ValueError(f"{what} {name!r} is unknown; use one of {', '.join(valid)}")
    return name


def make_method(config: ml_collections.ConfigDict, workers: mesh.Workers,
                schedule: optax.Schedule) -> tuple[Method, topology_lib.Topology | None]:
    """What happens to gradients and parameters: gossip, all-reduce or nothing, as one transformation."""
    if config.stale and config.method != "allreduce":
        raise ValueError(f"stale belongs to method 'allreduce', got {config.method!r}; gossip overlaps with mixing.order=awc")
    if config.mixing.codec and config.method != "decentralized":
        raise ValueError(f"mixing.codec={config.mixing.codec!r} belongs to method 'decentralized', got {config.method!r}; "
                         "leave it empty")
    if config.mixing.mixer != "exact" and config.method != "decentralized":
        raise ValueError(f"mixing.mixer={config.mixing.mixer!r} belongs to method 'decentralized', got {config.method!r}; "
                         "leave it 'exact'")
    inner = make_optimizer(config.optimizer, schedule)
    n, axis_name = workers.num_workers, workers.axis_name
    _known("method", config.method, METHODS)
    if config.method == "local":
        tx = optax.with_extra_args_support(inner)
        ignoring_phase = optax.GradientTransformationExtraArgs(
            tx.init, lambda grads, state, params=None, *, phase=None, **extra: tx.update(grads, state, params, **extra))
        return Method(ignoring_phase, lambda step: 0, lambda params, phase: np.zeros(n)), None
    if config.method == "allreduce":
        reducer = reduce.mean(axis_name=axis_name, bucket_bytes=config.bucket_bytes)
        exchange = (lambda params, opt_state, phase: optim.stale_exchange(reducer, opt_state)) if config.stale else None
        return Method(optim.synchronize(inner, reducer, config.stale), lambda step: 0,
                      lambda params, phase: reducer.num_bytes(params, n), exchange), None
    topology = make_topology(config.topology, n, workers.local_size)
    mixer = make_mixer(config, topology, axis_name, schedule)
    if config.mixing.mixer == "beer":
        tx = optim.track(inner, mixer, config.mixing.order)
        num_bytes = lambda params, phase: mixer.num_bytes((params, params), phase)
        exchange = functools.partial(optim.tracked_exchange, mixer)
    else:
        tx, num_bytes = optim.decentralize(inner, mixer, config.mixing.order), mixer.num_bytes
        exchange = lambda params, opt_state, phase: mixer.exchange(params, opt_state.mixer, phase)
    if config.mixing.static_phase:
        return Method(tx, mixer.phase, num_bytes, exchange if config.mixing.order == "awc" else None), topology

    def mean_bytes(params, phase):
        del phase
        return np.mean([num_bytes(params, phase) for phase in mixer.phases], axis=0)
    return Method(tx, lambda step: None, mean_bytes), topology


def make_topology(config: ml_collections.ConfigDict, num_workers: int, local_size: int) -> topology_lib.Topology:
    """The named topology; graphs that know of nodes get `local_size` unless the options say otherwise."""
    if num_workers == 1:
        raise ValueError(f"topology {config.name!r} needs at least 2 workers, got 1; use method 'local' for a single worker")
    options = parse_options(config.options)
    if local_size > 1:
        for option in ("local_size", "local"):
            if config.name in topology_lib.names() and option in topology_lib.options(config.name):
                options.setdefault(option, local_size)
    return topology_lib.make(config.name, num_workers, **options)


def parse_options(text: str, what: str = "", example: str = "k=2,seed=1") -> dict[str, Any]:
    """Reads "k=2,shape=(2, 4)" into keyword arguments; values are Python literals or bare words."""
    if not text:
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {keyword.arg: keyword.value.id if isinstance(keyword.value, ast.Name) else ast.literal_eval(keyword.value)
                for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what or f'topology.options={text!r}'} must read like {example!r}") from error


COMPRESSED = {"choco": gossip.choco, "deepsqueeze": gossip.deepsqueeze, "dcd": gossip.dcd, "beer": gossip.beer,
              "push_sum": gossip.push_sum}
MIXERS = ("exact", *COMPRESSED, "power_gossip")


def make_mixer(config: ml_collections.ConfigDict, topology: topology_lib.Topology, axis_name: mesh.AxisName,
               schedule: optax.Schedule) -> gossip.Mixer:
    """The named mixer over the topology: rounds, codec, period and strength γ = strength · (lr / lr_max)^strength_power."""
    mixing, peak = config.mixing, config.optimizer.learning_rate
    mixer = gossip.every(_every_step_mixer(mixing, topology, axis_name=axis_name, bucket_bytes=config.bucket_bytes,
                                           seed=config.seed), mixing.every)
    if not mixing.strength_power:
        return gossip.damp(mixer, mixing.strength)
    return gossip.damp(mixer, lambda step: mixing.strength * (schedule(step) / peak) ** mixing.strength_power)


def _every_step_mixer(mixing, topology, **common) -> gossip.Mixer:
    """The mixer of `mixing.mixer`; options that it does not have are refused rather than ignored."""
    name = _known("mixing.mixer", mixing.mixer, MIXERS)
    codec = _message_codec(mixing.codec, mixing.codec_options)
    if mixing.accelerated and (codec or name != "exact"):
        what = f"mixing.codec={mixing.codec!r}" if codec else f"mixing.mixer={name!r}"
        raise ValueError(f"{what} with mixing.accelerated: accelerated gossip amplifies what a codec distorts; use plain "
                         "rounds")
    if mixing.gamma and name in ("exact", "dcd", "power_gossip"):
        raise ValueError(f"mixing.gamma={mixing.gamma}: mixer {name!r} has none; use mixing.strength, or mixer 'choco'")
    if mixing.rounds != 1 and name in ("dcd", "power_gossip"):
        raise ValueError(f"mixing.rounds={mixing.rounds}: mixer {name!r} sends one message a step; use rounds=1, or mixer "
                         "'choco'")
    if name == "power_gossip":
        if codec:
            raise ValueError(f"mixing.codec={mixing.codec!r} with mixer 'power_gossip', whose products travel as they are; "
                             "leave it empty, or use mixer 'choco'")
        return gossip.power_gossip(topology, rank=mixing.rank, **common)
    if name != "exact":
        rounds = {} if name == "dcd" else dict(rounds=mixing.rounds, gamma=mixing.gamma or None)
        return COMPRESSED[name](topology, codec=codec, **rounds, **common)
    if not topology_lib.is_doubly_stochastic(topology):
        raise ValueError(f"topology {topology.name!r} is not doubly stochastic, so plain gossip would drift from the mean; "
                         "use 'directed_exponential' or another graph whose columns and rows sum to one, or mixer 'push_sum'")
    if mixing.accelerated:
        del common["seed"]
        return gossip.accelerated(topology, rounds=mixing.rounds, **common)
    return gossip.exact(topology, rounds=mixing.rounds, codec=codec, **common)


def _message_codec(name: str, options: str) -> codecs.Codec | None:
    """The codec of mixing.codec and mixing.codec_options; None for no name."""
    what = f"mixing.codec_options={options!r}"
    if not name:
        if options:
            raise ValueError(f"{what} without a codec; set mixing.codec, or leave them empty")
        return None
    try:
        return codecs.make(name, **parse_options(options, what, "bits=4,block=128"))
    except TypeError as error:  # An option that its builder does not take.
        raise ValueError(f"{what}: codec {name!r} has no such option ({error}); leave it empty for the defaults") from error
