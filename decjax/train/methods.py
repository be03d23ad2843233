"""From a config to what happens to gradients and parameters: optimizer, topology, codec, mixer or reducer, and their method."""

import ast
from collections.abc import Callable
import functools
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from decjax import codecs, gossip, mesh, optim, pipeline, reduce
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.train import source as source_lib
from decjax.train.state import Method

Norm = Callable[[Any], jax.Array]  # of a whole model's gradient, from a worker's or stage's share


def _adamw(config, schedule):
    return optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)


def _accumulated_adamw(config, schedule):
    return optim.accumulated_adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, window=config.window
    )


def _momentum_sgd(config, schedule):
    return optax.chain(optax.add_decayed_weights(config.weight_decay), optax.sgd(schedule, momentum=config.momentum))


def _sign_descent(config, schedule):
    return optax.chain(
        optax.scale_by_sign(), optax.add_decayed_weights(config.weight_decay), optax.scale_by_learning_rate(schedule)
    )


OPTIMIZERS = {"adamw": _adamw, "accum_adamw": _accumulated_adamw, "sgdm": _momentum_sgd, "sign": _sign_descent}


def make_optimizer(config: ml_collections.ConfigDict, schedule: optax.Schedule, norm: Norm) -> optax.GradientTransformation:
    """What one worker does with its gradient: clipping by its own global norm, then the named optimizer."""
    optimizer = OPTIMIZERS[_known("optimizer", config.name, OPTIMIZERS)](config, schedule)
    return optax.chain(optim.clip_by_norm(config.clip_norm, norm), optimizer) if config.clip_norm else optimizer


def _known(what: str, name: str, valid) -> str:
    if name not in valid:
        raise ValueError(f"{what} {name!r} is unknown; use one of {', '.join(valid)}")
    return name


def make_method(
    config: ml_collections.ConfigDict, workers: mesh.Workers, schedule: optax.Schedule, source: source_lib.Source
) -> tuple[Method, topology_lib.Topology | None]:
    """What happens to gradients and parameters, as one transformation; and the topology of gossip."""
    build = METHODS[_known("method", config.method, METHODS)]
    if config.stale and config.method != "allreduce":
        raise ValueError(f"stale belongs to method 'allreduce', got {config.method!r}; gossip overlaps with mixing.order=awc")
    _check_reducer(config)
    check_stages(config)
    for field, empty in (("mixer", "exact"), ("codec", "")):
        if config.mixing[field] != empty and config.method != "decentralized":
            raise ValueError(
                f"mixing.{field}={config.mixing[field]!r} belongs to method 'decentralized', got {config.method!r}; "
                f"leave it {repr(empty) if empty else 'empty'}"
            )
    if config.pipeline.fused_embedding and (config.method != "allreduce" or config.reducer.name == "onebit_adam"):
        what = f"method {config.method!r}" if config.method != "allreduce" else "reducer 'onebit_adam', which averages momenta,"
        raise ValueError(
            f"pipeline.fused_embedding with {what} has no gradients that are averaged over workers, with which to add up "
            "the two of a tied table; leave it out"
        )
    _check_communicates(config)
    return build(config, workers, schedule, source)


def _check_reducer(config) -> None:
    """Refuses a reducer that the method cannot have, and forms of messages that the reducer does not send."""
    method, name = config.method, config.reducer.name
    if name != "mean" and method not in REDUCING:
        raise ValueError(f"reducer {name!r} belongs to methods {', '.join(REDUCING)}, got {method!r}; use 'mean'")
    if (method == "sparseloco" and name != "codec") or (method == "diloco" and name == "onebit_adam"):
        raise ValueError(
            f"method {method!r} cannot have reducer {name!r}; 'sparseloco' takes reducer 'codec', 'diloco' any but 'onebit_adam'"
        )
    for field, reducers in FORMS.items():
        if config.reducer[field] and name not in reducers:
            raise ValueError(
                f"reducer.{field}={config.reducer[field]!r} changes nothing with reducer {name!r}; leave it empty, or "
                f"use reducer {' or '.join(map(repr, reducers))}"
            )


def _check_communicates(config) -> None:
    """Refuses a run that would end before it first exchanges, or compresses, anything."""
    between = {"decentralized": config.mixing.every, "diloco": config.outer.every, "sparseloco": config.outer.every}.get(
        config.method, 1
    )
    if between > config.steps:
        field = "mixing.every" if config.method == "decentralized" else "outer.every"
        raise ValueError(
            f"{field}={between} is more than steps={config.steps}, so nothing would ever be exchanged; use at most "
            f"{config.steps}, or method 'local'"
        )
    if config.method not in REDUCING or config.reducer.name == "mean":
        return
    if config.reducer.start * between >= config.steps:
        raise ValueError(
            f"reducer.start={config.reducer.start} is not reached in steps={config.steps}, so reducer "
            f"{config.reducer.name!r} would never be used; use less than {-(-config.steps // between)}, or reducer 'mean'"
        )
    if config.reducer.name == "gravac" and (config.reducer.start + config.reducer.window) * between >= config.steps:
        raise ValueError(
            f"reducer.window={config.reducer.window} after reducer.start={config.reducer.start} is not over in "
            f"steps={config.steps}, so reducer 'gravac' would compress nothing; use a shorter window, or reducer 'mean'"
        )


def _decentralized(config, workers, schedule, source):
    topology = make_topology(config.topology, workers.num_workers, workers.local_size)
    mixer = make_mixer(config, topology, workers.axis, schedule, source.division)
    inner, order = make_optimizer(config.optimizer, schedule, source.norm), config.mixing.order
    if config.mixing.mixer == "beer":
        tx, exchange = optim.track(inner, mixer, order), functools.partial(optim.tracked_exchange, mixer)
    else:
        tx = optim.decentralize(inner, mixer, order)

        def exchange(params, opt_state, phase):
            return mixer.exchange(params, opt_state.mixer, phase)

    def num_bytes(params, phase):
        if phase is None:  # All phases in one program: the mean over a period.
            mixing = sum(phase != gossip.LOCAL for phase in mixer.phases)
            return np.mean([num_bytes(params, mixer.phase(step)) for step in range(config.mixing.every * mixing)], axis=0)
        return mixer.num_bytes((params, params) if config.mixing.mixer == "beer" else params, phase)

    if not config.mixing.static_phase:
        return Method(tx, lambda step: None, num_bytes, mixer=mixer), topology
    return Method(tx, mixer.phase, num_bytes, exchange if order == "awc" else None, mixer=mixer), topology


def _allreduce(config, workers, schedule, source):
    reducer = make_reducer(config, workers.axis, source.division)
    if config.reducer.name == "onebit_adam":
        return _averaging(_onebit_adam(config, reducer, schedule, source.norm), reducer, workers), None

    def exchange(params, opt_state, phase):
        del params
        return optim.stale_exchange(reducer, opt_state, phase)

    tx = optim.synchronize(make_optimizer(config.optimizer, schedule, source.norm), reducer, config.stale)
    return _averaging(tx, reducer, workers, exchange if config.stale else None), None


def _local_updates(config, workers, schedule, source):
    reducer = reduce.every(make_reducer(config, workers.axis, source.division), config.outer.every)
    outer = optax.sgd(config.outer.learning_rate, config.outer.momentum or None, nesterov=True)
    inner = make_optimizer(config.optimizer, schedule, source.norm)
    return _averaging(optim.local_updates(inner, reducer, outer), reducer, workers), None


def _local(config, workers, schedule, source):
    inner = optax.with_extra_args_support(make_optimizer(config.optimizer, schedule, source.norm))

    def update(grads, state, params=None, *, phase=None, **extra):
        del phase
        return inner.update(grads, state, params, **extra)

    tx = optax.GradientTransformationExtraArgs(inner.init, update)
    return Method(tx, lambda step: 0, lambda params, phase: np.zeros(workers.num_workers)), None


METHODS = {
    "decentralized": _decentralized,
    "allreduce": _allreduce,
    "diloco": _local_updates,
    "sparseloco": _local_updates,
    "local": _local,
}
REDUCING = ("allreduce", "diloco", "sparseloco")  # methods that average over all workers


def _averaging(tx: optax.GradientTransformationExtraArgs, reducer: reduce.Reducer, workers: mesh.Workers, exchange=None) -> Method:
    """The method of a transformation whose communication is a reducer's, with the state under `reducer`."""
    usage = reducer.usage and (lambda opt_state: reducer.usage(opt_state.reducer))
    return Method(
        tx,
        reducer.phase,
        lambda params, phase: reducer.num_bytes(params, workers.num_workers, phase),
        exchange,
        usage,
        reducer.phases,
    )


def _onebit_adam(config, reducer, schedule, norm) -> optax.GradientTransformation:
    optimizer = config.optimizer
    if config.stale or optimizer.name != "adamw":
        raise ValueError(
            "reducer 'onebit_adam' is an optimizer as well: it takes optimizer 'adamw' and no stale, "
            f"got {optimizer.name!r} and stale={config.stale}"
        )
    if not 0 < config.reducer.start < config.steps:
        raise ValueError(
            f"reducer.start={config.reducer.start}: 1-bit Adam takes its variance from the steps before, "
            f"at least 1 and less than steps={config.steps}"
        )
    clip = [optim.clip_by_norm(optimizer.clip_norm, norm)] if optimizer.clip_norm else []
    return optax.chain(
        *clip,
        optim.scale_by_onebit_adam(reducer, optimizer.b1, optimizer.b2, optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _powersgd(config, channel):
    return reduce.powersgd(channel, rank=config.rank, gate=config.gate, wire_dtype=config.wire_dtype or None)


def _coded(config, channel):
    if not config.codec:
        raise ValueError(
            f"reducer {config.name!r} needs reducer.codec, the form of its messages; use one of {', '.join(codecs.names())}"
        )
    make = reduce.demo if config.name == "demo" else reduce.coded
    used = {"residual": ("decay",), "momentum": ("momentum",), "ef21": ("momentum",)}.get(config.error, ())
    memory = {name: config[name] for name in used}
    return make(channel, codec=config.codec, form=config.form, error=config.error, storage=config.storage or None, **memory)


def _gravac(config, channel):
    return reduce.gravac(channel, ladder=config.ladder, window=config.window, threshold=config.threshold)


AUTO = "auto"  # of reducer.stages
REDUCERS = {"powersgd": _powersgd, "codec": _coded, "demo": _coded, "onebit_adam": _coded, "gravac": _gravac}
CODED = tuple(name for name, build in REDUCERS.items() if build is _coded)
FORMS = {"codec": CODED, "storage": CODED, "wire_dtype": ("powersgd",)}  # empty by default, and the reducers that have them


def make_reducer(config: ml_collections.ConfigDict, axis: mesh.Axis, division: pipeline.Division | None = None) -> reduce.Reducer:
    """How gradients, or the changes of several local steps, are averaged: plainly before step `start`, and in all but the first
    `stages`; a tied table, which two stages hold, by itself."""
    channel, name = Channel(axis, config.bucket_bytes, config.seed), config.reducer.name
    mean = reducer = reduce.mean(channel)
    if _known("reducer", name, ("mean", *REDUCERS)) != "mean":
        make = functools.partial(REDUCERS[name], config.reducer)
        if config.reducer.stages:
            reducer = reduce.first_stages(make, int(config.reducer.stages), config.pipeline.stages, channel=channel)
        else:
            reducer = make(channel)
        reducer = reduce.start_at(reducer, config.reducer.start, mean)
    return pipeline.with_tied_table(reducer, division, channel) if division else reducer


def make_compressor(config: ml_collections.ConfigDict, axis: mesh.Axis) -> reduce.Reducer:
    """The named reducer, other than "mean", by itself."""
    return REDUCERS[config.reducer.name](config.reducer, Channel(axis, config.bucket_bytes, config.seed))


def check_stages(config: ml_collections.ConfigDict) -> None:
    """Refuses `reducer.stages` where nothing is compressed, or there are no such stages."""
    text, stages, reducer = config.reducer.stages, config.pipeline.stages, config.reducer.name
    if not text:
        return
    if config.method not in REDUCING or reducer in ("mean", "gravac"):
        why = "whose state decides in each stage by itself what is sent" if reducer == "gravac" else "which compress nothing"
        raise ValueError(
            f"reducer.stages={text!r} says which stages compress, got method {config.method!r} and reducer {reducer!r}, "
            f"{why}; leave it empty"
        )
    if stages == 1:
        raise ValueError(f"reducer.stages={text!r} belongs to a pipeline, got stages=1; leave it empty")
    if text != AUTO and not (text.isdecimal() and 1 <= int(text) <= stages):
        raise ValueError(f"reducer.stages={text!r}: must be a number from 1 to stages={stages}, {AUTO!r}, or empty for all")


def make_codec(text: str) -> codecs.Codec:
    """The codec of a text such as "int8" or "int8(block=128)"; values are Python literals or bare words."""
    return codecs.make(text)


def make_topology(config: ml_collections.ConfigDict, num_workers: int, local_size: int) -> topology_lib.Topology:
    """The named topology; graphs that know of nodes get `local_size` unless the options say otherwise."""
    if num_workers == 1:
        raise ValueError(f"topology {config.name!r} needs at least 2 workers, got 1; use method 'local' for a single worker")
    options = parse_options(f"topology.options={config.options!r}", config.options)
    if local_size > 1:
        for option in ("local_size", "local"):
            if config.name in topology_lib.names() and option in topology_lib.options(config.name):
                options.setdefault(option, local_size)
    return topology_lib.make(config.name, num_workers, **options)


def parse_options(what: str, text: str, example: str = "k=2,seed=1") -> dict[str, Any]:
    """Reads "k=2,shape=(2, 4)" into keyword arguments; values are Python literals or bare words."""
    if not text:
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        is_one_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)  # Not f(block=8)(block=16), nor a sum of two.
        if not is_one_call or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {
            keyword.arg: keyword.value.id if isinstance(keyword.value, ast.Name) else ast.literal_eval(keyword.value)
            for keyword in call.keywords
        }
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} must read like {example!r}") from error


COMPRESSED = {
    "choco": gossip.choco,
    "deepsqueeze": gossip.deepsqueeze,
    "dcd": gossip.dcd,
    "beer": gossip.beer,
    "push_sum": gossip.push_sum,
}
MIXERS = ("exact", *COMPRESSED, "power_gossip")


def make_mixer(
    config: ml_collections.ConfigDict,
    topology: topology_lib.Topology,
    axis: mesh.Axis,
    schedule: optax.Schedule,
    division: pipeline.Division | None = None,
) -> gossip.Mixer:
    """The named mixer over the topology: rounds, codec, period and strength γ = strength · (lr / lr_max)^strength_power; a tied
    table, which two stages hold, is coded by itself."""
    mixing, peak = config.mixing, config.optimizer.learning_rate
    channel = Channel(axis, config.bucket_bytes, config.seed, pipeline.tied_tables(division))
    mixer = _every_step_mixer(mixing, topology, channel)
    mixer = gossip.every(mixer, mixing.every)
    if not mixing.strength_power:
        return gossip.damp(mixer, mixing.strength)
    return gossip.damp(mixer, lambda step: mixing.strength * (schedule(step) / peak) ** mixing.strength_power)


def _every_step_mixer(mixing, topology, channel) -> gossip.Mixer:
    """The mixer of `mixing.mixer`; options that it does not have are refused rather than ignored."""
    name = _known("mixing.mixer", mixing.mixer, MIXERS)
    codec = make_codec(mixing.codec) if mixing.codec else None
    if mixing.accelerated and (codec or name != "exact"):
        what = f"mixing.codec={mixing.codec!r}" if codec else f"mixing.mixer={name!r}"
        raise ValueError(f"{what} with mixing.accelerated: accelerated gossip amplifies what a codec distorts; use plain rounds")
    if mixing.gamma and name in ("exact", "dcd", "power_gossip"):
        raise ValueError(f"mixing.gamma={mixing.gamma}: mixer {name!r} has none; use mixing.strength, or mixer 'choco'")
    if mixing.rounds != 1 and name in ("dcd", "power_gossip"):
        raise ValueError(f"mixing.rounds={mixing.rounds}: mixer {name!r} sends one message a step; use rounds=1, or mixer 'choco'")
    if name == "power_gossip":
        if codec:
            raise ValueError(
                f"mixing.codec={mixing.codec!r} with mixer 'power_gossip', whose products travel as they are; "
                "leave it empty, or use mixer 'choco'"
            )
        return gossip.power_gossip(topology, channel, rank=mixing.rank)
    if name != "exact":
        rounds = {} if name == "dcd" else dict(rounds=mixing.rounds, gamma=mixing.gamma or None)
        return COMPRESSED[name](topology, channel, codec=codec, **rounds)
    if mixing.accelerated:
        return gossip.accelerated(topology, channel, rounds=mixing.rounds)
    return gossip.exact(topology, channel, rounds=mixing.rounds, codec=codec)
