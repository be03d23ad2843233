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
METHODS = ("decentralized", "allreduce", "diloco", "sparseloco", "local")
REDUCING = ("allreduce", "diloco", "sparseloco")  # methods that average over all workers
MINIMA = {"steps": 1, "log_every": 1, "consensus_every": 0, "sample_bytes": 1, "eval.every": 1, "eval.batch_size": 1,
          "eval.num_windows": 0, "checkpoint.every": 1, "checkpoint.keep": 1, "model.vocabulary": 256,
          "bucket_bytes": 0, "optimizer.clip_norm": 0, "optimizer.weight_decay": 0, "optimizer.eps": 0, "mixing.strength_power": 0,
          "reducer.start": 0, "outer.learning_rate": 0}
FRACTIONS = ("mixing.strength", "optimizer.final_fraction")  # 0 to 1
DECAYS = ("optimizer.b1", "optimizer.b2", "optimizer.momentum", "outer.momentum")  # 0 to less than 1
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
        # Some reducers depend on the shapes of arrays, and refuse those that do not fit.
        method.num_bytes(jax.eval_shape(model.init, jax.random.key(0)), method.phase(config.steps - 1))
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


def _sign_descent(config, schedule):
    return optax.chain(optax.scale_by_sign(), optax.add_decayed_weights(config.weight_decay),
                       optax.scale_by_learning_rate(schedule))


OPTIMIZERS = {"adamw": _adamw, "accum_adamw": _accumulated_adamw, "sgdm": _momentum_sgd, "sign": _sign_descent}


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
    if config.reducer.name != "mean" and config.method not in REDUCING:
        raise ValueError(f"reducer {config.reducer.name!r} belongs to methods {', '.join(REDUCING)}, got {config.method!r}; "
                         "use 'mean'")
    if config.method == "sparseloco" and config.reducer.name != "codec":
        raise ValueError(f"method 'sparseloco' takes reducer 'codec', got {config.reducer.name!r}; method 'diloco' takes any")
    if config.mixing.codec and config.method != "decentralized":
        raise ValueError(f"mixing.codec={config.mixing.codec!r} belongs to method 'decentralized', got {config.method!r}; "
                         "leave it empty")
    if config.reducer.name == "onebit_adam":
        return _onebit_adam(config, workers, schedule), None
    inner = make_optimizer(config.optimizer, schedule)
    n, axis_name = workers.num_workers, workers.axis_name
    _known("method", config.method, METHODS)
    if config.method == "local":
        tx = optax.with_extra_args_support(inner)
        ignoring_phase = optax.GradientTransformationExtraArgs(
            tx.init, lambda grads, state, params=None, *, phase=None, **extra: tx.update(grads, state, params, **extra))
        return Method(ignoring_phase, lambda step: 0, lambda params, phase: np.zeros(n)), None
    if config.method in ("diloco", "sparseloco"):
        reducer = reduce.every(make_reducer(config.reducer, axis_name, config.bucket_bytes), config.outer.every)
        outer = optax.sgd(config.outer.learning_rate, config.outer.momentum or None, nesterov=True)
        return _averaging(optim.local_updates(inner, reducer, outer), reducer, n), None
    if config.method == "allreduce":
        reducer = make_reducer(config.reducer, axis_name, config.bucket_bytes)
        exchange = (lambda params, opt_state, phase: optim.stale_exchange(reducer, opt_state, phase)) if config.stale else None
        return _averaging(optim.synchronize(inner, reducer, config.stale), reducer, n, exchange), None
    topology = make_topology(config.topology, n, workers.local_size)
    mixer = make_mixer(config, topology, axis_name, schedule)
    tx = optim.decentralize(inner, mixer, config.mixing.order)
    if config.mixing.static_phase:
        overlaps = config.mixing.order == "awc"
        exchange = (lambda params, opt_state, phase: mixer.exchange(params, opt_state.mixer, phase)) if overlaps else None
        return Method(tx, mixer.phase, mixer.num_bytes, exchange), topology

    def mean_bytes(params, phase):
        del phase
        return np.mean([mixer.num_bytes(params, phase) for phase in mixer.phases], axis=0)
    return Method(tx, lambda step: None, mean_bytes), topology


def _averaging(tx: optax.GradientTransformationExtraArgs, reducer: reduce.Reducer, num_workers: int, exchange=None) -> Method:
    """The method of a transformation whose communication is a reducer's, with the state under `reducer`."""
    usage = reducer.usage and (lambda opt_state: reducer.usage(opt_state.reducer))
    return Method(tx, reducer.phase, lambda params, phase: reducer.num_bytes(params, num_workers, phase), exchange, usage,
                  reducer.phases)


def _onebit_adam(config, workers, schedule) -> Method:
    optimizer = config.optimizer
    if config.method != "allreduce" or config.stale or optimizer.name != "adamw":
        raise ValueError("reducer 'onebit_adam' is an optimizer as well: it takes method 'allreduce', optimizer 'adamw' and no "
                         f"stale, got {config.method!r}, {optimizer.name!r} and stale={config.stale}")
    if not 0 < config.reducer.start < config.steps:
        raise ValueError(f"reducer.start={config.reducer.start}: 1-bit Adam takes its variance from the steps before, "
                         f"at least 1 and less than steps={config.steps}")
    reducer = make_reducer(config.reducer, workers.axis_name, config.bucket_bytes)
    clip = [optax.clip_by_global_norm(optimizer.clip_norm)] if optimizer.clip_norm else []
    tx = optax.chain(*clip, optim.scale_by_onebit_adam(reducer, optimizer.b1, optimizer.b2, optimizer.eps),
                     optax.add_decayed_weights(optimizer.weight_decay), optax.scale_by_learning_rate(schedule))
    return _averaging(tx, reducer, workers.num_workers)


def _powersgd(config, axis_name, bucket_bytes):
    del bucket_bytes  # Its messages are joined anyway.
    return reduce.powersgd(config.rank, gate=config.gate, wire_dtype=config.wire_dtype or None, axis_name=axis_name)


def _coded(config, axis_name, bucket_bytes):
    if not config.codec:
        raise ValueError(f"reducer {config.name!r} needs reducer.codec, the form of its messages; "
                         f"use one of {', '.join(codecs.names())}")
    return reduce.coded(make_codec(config.codec), decay=config.decay, feedback=config.feedback, axis_name=axis_name,
                        bucket_bytes=bucket_bytes)


def _gravac(config, axis_name, bucket_bytes):
    ladder = [make_codec(text) for text in config.ladder.split(";") if text.strip()]
    return reduce.gravac(ladder, window=config.window, threshold=config.threshold, axis_name=axis_name, bucket_bytes=bucket_bytes)


REDUCERS = {"powersgd": _powersgd, "codec": _coded, "demo": _coded, "onebit_adam": _coded, "gravac": _gravac}


def make_reducer(config: ml_collections.ConfigDict, axis_name: mesh.AxisName, bucket_bytes: int) -> reduce.Reducer:
    """How gradients, or the changes of several local steps, are averaged; plainly before step `start`."""
    mean = reduce.mean(axis_name=axis_name, bucket_bytes=bucket_bytes)
    if _known("reducer", config.name, ("mean", *REDUCERS)) == "mean":
        return mean
    return reduce.start_at(REDUCERS[config.name](config, axis_name, bucket_bytes), config.start, mean)


def make_codec(text: str) -> codecs.Codec:
    """The codec of a text such as "int8" or "int8(block=128)"; values are Python literals or bare words."""
    name, bracket, options = text.strip().partition("(")
    if bracket and not options.endswith(")"):
        raise ValueError(f"codec {text!r} must read like 'int8' or 'int8(block=128)'")
    try:
        return codecs.make(name, **parse_options(options[:-1], f"codec {text!r}", "int8(block=128)"))
    except TypeError as error:
        raise ValueError(f"codec {text!r}: {error}") from error


def make_topology(config: ml_collections.ConfigDict, num_workers: int, local_size: int) -> topology_lib.Topology:
    """The named topology; graphs that know of nodes get `local_size` unless the options say otherwise."""
    if num_workers == 1:
        raise ValueError(f"topology {config.name!r} needs at least 2 workers, got 1; use method 'local' for a single worker")
    options = parse_options(config.options)
    if local_size > 1:
        for option in ("local_size", "local"):
            if config.name in topology_lib.names() and option in topology_lib.options(config.name):
                options.setdefault(option, local_size)
    topology = topology_lib.make(config.name, num_workers, **options)
    if not topology_lib.is_doubly_stochastic(topology):
        raise ValueError(f"topology {config.name!r} is not doubly stochastic, so plain gossip would drift from the mean; "
                         "use 'directed_exponential' or another graph whose columns and rows sum to one")
    return topology


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


def make_mixer(config: ml_collections.ConfigDict, topology: topology_lib.Topology, axis_name: mesh.AxisName,
               schedule: optax.Schedule) -> gossip.Mixer:
    """Gossip over the topology: rounds, acceleration, period and strength γ = strength · (lr / lr_max)^strength_power."""
    mixing, peak = config.mixing, config.optimizer.learning_rate
    if mixing.accelerated and mixing.codec:
        raise ValueError(f"mixing.codec={mixing.codec!r} with mixing.accelerated: accelerated gossip amplifies what a codec "
                         "distorts; use plain rounds")
    make = gossip.accelerated if mixing.accelerated else gossip.exact
    codec = {"codec": codecs.make(mixing.codec)} if mixing.codec else {}
    mixer = gossip.every(
        make(topology, rounds=mixing.rounds, axis_name=axis_name, bucket_bytes=config.bucket_bytes, **codec), mixing.every)
    if not mixing.strength_power:
        return gossip.damp(mixer, mixing.strength)
    return gossip.damp(mixer, lambda step: mixing.strength * (schedule(step) / peak) ** mixing.strength_power)
