"""A user's own loop: a Flax Linen model and an optax chain, made decentralized, without any other part of decjax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
from decjax import gossip
from decjax.channel import Channel
from decjax.mesh import Axis

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, STEPS, BATCH = 8, 25, 16
LR = 0.05


class MLP(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x_BxD):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x_BxD)))


MODEL = MLP()


@functools.cache
def data():
    """Workers see inputs around different centers, and targets of growing scale: y = (1 + i/2) Σ x."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, N, BATCH, 4)) + 0.5 * rng.normal(size=(N, 1, 4))
    y = x.sum(axis=-1, keepdims=True) * (1 + np.arange(N) / 2)[:, None, None]
    return x.astype(np.float32), y.astype(np.float32)


@functools.cache
def stacked_params():
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 4)))
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], N, axis=0), params)


def loss(params, batch):
    x_BxD, y_Bx1 = batch
    return jnp.mean((MODEL.apply(params, x_BxD) - y_Bx1) ** 2)


def own_step(tx, traces):
    """One worker's step, as a user writes it; `traces` counts how often each phase is traced."""

    def step(params, state, batch, phase):
        traces.append(phase)
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state, value

    return step


def on_devices(mesh, spec, **options):
    """Return (map of a per-worker function over a mesh with plain `jax.shard_map`, initial parameters on that mesh)."""

    def mapped(fn):
        def local(*args):
            return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], args)))

        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, **options)

    return mapped, jax.device_put(stacked_params(), jax.sharding.NamedSharding(mesh, spec))


def worker_mesh():
    return on_devices(decjax.make_workers(N).mesh, jax.sharding.PartitionSpec(decjax.mesh.WORKERS.name), check_vma=False)


def data_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:N]), ("data",))
    return on_devices(mesh, jax.sharding.PartitionSpec("data"))  # JAX's default check_vma


def one_device():
    return functools.partial(jax.vmap, axis_name="worker"), stacked_params()


# name -> (how to map, axis)
WAYS = {
    "workers": (worker_mesh, decjax.mesh.WORKERS),
    "data": (data_mesh, Axis("data")),
    "vmap": (one_device, decjax.mesh.SIMULATED),
}


def chain():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LR))


@functools.cache
def train(way, topology_name, steps=STEPS):
    """Return (params of every step, losses_TxN, traces) of a run."""
    make_map, axis = WAYS[way]
    (mapped, params), traces = make_map(), []
    mixer = gossip.exact(decjax.topology.make(topology_name, N), channel=Channel(axis))
    tx = decjax.decentralize(chain(), mixer)
    step = own_step(tx, traces)
    compiled = {phase: jax.jit(mapped(functools.partial(step, phase=phase))) for phase in mixer.phases}
    state = jax.jit(mapped(tx.init))(params)
    path, losses = [], []
    for t in range(steps):
        batch = jax.tree.map(lambda x, t=t: x[t], data())
        params, state, value_N = compiled[mixer.phase(t)](params, state, batch)
        path.append(jax.tree.map(np.asarray, params))
        losses.append(np.asarray(value_N))
    return path, np.array(losses), traces


def reference(topology_name):
    """The same run with dense matrices: x <- W x + Adam(clip(∇F_i(x_i))), for each worker."""
    topology = decjax.topology.make(topology_name, N)
    tx = chain()
    gradients = jax.jit(jax.vmap(jax.value_and_grad(loss)))
    apply = jax.jit(jax.vmap(tx.update))
    params = stacked_params()
    state = jax.vmap(tx.init)(params)
    path, losses = [], []
    for t in range(STEPS):
        value_N, grads = gradients(params, jax.tree.map(lambda x, t=t: x[t], data()))
        updates, state = apply(grads, state)
        W_NxN = topology.matrix(t)
        params = jax.tree.map(
            lambda x, u, W=W_NxN: np.einsum("ij,j...->i...", W, x).astype(np.float32) + np.asarray(u), params, updates
        )
        path.append(params)
        losses.append(np.asarray(value_N))
    return path, np.array(losses)


def assert_same_path(actual, expected):
    for t, (a, b) in enumerate(zip(actual, expected, strict=True)):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-4, rtol=0, err_msg=f"step {t}")


@pytest.mark.parametrize("way", WAYS)
def test_ring_follows_the_dense_reference(way):
    path, losses, traces = train(way, "ring")
    expected_path, expected_losses = reference("ring")
    assert_same_path(path, expected_path)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-2, atol=1e-3)
    assert traces == [0], "the step was traced more than once"
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()
    replicas = np.asarray(jax.tree.leaves(path[-1])[0]).reshape(N, -1)
    assert replicas.std(axis=0).max() > 1e-3, "workers with different data must differ"


def test_devices_and_one_device_agree():
    simulated = train("vmap", "ring")
    for way in ("workers", "data"):
        path, losses, _ = train(way, "ring")
        assert_same_path(path, simulated[0])
        np.testing.assert_allclose(losses, simulated[1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("way", ["data", "vmap"])
def test_each_phase_compiles_once(way):
    path, _, traces = train(way, "one_peer_exponential")
    assert sorted(traces) == [0, 1, 2]
    assert_same_path(path, reference("one_peer_exponential")[0])


def test_phase_may_be_left_to_the_state():
    """Without `phase`, one compilation serves all phases: the counter in the state selects one."""
    mixer = gossip.exact(decjax.topology.make("one_peer_exponential", N), channel=Channel(Axis("data")))
    tx = decjax.decentralize(chain(), mixer)
    traces, (mapped, params) = [], data_mesh()
    step = jax.jit(mapped(functools.partial(own_step(tx, traces), phase=None)))
    state = jax.jit(mapped(tx.init))(params)
    for t in range(7):
        params, state, _ = step(params, state, jax.tree.map(lambda x, t=t: x[t], data()))
    assert traces == [None]
    assert_same_path([params], [train("data", "one_peer_exponential")[0][6]])


@pytest.mark.parametrize("way", WAYS)
def test_each_worker_clips_by_its_own_norm(way):
    """After one step of SGD with rate 1 from equal replicas, worker i has moved by min(‖g_i‖, c): mixing changed nothing."""
    make_map, axis = WAYS[way]
    batch = jax.tree.map(lambda x: x[0], data())
    norms_N = np.asarray(jax.vmap(lambda p, b: optax.global_norm(jax.grad(loss)(p, b)))(stacked_params(), batch))
    limit = float(np.median(norms_N))
    assert (norms_N > 1.1 * limit).any() and (norms_N < 0.9 * limit).any()
    mixer = gossip.exact(decjax.topology.make("ring", N), channel=Channel(axis))
    tx = decjax.decentralize(optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0)), mixer)
    mapped, start = make_map()
    step = jax.jit(mapped(functools.partial(own_step(tx, []), phase=0)))
    params, _, _ = step(start, jax.jit(mapped(tx.init))(start), batch)
    moved = jax.tree.map(lambda x, y: np.asarray(x) - y, params, stacked_params())
    moved_N = np.sqrt(sum((x.reshape(N, -1) ** 2).sum(axis=1) for x in jax.tree.leaves(moved)))
    np.testing.assert_allclose(moved_N, np.minimum(norms_N, limit), rtol=1e-4)
