"""Exact diffusion and D²: each worker undoes what mixing did to its last step, so different data leave no bias."""

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip
from decjax.buckets import in_float32
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import Mixing, Wrapping, check_update
from decjax.registry import Requirement
from decjax.typing import PyTree

TOLERANCE = 1e-6  # of W̃ = W̃ᵀ, and of an eigenvalue


@communicating
@transient("mixer", "correction")
class ExactDiffusionState(NamedTuple):
    """State of exact diffusion and D².

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the wrapped optimizer.
        mixer: state of the mixer.
        correction: c = x − ψ₋, of the shapes of the parameters, in float32 or wider.
    """

    step: jax.Array
    inner: PyTree
    mixer: PyTree
    correction: PyTree


def _matrix(mixer: gossip.Mixer) -> np.ndarray:
    """Return W of linear mixing that is the same in all steps."""
    assert mixer.linear is not None
    return mixer.linear.matrix(mixer.phases.start)


LINEAR = Requirement(
    "mixer",
    "mixing that is linear, without codec or memory",
    lambda mixer: mixer.linear is not None,
    "use mixer 'exact' without a codec, or method 'tracking' with mixer 'beer'",
)
STATIC = Requirement(
    "mixer",
    "a static graph",
    lambda mixer: len(mixer.phases) == 1,
    "use topology 'ring' or another static one, or method 'tracking'",
)
SYMMETRIC = Requirement(
    "mixer",
    "a symmetric graph",
    lambda mixer: np.abs(_matrix(mixer) - _matrix(mixer).T).max() <= TOLERANCE,
    "use topology 'ring', or method 'tracking'",
)
ABOVE_THIRD = Requirement(
    "least_eigenvalue",
    "a graph whose W has eigenvalues of more than -1/3",
    lambda least: least > -1 / 3 + TOLERANCE,
    "use topology 'line', or method 'exact_diffusion'",
)


class ExactDiffusion(Wrapping, Mixing, name="exact_diffusion"):
    """Exact diffusion: decentralized training without bias from different data.

        ψ = x − η d(g)     φ = ψ + x − ψ₋     x <- W̃ φ     ψ₋ <- ψ,     ψ₋ = x at first,     W̃ = (I + W)/2

    d is any optimizer's direction. What is remembered is the correction c = x − ψ₋, which adds up to zero over workers: zero is a valid
    start, also for another number of workers.

    It is computed as c <- c + Σ_j w̃_ij (φ_j − φ_i) with φ = x + u + c for a step u, and then x <- x + u + c. The mean over workers moves
    by the mean of u + c in every step, so rounding errors in the sum of c would move it forever. The differences are as small as the
    disagreement of the workers, and so are their rounding errors.

    The recursion is stable if the eigenvalues of W̃ are more than −1/3, which holds for every (I + W)/2. It is made for one linear,
    symmetric W̃ in all steps; on time-varying graphs it may diverge.

    Reference: Yuan et al. 2017, arXiv 1702.05122.
    """

    requires = (LINEAR, STATIC, SYMMETRIC)
    messages = "parameters"
    memory = "1 correction"
    data = "any; no bias"
    default_topology = "ring"
    _strength: ClassVar[float] = 0.5

    @functools.cached_property
    def communicator(self):
        return gossip.damp(self.mixer, self._strength)

    @property
    def linear(self) -> gossip.Linear:
        """Mixing with W̃."""
        assert self.communicator.linear is not None
        return self.communicator.linear

    def num_bytes(self, params, phase):
        return self.linear.num_bytes(params, self.communicator.phases.start)

    def init(self, params):
        zeros, memory = in_float32(jnp.zeros_like, params), init_memory(self.communicator.init, params)
        return ExactDiffusionState(jnp.zeros((), jnp.int32), self.optimizer.init(params), memory, zeros)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        step, inner = self.optimizer.update(grads, state.inner, params, **extra)
        half = optax.apply_updates(params, in_float32(jnp.add, step, state.correction))
        pulled = self.linear.pull(half, self.communicator.phases.start if phase is None else phase)
        correction = in_float32(jnp.add, state.correction, pulled)
        return in_float32(jnp.add, step, correction), ExactDiffusionState(increment(state.step), inner, state.mixer, correction)


class D2(ExactDiffusion, name="d2"):
    """D²: exact diffusion with W̃ = W, which agrees faster but needs λ_min(W) > −1/3.

        x <- W(2x − x₋ − η(d(g) − d(g₋)))

    A ring of an even number of workers has λ_min = −1/3, a line has not.

    Reference: Tang et al. 2018, arXiv 1803.07068.
    """

    requires = (*ExactDiffusion.requires, ABOVE_THIRD)
    default_topology = "line"
    _strength = 1.0

    @property
    def least_eigenvalue(self) -> float:
        """λ_min(W)."""
        return float(np.linalg.eigvalsh(_matrix(self.mixer)).min())
