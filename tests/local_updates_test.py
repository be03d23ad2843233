"""DiLoCo, SparseLoCo and 1-bit Adam against dense NumPy references written as in the papers, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import codecs, mesh, optim, reduce
from decjax.channel import Channel
from decjax.contrib.onebit import scale_by_onebit_adam
from tests.stand_ins import DenseAdam, dense_top, top

N, DIM, STEPS, LR = 4, 6, 60, 0.05
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
    return mesh.make_workers(N, simulate=mode == "simulated")


def trajectory(make, mode="devices", noise=NOISE):
    """Return x_{STEPS+1 x N x DIM} of `make(channel) -> (transformation, reducer)`, one program per phase."""
    w = workers(mode)
    tx, reducer = make(Channel(w.axis))

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
            phase = reducer.phase(t)
            if phase not in compiled:
                compiled[phase] = w.jit(functools.partial(step, phase=phase), in_axes=(0, 0, 0))
            params, state = compiled[phase](params, state, (A, B, noise[t]))
            path.append(np.asarray(params["x"]))
        assert all(fn._cache_size() == 1 for fn in compiled.values()), "a second call recompiled"
    return np.stack(path), jax.tree.map(np.asarray, state)


# -- Local updates ----------------------------------------------------------------------------------------------------


def local(inner, H, outer, make_reducer=reduce.mean):
    def make(channel):
        reducer = reduce.every(make_reducer(channel=channel), H)
        return optim.local_updates(inner, reducer, outer), reducer

    return make


@pytest.mark.parametrize("mode", MODES)
def test_diloco_is_the_dense_reference(mode):
    """H steps of Adam, Δ = mean(a − x_i), Nesterov: m ← μm + Δ, a ← a − α(Δ + μm)."""
    H, outer_rate, mu = 5, 0.7, 0.9
    path, state = trajectory(local(optax.adam(LR, b2=0.99), H, optax.sgd(outer_rate, momentum=mu, nesterov=True)), mode)
    direction, x, anchor, m = DenseAdam(), np.tile(X0, (N, 1)), X0, 0.0
    for t in range(STEPS):
        x = x - LR * direction(gradients(x, t))
        if (t + 1) % H == 0:
            delta = (anchor - x).mean(axis=0)
            m = mu * m + delta
            anchor = anchor - outer_rate * (delta + mu * m)
            x = np.tile(anchor, (N, 1))
        np.testing.assert_allclose(path[t + 1], x, rtol=1e-6, atol=1e-8)
    assert np.ptp(state.anchor["x"], axis=0).max() == 0, "anchors must be bit-equal"


def test_local_updates_of_one_step_and_rate_one_are_the_mean():
    """H = 1 with outer SGD at rate 1: parameters are averaged in every step, which for SGD is all-reduce."""
    path, _ = trajectory(local(optax.sgd(LR), 1, optax.sgd(1.0)))
    synchronous, _ = trajectory(
        lambda channel: (optim.synchronize(optax.sgd(LR), reduce.mean(channel=channel)), reduce.mean(channel=channel))
    )
    np.testing.assert_allclose(path, synchronous, atol=1e-12)


def decaying(decay):
    return functools.partial(codecs.feedback.residual, decay=decay)


@pytest.mark.parametrize("mode", MODES)
def test_sparseloco_is_the_dense_reference(mode):
    """e ← βe + Δ_i, q_i = top-k(e), e ← e − q_i, a ← a − α mean q_i."""
    H, decay, k, rate = 4, 0.95, 2, 0.8
    coded = functools.partial(reduce.coded, codec=top(k), error=decaying(decay), form="gather")
    path, state = trajectory(local(optax.adam(LR, b2=0.99), H, optax.sgd(rate), coded), mode)
    direction, x, anchor, e = DenseAdam(), np.tile(X0, (N, 1)), X0, np.zeros((N, DIM))
    for t in range(STEPS):
        x = x - LR * direction(gradients(x, t))
        if (t + 1) % H == 0:
            e = decay * e + anchor - x
            q = np.stack([dense_top(k)(row) for row in e])
            e, anchor = e - q, anchor - rate * q.mean(axis=0)
            x = np.tile(anchor, (N, 1))
        np.testing.assert_allclose(path[t + 1], x, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(state.reducer.worker.memory[0].error, e, rtol=1e-6, atol=1e-8)


def test_demo_is_the_dense_reference():
    """m ← βm + g; q = top-k of DCT(m); m ← m − IDCT(q); x ← x − α sign(mean IDCT(q))."""
    decay, k = 0.9, 2
    u = np.arange(DIM)
    D = np.sqrt(2 / DIM) * np.cos(np.pi * u[:, None] * (2 * u + 1) / (2 * DIM))
    D[0] = np.sqrt(1 / DIM)

    class Transformed(codecs.WrappedCodec):
        def encode(self, x, state, key):
            return self.codec.encode(D @ x, state, key)

        def decode(self, message, shape, dtype):
            return D.T @ self.codec.decode(message, shape, dtype)

    tx = optax.sign_sgd(LR)

    def make(channel):
        reducer = reduce.coded(codec=Transformed(top(k)), error=decaying(decay), form="gather", channel=channel)
        return optim.synchronize(tx, reducer), reducer

    path, _ = trajectory(make)
    x, m = np.tile(X0, (N, 1)), np.zeros((N, DIM))
    for t in range(STEPS):
        m = decay * m + gradients(x, t)
        q = np.stack([D.T @ dense_top(k)(D @ row) for row in m])
        m, x = m - q, x - LR * np.sign(q.mean(axis=0))
        np.testing.assert_allclose(path[t + 1], x, atol=1e-8)


# -- 1-bit Adam -------------------------------------------------------------------------------------------------------


def onebit(warm, codec=None):
    def make(channel):
        compressing = reduce.coded(codec=codec or top(2), form="gather", channel=channel)
        reducer = reduce.start_at(compressing, warm, reduce.mean(channel=channel))
        return optax.chain(scale_by_onebit_adam(reducer, b2=0.99), optax.scale_by_learning_rate(LR)), reducer

    return make


@pytest.mark.parametrize("mode", MODES)
def test_onebit_adam_is_the_dense_reference(mode):
    """Adam for T steps; then v is frozen, and m_i = β1 m + (1−β1) g_i is sent with error feedback."""
    warm, k, b1 = 10, 2, 0.9
    path, _ = trajectory(onebit(warm), mode)
    adam, x, e = DenseAdam(), np.tile(X0, (N, 1)), np.zeros((N, DIM))
    for t in range(STEPS):
        g = gradients(x, t)
        if t < warm:
            x = x - LR * adam(g.mean(axis=0))
        else:
            sent = b1 * adam.m + (1 - b1) * g + e
            q = np.stack([dense_top(k)(row) for row in sent])
            e, adam.m = sent - q, q.mean(axis=0)
            x = x - LR * adam.m / (1 - b1 ** (t + 1)) / (np.sqrt(adam.v / (1 - adam.b2**warm)) + adam.eps)
        np.testing.assert_allclose(path[t + 1], x, rtol=1e-6, atol=1e-7)


def test_onebit_adam_survives_a_gradient_that_is_not_finite():
    def make(channel):
        tx, reducer = onebit(10)(channel)

        def update(grads, state, params=None, **extra):
            updates, state = tx.update(grads, state, params, **extra)
            return jax.tree.map(lambda u: jnp.where(jnp.isfinite(u).all(), u, 0), updates), state

        return optax.GradientTransformationExtraArgs(tx.init, update), reducer

    for step in (4, 20):  # during the warm-up, and later
        noise = NOISE.copy()
        noise[step, 1, 2] = np.inf
        path, state = trajectory(make, noise=noise)
        assert np.isfinite(path).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        assert np.ptp(path, axis=1).max() == 0 and (path[step + 1] == path[step]).all() and (path[step + 2] != path[step + 1]).any()


def test_onebit_adam_leaves_what_has_no_variance():
    with pytest.raises(ValueError, match="needs warm steps"):
        scale_by_onebit_adam(reduce.mean())
    w = workers("simulated")
    tx, _ = onebit(1, codecs.make("int8"))(Channel(w.axis))
    grads = w.stack({"x": jnp.array([1.0, 0.0])})
    state = w.jit(tx.init, (0,))(grads)
    _, state = w.jit(functools.partial(tx.update, phase=0), (0, 0))(grads, state)
    updates, _ = w.jit(functools.partial(tx.update, phase=1), (0, 0))(w.stack({"x": jnp.array([1.0, 1.0])}), state)
    assert (np.asarray(updates["x"])[:, 1] == 0).all() and (np.asarray(updates["x"])[:, 0] < 0).all()
