"""Muon of matrices, stacks and convolutions, and MuLoCo against a dense NumPy reference, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import models, optim, reduce, registry
from decjax.optim.optimizers import POLYNOMIALS, muon
from tests.outer import LR, START, STEPS, X0, Adam, N, gradients, trajectory

BETA, H = 0.95, 4
pytestmark = pytest.mark.usefixtures("quick_compilation")


def orthogonalized(M):
    """Five Newton-Schulz iterations of Muon's polynomial, from M over its Frobenius norm."""
    if M.shape[0] > M.shape[1]:
        return orthogonalized(M.T).T
    X = M / (np.linalg.norm(M) + 1e-8)
    for _ in range(5):
        S = X @ X.T
        X = 3.4445 * X + (-4.775 * S + 2.0315 * S @ S) @ X
    return X


class Muon:
    """Muon's direction of one matrix, with Nesterov's momentum and the bias corrections of optax."""

    def __init__(self):
        self.m, self.t = 0.0, 0

    def __call__(self, G):
        self.t += 1
        self.m = BETA * self.m + (1 - BETA) * G
        ahead = BETA * self.m / (1 - BETA ** (self.t + 1)) + (1 - BETA) * G / (1 - BETA**self.t)
        return np.sqrt(max(1, G.shape[1] / G.shape[0])) * orthogonalized(ahead)


class NesterovAdam(Adam):
    """AdamW as in optax's Muon, for everything that is not a matrix."""

    def __call__(self, g):
        super().__call__(g)
        ahead = self.b1 * self.m / (1 - self.b1 ** (self.t + 1)) + (1 - self.b1) * g / (1 - self.b1**self.t)
        return ahead / (np.sqrt(self.v / (1 - self.b2**self.t)) + self.eps)


@pytest.mark.parametrize("mode", ["devices", "simulated"])
def test_muloco_is_the_dense_reference(mode):
    """H steps of Muon for the matrix and of AdamW for the vector, then DiLoCo's outer step."""
    path, _, _ = trajectory(lambda channel: optim.DiLoCo(muon(LR, adam_b2=0.99), reduce.mean(channel), N, every=H), mode)
    workers, rest = [Muon() for _ in range(N)], NesterovAdam()
    x, anchor, m, expected = START, X0, 0.0, [START]
    for t in range(STEPS):
        g = gradients(x, t)
        steps = np.stack([own(row[:4].reshape(2, 2)).ravel() for own, row in zip(workers, g)])
        x = x - LR * np.concatenate([steps, rest(g[:, 4:])], axis=1)
        if (t + 1) % H == 0:
            delta = (anchor - x).mean(axis=0)
            m = 0.9 * m + delta
            anchor = anchor - 0.7 * (delta + 0.9 * m)
            x = np.tile(anchor, (N, 1))
        expected.append(x)
    np.testing.assert_allclose(path, np.stack(expected), rtol=0, atol=1e-6)


def test_a_stack_steps_as_its_matrices_and_a_convolution_as_one():
    rng = np.random.default_rng(0)
    stack, kernel = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 2, 3, 4))
    with jax.enable_x64(True):
        grads = {"up": jnp.asarray(stack), "conv": jnp.asarray(kernel), "norm": {"scale": jnp.ones((2, 3))}}
        tx = muon(1.0)
        steps, _ = tx.update(grads, tx.init(grads), grads)
    for found, G in zip(steps["up"], stack):
        np.testing.assert_allclose(found, -Muon()(G), atol=1e-6)
    np.testing.assert_allclose(steps["conv"].reshape(12, 4), -Muon()(kernel.reshape(12, 4)), atol=1e-6)
    np.testing.assert_allclose(steps["norm"]["scale"], -NesterovAdam()(np.ones((2, 3))), atol=1e-6)


def test_without_nesterov_it_is_the_published_code():
    """The bias correction only scales what is orthogonalized."""
    rng, m = np.random.default_rng(0), 0.0
    with jax.enable_x64(True):
        tx = muon(1.0, nesterov=False)
        state = tx.init({"up": jnp.zeros((3, 5))})
        for _ in range(3):
            G = rng.normal(size=(3, 5))
            m = BETA * m + (1 - BETA) * G
            steps, state = tx.update({"up": jnp.asarray(G)}, state, {"up": jnp.zeros((3, 5))})
            np.testing.assert_allclose(steps["up"], -np.sqrt(5 / 3) * orthogonalized(m), atol=1e-6)


def test_matrices_of_a_transformer_are_its_kernels_but_the_last():
    params = jax.eval_shape(models.decoder_lm(width=8, hidden=8, heads=1).init, jax.random.key(0))
    state = jax.eval_shape(muon(LR).init, params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.inner_states["muon"])]
    kernels = {
        name for name in ("qkv", "out", "up", "down", "embedding", "head", "norm") if any(f"'{name}'" in path for path in paths)
    }
    assert kernels == {"qkv", "out", "up", "down"}
    usual = registry.make("optimizer", "muon", learning_rate=optax.constant_schedule(0.1), rest="head")
    assert "embedding" in str(jax.tree.leaves_with_path(jax.eval_shape(usual.init, params).inner_states["muon"]))


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(preconditioning="foo"), "preconditioning='foo' is unknown; use one of frobenius, spectral, aol, schatten"),
        (dict(ns_coeffs="foo"), "ns_coeffs='foo' must be three numbers, .* or one of standard, dion"),
        (dict(ns_coeffs=(1, 2)), "ns_coeffs=.1, 2. must be three numbers"),
        (dict(ns_coeffs=((1, 2, 3), (4, 5))), "ns_coeffs=.* must be three numbers"),
        (dict(ns_steps=0), "ns_steps=0 must be at least 1 and at most 256"),
        (dict(ns_steps=-3), "ns_steps=-3 must be at least 1"),
        (dict(beta=2.0), "beta=2.0 must be at least 0 and less than 1"),
    ],
)
def test_what_it_cannot_take_is_refused_in_one_line(options, told):
    with pytest.raises(ValueError, match=f"optimizer 'muon': {told}") as error:
        registry.make("optimizer", "muon", learning_rate=optax.constant_schedule(0.1), **options)
    assert "\n" not in str(error.value)


def test_every_choice_that_it_names_is_one_of_optax():
    params = {"up": jnp.ones((2, 3))}
    preconditionings = registry.part("optimizer", "muon").options["preconditioning"].choices
    assert len(preconditionings) > 1
    for options in (*[dict(preconditioning=name) for name in preconditionings], *[dict(ns_coeffs=name) for name in POLYNOMIALS]):
        tx = muon(1.0, **options)
        jax.eval_shape(lambda tx=tx: tx.update(params, tx.init(params), params))
