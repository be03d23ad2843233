"""Shared by tests of outer steps: N workers with a quadratic each, methods that run on them in float64, and dense references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import mesh, topology
from decjax.channel import Channel
from tests.stand_ins import DenseAdam as Adam

N, P, STEPS, LR = 4, 8, 24, 0.05
_rng = np.random.default_rng(1)
# F_i(x) = ½ ‖A_i x − b_i‖², with fresh gradient noise in every step.
A = _rng.normal(size=(N, P, P)) / np.sqrt(P) + np.eye(P)
B = _rng.normal(size=(N, P))
NOISE = 0.1 * _rng.normal(size=(STEPS, N, P))
X0 = _rng.normal(size=P)
START = np.tile(X0, (N, 1))


def gradients(x_NxP, step):
    """Return ∇F_i(x_i) of all workers, [N, P]."""
    residual = np.einsum("nij,nj->ni", A, x_NxP) - B
    return np.einsum("nji,nj->ni", A, residual) + NOISE[step]


@functools.cache
def workers(mode):
    return mesh.make_workers(N, simulate=mode == "simulated")


def graph(name="ring", **options):
    return topology.make(name, N, **options)


def tree(x_P):
    """A matrix of two rows, and a vector."""
    return {"matrix": x_P[:4].reshape(2, 2), "vector": x_P[4:]}


def flat(params):
    return jnp.concatenate([params["matrix"].ravel(), params["vector"]])


def trajectory(make, mode="simulated", received=False):
    """Return (x_{STEPS+1 x N x P}, last state, method) of `make(channel) -> Method`, with one program per phase.

    With `received`, the method's exchange is a separate program, as engine "split" runs it.
    """
    w = workers(mode)

    def gradient(x_P, data):
        a_PxP, b_P, noise_P = data
        return tree(a_PxP.T @ (a_PxP @ x_P - b_P) + noise_P)

    with jax.enable_x64(True):
        method = make(Channel(w.axis))

        def step(params, state, data, *arrived, phase):
            given = {"received": arrived[0]} if arrived else {}
            updates, state = method.tx.update(gradient(flat(params), data), state, params, phase=phase, **given)
            return optax.apply_updates(params, updates), state

        compiled, sending, path = {}, {}, [START]
        params = w.stack(tree(jnp.asarray(X0)))
        state = w.jit(method.tx.init, (0,))(params)
        for t in range(STEPS):
            phase = method.phase(t)
            if phase not in compiled:
                compiled[phase] = w.jit(functools.partial(step, phase=phase), (0,) * (4 if received else 3))
                sending[phase] = received and w.jit(functools.partial(method.exchange, phase=phase), (0, 0))
            arrived = (sending[phase](params, state),) if received else ()
            params, state = compiled[phase](params, state, (A, B, NOISE[t]), *arrived)
            path.append(np.asarray(jax.vmap(flat)(jax.tree.map(np.asarray, params))))
        assert all(fn._cache_size() == 1 for fn in compiled.values()), "a second call recompiled"
    return np.stack(path), jax.tree.map(np.asarray, state), method


adam = functools.partial(optax.adam, b2=0.99)


def diloco(H, rate, momentum, nesterov=True, direction=None):
    """Return DiLoCo's path as in its paper: Δ = mean(a − x_i), m ← μm + Δ, a ← a − η(Δ + μm), or η m."""
    direction, x, anchor, m, path = direction or Adam(), START, X0, 0.0, [START]
    for t in range(STEPS):
        x = x - LR * direction(gradients(x, t))
        if (t + 1) % H == 0:
            delta = (anchor - x).mean(axis=0)
            m = momentum * m + delta
            anchor = anchor - rate * (delta + momentum * m if nesterov else m)
            x = np.tile(anchor, (N, 1))
        path.append(x)
    return np.stack(path)
