"""Decentralized optimizers against dense NumPy references written as in the paper, over 30 steps in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
from decjax import gossip, optim, reduce
from decjax import topology as topology_lib
from decjax.channel import Channel
from tests.stand_ins import DenseAdam

N, DIM, STEPS = 8, 6, 30
LR = 0.05
MODES = ("devices", "simulated")
_rng = np.random.default_rng(0)
# Heterogeneous quadratics F_i(x) = ½ ‖A_i x − b_i‖², with fresh gradient noise in every step.
A = _rng.normal(size=(N, DIM, DIM)) / np.sqrt(DIM) + np.eye(DIM)
B = _rng.normal(size=(N, DIM))
NOISE = 0.1 * _rng.normal(size=(STEPS, N, DIM))
X0 = _rng.normal(size=DIM)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def gradients(x_NxD, step):
    residual = np.einsum("nij,nj->ni", A, x_NxD) - B
    return np.einsum("nji,nj->ni", A, residual) + NOISE[step]


@functools.cache
def workers(mode):
    return decjax.make_workers(N, simulate=mode == "simulated")


def trajectory(tx, mode="devices", phase=lambda step: 0):
    """Return x_{STEPS+1 x N x DIM} of a transformation that runs inside the mapped step."""
    w = workers(mode)

    def step(params, state, data, *, phase):
        a, b, noise = data
        grads = jax.grad(lambda p: 0.5 * jnp.sum((a @ p["x"] - b) ** 2) + noise @ p["x"])(params)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    with jax.enable_x64(True):
        compiled = {}
        params = w.stack({"x": jnp.asarray(X0)})
        state = w.jit(tx.init, in_axes=(0,))(params)
        path = [np.asarray(params["x"])]
        for t in range(STEPS):
            p = phase(t)
            if p not in compiled:
                compiled[p] = w.jit(functools.partial(step, phase=p), in_axes=(0, 0, 0))
            params, state = compiled[p](params, state, (A, B, NOISE[t]))
            path.append(np.asarray(params["x"]))
        assert params["x"].dtype == jnp.float64
        assert all(fn._cache_size() == 1 for fn in compiled.values()), "a second call recompiled"
    return np.stack(path)


# -- Dense references -------------------------------------------------------------------------------------------------


class DenseAccumulatedAdam:
    """AccumAdam's direction, by the equations of decjax.optim.accumulated."""

    def __init__(self, window, b1=0.9, b2=0.99, eps=1e-8):
        self.s, self.b1, self.b2, self.eps = window, b1, b2, eps
        self.M = self.V = self.B = 0.0
        self.t = 0

    def __call__(self, g):
        self.t += 1
        k = -(-self.t // self.s)
        self.B = self.B + g / self.s
        m, v = self.b1 * self.M + (1 - self.b1) * g, self.b2 * self.V + (1 - self.b2) * g**2
        direction = m / (1 - self.b1**k) / (np.sqrt(v / (1 - self.b2**k)) + self.eps)
        if self.t % self.s == 0:
            self.M = self.b1 * self.M + (1 - self.b1) * self.B
            self.V = self.b2 * self.V + (1 - self.b2) * self.B**2
            self.B = 0.0
        return direction


def dense_path(direction, W, order, decay=0.0):
    """x ← Wx − α (d + λ Wx) for "awc", x ← W (x − α (d + λ x)) for "atc"; W(t) is the matrix of step t."""
    x = np.tile(X0, (N, 1))
    path = [x]
    for t in range(STEPS):
        d = direction(gradients(x, t))
        if order == "awc":
            mixed = W(t) @ x
            x = mixed - LR * (d + decay * mixed)
        else:
            x = W(t) @ (x - LR * (d + decay * x))
        path.append(x)
    return np.stack(path)


INNER = {
    "adam": (lambda: optax.adam(LR, b2=0.99), lambda: DenseAdam(), 0.0),
    "adamw": (lambda: optax.adamw(LR, b2=0.99, weight_decay=0.2), lambda: DenseAdam(), 0.2),
    "accum_adam": (lambda: decjax.accumulated_adam(LR, b2=0.99, window=4), lambda: DenseAccumulatedAdam(4), 0.0),
    "accum_adamw": (
        lambda: decjax.accumulated_adamw(LR, b2=0.99, weight_decay=0.2, window=3),
        lambda: DenseAccumulatedAdam(3),
        0.2,
    ),
    "sgd": (lambda: optax.sgd(LR), lambda: lambda g: g, 0.0),
}


@pytest.mark.parametrize("order", optim.ORDERS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mode", MODES)
def test_trajectory_is_that_of_the_dense_reference(mode, inner, order):
    topology = topology_lib.make("one_peer_exponential", N)
    make, direction, decay = INNER[inner]
    mixer = gossip.exact(topology, channel=Channel(workers(mode).axis))
    path = trajectory(decjax.decentralize(make(), mixer, order), mode, mixer.phase)
    np.testing.assert_allclose(path, dense_path(direction(), topology.matrix, order, decay), rtol=1e-6, atol=1e-7)


def test_traced_phase_follows_the_same_schedule():
    topology = topology_lib.make("one_peer_exponential", N)
    for mixer in (gossip.exact(topology), gossip.every(gossip.exact(topology), 2)):
        tx = decjax.decentralize(optax.adam(LR), mixer)
        np.testing.assert_allclose(trajectory(tx, phase=lambda step: None), trajectory(tx, phase=mixer.phase), atol=1e-12)


def test_several_rounds_and_local_steps_compose_in_the_optimizer():
    topology = topology_lib.make("ring", N)
    mixer = gossip.every(gossip.exact(topology, rounds=2), 3)
    tx = decjax.decentralize(optax.sgd(LR), mixer, "atc")

    def W(t):
        return np.linalg.matrix_power(topology.matrix(0), 2) if (t + 1) % 3 == 0 else np.eye(N)

    np.testing.assert_allclose(trajectory(tx, phase=mixer.phase), dense_path(lambda g: g, W, "atc"), atol=1e-9)


def test_aliases_are_the_composition():
    mixer = gossip.exact(topology_lib.make("ring", N))
    pairs = [
        (decjax.decentralized_adam(LR, mixer, b1=0.8), decjax.decentralize(optax.adam(LR, b1=0.8), mixer)),
        (
            decjax.decentralized_adamw(LR, mixer, "atc", weight_decay=0.1),
            decjax.decentralize(optax.adamw(LR, weight_decay=0.1), mixer, "atc"),
        ),
    ]
    for alias, composition in pairs:
        np.testing.assert_array_equal(trajectory(alias), trajectory(composition))


def test_complete_graph_with_atc_and_sgd_is_all_reduce():
    mixer = gossip.exact(topology_lib.make("complete", N))
    gossiped = trajectory(decjax.decentralize(optax.sgd(LR), mixer, "atc"))
    reduced = trajectory(decjax.synchronize(optax.sgd(LR), reduce.mean()))
    np.testing.assert_allclose(gossiped, reduced, atol=1e-12)
    assert np.ptp(reduced, axis=1).max() == 0, "replicas of all-reduce must be bit-equal"


def test_complete_graph_is_not_all_reduce_with_adam_or_awc():
    """The equivalence above is special: without this check, a reference that cannot tell the difference would pass."""
    mixer = gossip.exact(topology_lib.make("complete", N))
    reduced = trajectory(decjax.synchronize(optax.adam(LR), reduce.mean()))
    assert np.abs(trajectory(decjax.decentralize(optax.adam(LR), mixer, "atc")) - reduced).max() > 1e-3
    reduced = trajectory(decjax.synchronize(optax.sgd(LR), reduce.mean()))
    assert np.abs(trajectory(decjax.decentralize(optax.sgd(LR), mixer, "awc")) - reduced).max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", optim.ORDERS)
def test_identical_data_on_all_workers_is_one_worker(monkeypatch, mode, order):
    same = {name: np.broadcast_to(value, (N, *value.shape)) for name, value in (("A", A[0]), ("B", B[0]))}
    monkeypatch.setitem(globals(), "A", same["A"])
    monkeypatch.setitem(globals(), "B", same["B"])
    monkeypatch.setitem(globals(), "NOISE", np.broadcast_to(NOISE[:, :1], NOISE.shape))
    for name in ("one_peer_exponential", "torus", "alternating_exponential_ring"):
        options = dict(local_size=2) if name.startswith("alternating") else {}
        mixer = gossip.exact(topology_lib.make(name, N, **options), channel=Channel(workers(mode).axis))
        path = trajectory(decjax.decentralize(optax.adamw(LR, b2=0.99, weight_decay=0.2), mixer, order), mode, mixer.phase)
        one = dense_path(DenseAdam(), lambda t: np.eye(N), order, 0.2)
        np.testing.assert_allclose(path, one, atol=1e-6)


def test_window_of_one_is_optax():
    for accumulated, plain in (
        (decjax.accumulated_adamw(LR, weight_decay=0.1, window=1), optax.adamw(LR, weight_decay=0.1)),
        (decjax.accumulated_adam(LR, window=1), optax.adam(LR)),
    ):
        tx, reference = (decjax.synchronize(inner, reduce.mean()) for inner in (accumulated, plain))
        np.testing.assert_allclose(trajectory(tx), trajectory(reference), atol=1e-6)


def test_clipping_is_by_each_workers_own_global_norm():
    topology = topology_lib.make("ring", N)
    mixer = gossip.exact(topology)
    path = trajectory(decjax.decentralize(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(LR)), mixer))
    clip = lambda g: g * np.minimum(1, 0.5 / np.linalg.norm(g, axis=1, keepdims=True))
    np.testing.assert_allclose(path, dense_path(clip, topology.matrix, "awc"), atol=1e-6)


def test_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'sync' is unknown; use one of awc, atc"):
        decjax.decentralize(optax.sgd(LR), gossip.exact(topology_lib.make("ring", N)), "sync")


# -- Contract of every transformation ---------------------------------------------------------------------------------


def contracts():
    mixer = gossip.exact(topology_lib.make("one_peer_exponential", N))
    damped = gossip.damp(gossip.every(mixer, 2), lambda step: 1 / (1 + step))
    optimizers = {"sgd": optax.sgd(0.05), "adamw": optax.adamw(0.05), "accum_adamw": decjax.accumulated_adamw(0.05, window=4)}
    for name, inner in optimizers.items():
        yield pytest.param(decjax.decentralize(inner, mixer), mixer.phase, id=f"{name}-awc")
        yield pytest.param(decjax.decentralize(inner, mixer, "atc"), mixer.phase, id=f"{name}-atc")
        yield pytest.param(decjax.decentralize(inner, damped), damped.phase, id=f"{name}-damped")
        yield pytest.param(decjax.synchronize(inner, reduce.mean()), lambda step: 0, id=f"{name}-allreduce")


@pytest.mark.parametrize("tx, phase", contracts())
def test_contract(tx, phase):
    """It descends on heterogeneous quadratics, its state keeps dtypes and shardings, and extra arguments are accepted."""
    w = workers("devices")
    H, target = jnp.eye(DIM), jnp.asarray(2 + np.random.default_rng(1).normal(size=(N, DIM)), jnp.float32)

    def step(params, state, target, *, phase):
        value, grads = jax.value_and_grad(lambda p: 0.5 * jnp.sum((H @ p["x"] - target) ** 2))(params)
        updates, state = tx.update(grads, state, params, phase=phase, value=value)
        return optax.apply_updates(params, updates), state

    params = w.stack({"x": jnp.zeros(DIM), "unused": jnp.ones((2, 2))})
    state = w.jit(tx.init, in_axes=(0,))(params)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree)
    before, optimum = describe((params, state)), target.mean(axis=0)
    start = float(jnp.linalg.norm(optimum))
    steps = {p: w.jit(functools.partial(step, phase=p), in_axes=(0, 0, 0)) for p in {phase(t) for t in range(6)}}
    for t in range(150):
        params, state = jax.block_until_ready(steps[phase(t)](params, state, target))
    assert describe((params, state)) == before
    assert all(fn._cache_size() == 1 for fn in steps.values()), "a second call recompiled"
    distance = float(jnp.linalg.norm(params["x"].mean(axis=0) - optimum))
    assert distance < 0.25 * start
