"""Exact diffusion and D²: each worker undoes what mixing did to its last step, so different data leave no bias.

    ψ = x − η d(g)     φ = ψ + x − ψ₋     x <- W̃ φ     ψ₋ <- ψ,     ψ₋ = x at first

Exact diffusion has W̃ = (I + W)/2, D² has W̃ = W. With W̃ = W this is x <- W(2x − x₋ − η(d − d₋)). d is any optimizer's direction. What
is remembered is the correction c = x − ψ₋, which adds up to zero over workers: zero is a valid start, also for another number of workers.

It is computed as c <- c + Σ_j w̃_ij (φ_j − φ_i) with φ = x + u + c for a step u, and then x <- x + u + c. The mean over workers moves by
the mean of u + c in every step, so rounding errors in the sum of c would move it forever. The differences are as small as the
disagreement of the workers, and so are their rounding errors.

The recursion is stable if the eigenvalues of W̃ are more than −1/3, which holds for every (I + W)/2. It is made for one linear,
symmetric W̃ in all steps; on time-varying graphs it may diverge.

Reference: Yuan et al. 2017, arXiv 1702.05122 (exact diffusion); Tang et al. 2018, arXiv 1803.07068 (D²).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import OldMethod, check_update, mixing

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
    inner: Any
    mixer: Any
    correction: Any


@dataclasses.dataclass(frozen=True)
class _ExactDiffusion:
    """The functions of the transformation; the mixer gives W̃."""

    inner: optax.GradientTransformationExtraArgs
    mixer: gossip.Mixer

    def init(self, params):
        nothing, memory = in_float32(jnp.zeros_like, params), init_memory(self.mixer.init, params)
        return ExactDiffusionState(jnp.zeros((), jnp.int32), self.inner.init(params), memory, nothing)

    def update(self, grads, state, params=None, *, phase=None, **extra):
        check_update(params)
        assert params is not None and self.mixer.linear is not None
        own, inner = self.inner.update(grads, state.inner, params, **extra)  # ψ − x
        half = optax.apply_updates(params, in_float32(jnp.add, own, state.correction))
        drawn = self.mixer.linear.pull(half, self.mixer.phases.start if phase is None else phase)
        correction = in_float32(jnp.add, state.correction, drawn)
        step = increment(state.step)
        return in_float32(jnp.add, own, correction), ExactDiffusionState(step, inner, state.mixer, correction)


def _check(name: str, mixer: gossip.Mixer) -> None:
    """Raises a ValueError unless linear mixing is by one symmetric W̃ in all steps, with eigenvalues above −1/3."""
    assert mixer.linear is not None
    if len(mixer.phases) > 1:
        raise ValueError(
            f"method {name!r} needs a static graph, but the mixing varies over {len(mixer.phases)} steps; use topology 'ring' or another "
            "static one, or method 'tracking'"
        )
    W_NxN = mixer.linear.matrix(mixer.phases.start)
    if np.abs(W_NxN - W_NxN.T).max() > TOLERANCE:
        raise ValueError(
            f"method {name!r} needs a symmetric graph, and this one is directed; use topology 'ring', or method 'tracking'"
        )
    if (least := np.linalg.eigvalsh(W_NxN).min()) <= -1 / 3 + TOLERANCE:
        raise ValueError(
            f"method {name!r} diverges on this graph, whose W has the eigenvalue {least:.3g}: it must be more than -1/3; use method "
            "'exact_diffusion'"
        )


class _Pulls(gossip.WrappedMixer):
    """A mixer of which only the pull is used."""

    def num_bytes(self, params, phase):
        assert self.inner.linear is not None
        return self.inner.linear.num_bytes(params, phase)


def _method(name: str, inner: optax.GradientTransformation, mixer: gossip.Mixer, strength: float = 1.0) -> OldMethod:
    if mixer.linear is None:
        raise ValueError(
            f"method {name!r} needs mixing that is linear, and that of {mixer} is not, as with a codec or a memory; use mixer "
            "'exact' without a codec, or method 'tracking' with mixer 'beer'"
        )
    mixer = _Pulls(gossip.damp(mixer, strength))
    _check(name, mixer)
    return mixing(_ExactDiffusion(optax.with_extra_args_support(inner), mixer), mixer)


TRAITS = dict(chooses=("mixer", "optimizer"), messages="parameters", memory="1 correction", data="any; no bias")


@registry.register(
    "method",
    "exact_diffusion",
    default_topology="ring",
    step="ψ = x − η d(g), x ← (I + W)/2 · (ψ + x − ψ₋)",
    needs="static symmetric graph, mixing without codec",
    source="arXiv 1702.05122",
    **TRAITS,
)
def exact_diffusion(inner: optax.GradientTransformation, mixer: gossip.Mixer) -> OldMethod:
    """Exact diffusion: decentralized training without bias from different data; see `decjax.optim.exact_diffusion`.

    Raises:
        ValueError: if the graph varies or is directed, or the mixer has a codec.

    Reference: Yuan et al. 2017, arXiv 1702.05122.
    """
    return _method("exact_diffusion", inner, mixer, strength=0.5)


@registry.register(
    "method",
    "d2",
    default_topology="line",
    step="x ← W(2x − x₋ − η(d(g) − d(g₋)))",
    needs="as exact_diffusion, and λ_min(W) > −1/3",
    source="arXiv 1803.07068",
    **TRAITS,
)
def d2(inner: optax.GradientTransformation, mixer: gossip.Mixer) -> OldMethod:
    """D²: exact diffusion with W in place of (I + W)/2, which agrees faster but needs λ_min(W) > −1/3.

    A ring of an even number of workers has λ_min = −1/3, a line has not. See `decjax.optim.exact_diffusion`.

    Raises:
        ValueError: if the graph varies or is directed, the mixer has a codec, or an eigenvalue of W is −1/3 or less.

    Reference: Tang et al. 2018, arXiv 1803.07068.
    """
    return _method("d2", inner, mixer)
