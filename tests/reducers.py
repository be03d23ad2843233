"""Shared by tests of reducers: gradients of N workers, a compiled reducer, and dense references of several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh, reduce
from decjax.channel import Channel

N, STEPS = 4, 50
MODES = ("devices", "simulated")
SHAPES = {"a": (6, 5), "b": (6, 5), "c": (2, 3, 8), "bias": (5,), "scale": ()}


@functools.cache
def workers(mode="devices"):
    return mesh.make_workers(N, simulate=mode == "simulated")


def gradients(step, seed=0):
    """Gradients of every worker [N, ...]: a slowly changing common part plus an individual one."""
    rng = np.random.default_rng((seed, step))
    common = np.random.default_rng(seed)
    return {
        name: np.cos(0.05 * step) * common.normal(size=shape) + 0.5 * rng.normal(size=(N, *shape)) for name, shape in SHAPES.items()
    }


class Runner:
    """A reducer on stacked gradients, compiled once per phase."""

    def __init__(self, make, mode="devices", dtype=np.float64, like=None, **channel_options):
        w = self.workers = workers(mode)
        self.reducer = make(channel=Channel(w.axis, **channel_options))
        self.dtype, self.compiled = dtype, {}
        like = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], dtype), gradients(0) if like is None else like)
        self.like = like
        self.state = w.jit(self.reducer.init, in_axes=(0,))(w.stack(like))

    def program(self, phase):
        if phase not in self.compiled:
            stacked = self.workers.stack(self.like)
            run = self.workers.jit(functools.partial(self.reducer.reduce, phase=phase), in_axes=(0, 0))
            self.compiled[phase] = run.lower(stacked, self.state).compile()
        return self.compiled[phase]

    def __call__(self, grads_N, step=10**6):
        grads_N = jax.tree.map(lambda x: jax.device_put(np.asarray(x, self.dtype), self.workers.stacked), grads_N)
        out, self.state = self.program(reduce.due_phase(self.reducer, self.reducer.phase(step)))(grads_N, self.state)
        return jax.tree.map(np.asarray, out)


def x64(test):
    @functools.wraps(test)
    def with_x64(*args, **kwargs):
        with jax.enable_x64(True):
            return test(*args, **kwargs)

    return with_x64


def assert_equal_replicas(tree_N):
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), tree_N)


def all_close(one, other, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), one, other)


def mean_of(grads_N):
    return jax.tree.map(lambda x: np.broadcast_to(x.mean(axis=0), x.shape), grads_N)


def flat(grads):
    """[N, values of all arrays]."""
    return np.concatenate([x.reshape(N, -1) for x in jax.tree.leaves(grads)], axis=1)


class DenseShards:
    """Every worker's vector as N shards, which workers encode, and whose owners average them and encode the mean."""

    def __init__(self):
        self.owner = 0.0

    def __call__(self, x, code):
        """Vectors of all workers [N, P] -> (sent [N, P], the average [P]); `owner` is the owners' memory."""
        size = x.shape[1]
        sent = np.stack([[code(shard) for shard in row] for row in np.pad(x, [(0, 0), (0, -size % N)]).reshape(N, N, -1)])
        wanted = self.owner + sent.mean(axis=0)
        averaged = np.stack([code(shard) for shard in wanted])
        self.owner = wanted - averaged
        return sent.reshape(N, -1)[:, :size], averaged.ravel()[:size]
