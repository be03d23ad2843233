"""Trainings of a small model by workers of several devices, and the dense reference of what codecs do on shards."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, mesh, optim, reduce, registry, topology
from decjax.contrib import corrections
from decjax.contrib.outer import GossipDiLoCo, StreamingDiLoCo

STEPS = 50
SHAPES = {"up": (64, 128), "down": (128, 64), "bias": (128,), "odd": (5, 7), "scale": ()}


def start(shapes=SHAPES):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}


def loss(params, batch):
    x_BxD, y_BxD = (x.astype(params["up"].dtype) for x in batch)
    hidden = jnp.tanh(x_BxD @ params["up"] + params["bias"]) @ params["down"]
    return jnp.mean((hidden * (1 + params["scale"]) - y_BxD) ** 2) + jnp.sum((params["odd"] - x_BxD.mean()) ** 2)


def examples(worker, step):
    x_BxD = np.random.default_rng((worker, step)).normal(size=(8, 64)).astype(np.float32)
    return x_BxD, np.sin(x_BxD + worker)


class Training:
    """An own loop with a transformation that communicates."""

    def __init__(self, N, L, make):
        self.workers = mesh.make_workers(N, devices_per_worker=L)
        method = make(N)
        self.tx, self.phase = method.tx, method.phase
        self.params = self.workers.stack(self.start())
        self.state = self.workers.jit(self.tx.init, (0,))(self.params)
        self.programs = {}

    def start(self):
        return start()

    def loss(self, params, batch):
        return loss(params, batch)

    def _step(self, params, state, batch, *, phase):
        grads = jax.grad(self.loss)(params, batch)
        updates, state = self.tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    def compiled(self, step):
        phase, batch = self.phase(step), self.workers.build(lambda worker: examples(worker, step))
        if phase not in self.programs:
            jitted = self.workers.jit(functools.partial(self._step, phase=phase), (0, 0, 0))
            self.programs[phase] = jitted.lower(self.params, self.state, batch).compile()
        return self.programs[phase], batch

    def run(self, steps=STEPS):
        for step in range(steps):
            program, batch = self.compiled(step)
            self.params, self.state = jax.block_until_ready(program(self.params, self.state, batch))
        return self.workers.fetch(self.params)


# -- Methods ----------------------------------------------------------------------------------------------------------

inner = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3, momentum=0.9))
muon = registry.make("optimizer", "muon", learning_rate=0.01)
ring = lambda N: topology.make("ring", N)
one_peer = lambda N: topology.make("one_peer_exponential", N)
PLAIN = {
    "all-reduce": lambda N: optim.AllReduce(inner, reduce.mean(), N),
    "stale all-reduce": lambda N: optim.AllReduce(inner, reduce.mean(), N, stale=True),
    "awc": lambda N: optim.Decentralized(inner, gossip.exact(one_peer(N))),
    "atc": lambda N: optim.Decentralized(inner, gossip.exact(one_peer(N)), order="atc"),
    "atc, every second step, damped": lambda N: optim.Decentralized(
        inner, gossip.exact(ring(N)), order="atc", every=2, strength=0.7
    ),
    "nodes": lambda N: optim.Decentralized(inner, gossip.exact(topology.make("hierarchical", N, local_size=2))),
    "traced phase": lambda N: optim.Decentralized(inner, gossip.exact(one_peer(N)), static_phase=False),
    "tracking": lambda N: corrections.Tracking(inner, gossip.exact(ring(N))),
    "DiLoCo": lambda N: optim.DiLoCo(inner, reduce.mean(), N, every=5),
    "MuLoCo": lambda N: optim.DiLoCo(muon, reduce.mean(), N, every=5),
    "streaming DiLoCo": lambda N: StreamingDiLoCo(inner, reduce.mean(), N, every=6, fragments=2, delay=2),
    "gossip DiLoCo": lambda N: GossipDiLoCo(inner, gossip.exact(ring(N)), every=5),
    "Muon": lambda N: optim.AllReduce(muon, reduce.mean(), N),
}
# Of these the mixer or reducer is an argument `of` of the dense reference. The rounding of a codec is discontinuous, so that float32
# sums in another order would lead to other trajectories: they are trained in float64.
CODED = {
    "int8": lambda N, of: optim.Decentralized(inner, of(gossip.exact(one_peer(N), codec="int8"))),
    "int8, atc": lambda N, of: optim.Decentralized(inner, of(gossip.exact(ring(N), codec="int8")), order="atc"),
    "CHOCO int4": lambda N, of: optim.Decentralized(inner, of(gossip.choco(ring(N), codec="int4"))),
    "int8 all-reduce": lambda N, of: optim.AllReduce(inner, of(reduce.coded(codec="int8")), N),
    "PowerSGD": lambda N, of: optim.AllReduce(inner, of(reduce.powersgd(rank=2)), N),
    "MuLoCo int4": lambda N, of: optim.DiLoCo(muon, of(reduce.coded(codec="int4")), N, every=5),
}


def train(N, L, method, of=lambda part: part, steps=STEPS):
    """Return the parameters of all workers after training with a method."""
    if method in PLAIN:
        return Training(N, L, PLAIN[method]).run(steps)
    with jax.enable_x64(True):
        return Training(N, L, functools.partial(CODED[method], of=of)).run(steps)


# -- The dense reference of codecs on shards --------------------------------------------------------------------------


def _axis(shape, L):
    """The longest axis that L divides; None: the array is cut as a padded vector."""
    axes = [axis for axis, size in enumerate(shape) if size % L == 0]
    return max(axes, key=lambda axis: shape[axis]) if axes else None


def cut(tree, L, place):
    """The shard of the device at a place."""

    def of(x):
        axis = _axis(x.shape, L)
        return jnp.pad(x.ravel(), (0, -x.size % L)).reshape(L, -1)[place] if axis is None else jnp.split(x, L, axis)[place]

    return jax.tree.map(of, tree)


def joined(shards, like):
    """The tree whose shards these are."""

    def of(x, *parts):
        axis = _axis(x.shape, len(parts))
        return jnp.concatenate(parts)[: x.size].reshape(x.shape) if axis is None else jnp.concatenate(parts, axis)

    return jax.tree.map(of, like, *shards)


def each_place(L, fn, tree, *states):
    """Results of `fn` on the shard and states of every place, with the random keys of the place."""
    for place in range(L):
        with mock.patch.object(mesh, "own_shard_key", functools.partial(jax.random.fold_in, data=place)):
            yield fn(cut(tree, L, place), *(state[place] for state in states))


class PerShardMixer(gossip.WrappedMixer):
    """Mixes the L shards of whole arrays one after the other, each as a device of the worker does."""

    count: int

    def init(self, params):
        return tuple(each_place(self.count, self.inner.init, params))

    def exchange(self, params, state, phase):
        return tuple(each_place(self.count, lambda x, own: self.inner.exchange(x, own, phase), params, state))

    def combine(self, params, received, state, phase, step):
        combine = lambda x, arrived, own: self.inner.combine(x, arrived, own, phase, step)
        shards, states = zip(*each_place(self.count, combine, params, received, state))
        return joined(shards, params), states


class PerShardReducer(reduce.WrappedReducer):
    """Averages the L shards of whole arrays one after the other, each as a device of the worker does."""

    _: dataclasses.KW_ONLY
    count: int

    def init(self, params):
        return tuple(each_place(self.count, self.reducer.init, params))

    def reduce(self, grads, state, phase=None):
        shards, states = zip(
            *each_place(self.count, lambda x, own: super(PerShardReducer, self).reduce(x, own, phase), grads, state)
        )
        return joined(shards, grads), states


def per_shard(part, L):
    """Return the mixer or reducer that acts on each of L shards by itself."""
    if isinstance(part, reduce.Reducer):
        return PerShardReducer(part.channel, reducer=part, count=L)
    return PerShardMixer(part, L)
