"""Shared by tests of methods for heterogeneous data: N workers with a quadratic each, in float64, and a method's path on them."""

from collections.abc import Callable
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import decjax
from decjax.channel import Channel
from decjax.optim import Method
from decjax.program import hlo

N, P = 8, 5
MODES = ("simulated", "devices")
_rng = np.random.default_rng(0)
# F_i(x) = ½ xᵀ H_i x − b_iᵀ x, with eigenvalues of H_i between ½ and 1½; Σ_i ∇F_i is zero at OPTIMUM, no ∇F_i is.
_turns = np.linalg.qr(_rng.normal(size=(N, P, P)))[0]
H = np.einsum("nij,nj,nkj->nik", _turns, _rng.uniform(0.5, 1.5, (N, P)), _turns)
B = 3 * _rng.normal(size=(N, P))
X0 = _rng.normal(size=P)
OPTIMUM = np.linalg.solve(H.mean(axis=0), B.mean(axis=0))


def gradients(x_NxP: np.ndarray) -> np.ndarray:
    return np.einsum("nij,nj->ni", H, x_NxP) - B


def error(x_NxP: np.ndarray) -> float:
    """Return the mean squared distance of the workers from the optimum."""
    return float(((x_NxP - OPTIMUM) ** 2).sum(axis=-1).mean())


@functools.cache
def workers(mode: str):
    return decjax.make_workers(N, simulate=mode == "simulated")


def period(method: Method) -> int:
    """Return the number of steps after which the phases repeat."""
    phases = [method.phase(step) for step in range(256)]
    return next(p for p in range(1, 129) if phases[p:] == phases[:-p])


class Path:
    """The path of a method, from one compiled program for all of its phases.

    Attributes:
        x: parameters before each step and after the last, x_{steps+1 x N x P}.
        state: the method's state at the end, stacked over workers.
    """

    def __init__(self, make: Callable[[Channel], Method], steps: int, mode: str = "simulated"):
        w = workers(mode)
        with jax.enable_x64(True):
            self.method = method = make(Channel(w.axis))
            self.period = period(method)
            program = w.jit(functools.partial(_whole, method, self.period, steps), (0, 0, 0))
            given = np.tile(X0, (N, 1)), H, B
            self._compiled = program.lower(*given).compile()
            found, self.state = jax.block_until_ready(self._compiled(*given))
            self.x = np.concatenate([[given[0]], np.asarray(found).swapaxes(0, 1)[:steps]])
            assert self.x.dtype == np.float64

    def sent_and_declared(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that each worker sends in a period, [N]: in the compiled program, and by the method's formula."""
        one, phases = jax.ShapeDtypeStruct((P,), jnp.float64), map(self.method.phase, range(self.period))
        with jax.enable_x64(True):
            declared = [self.method.num_bytes(one, phase) for phase in phases]
        return hlo.bytes_sent(self._compiled.as_text(), N), np.sum(declared, axis=0)


def _whole(method, period, steps, x_P, h_PxP, b_P):
    phases = [method.phase(step) for step in range(period)]

    def one_period(carry, _):
        path = []
        for phase in phases:
            x, state = carry
            updates, state = method.tx.update(h_PxP @ x - b_P, state, x, phase=phase)
            carry = optax.apply_updates(x, updates), state
            path.append(carry[0])
        return carry, jnp.stack(path)

    (_, state), path = jax.lax.scan(one_period, (x_P, method.tx.init(x_P)), length=-(-steps // period))
    return path.reshape(-1, P), state


def assert_follows(path: Path, reference, atol: float = 1e-11) -> None:
    """Check that the path equals that of a generator of x_NxP after each step."""
    expected = np.stack([np.tile(X0, (N, 1)), *itertools.islice(reference, len(path.x) - 1)])
    assert np.abs(expected).max() < 50, "the reference itself diverges"
    np.testing.assert_allclose(path.x, expected, rtol=0, atol=atol)
