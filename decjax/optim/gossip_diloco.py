"""DiLoCo whose outer step averages with neighbours only: a mixer in the place of the reducer.

Every worker has an anchor a_i of its own, and W is the mixing matrix of the round:

    x_i ← x_i − α d_i(∇F_i(x_i))                                           in every step
    Δ_i = a_i − Σ_j w_ij x_j;   a_i ← a_i − outer(Δ_i);   x_i ← a_i        in every H-th

With the complete graph it is DiLoCo, and with outer SGD at rate 1 and no momentum it is local SGD with gossip, x_i ← Σ_j w_ij x_j.
What is mixed is x and not a − x: Σ_j w_ij (a_j − x_j) = 0 wherever each worker is at the optimum of its own data, so with that form
the workers of an invertible W would end there, each at its own.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, registry
from decjax.buckets import in_float32
from decjax.optim.decentralize import mix_in_step
from decjax.optim.memories import communicating, increment, init_memory, transformation, transient
from decjax.optim.method import OldMethod, check_phase_is_known, check_update, known_phase


@communicating
@transient("mixer")
class GossipOuterState(NamedTuple):
    """State of the methods `gossip_diloco` and `noloco`.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the inner optimizer.
        outer: state of the outer step.
        anchor: a_i, this worker's parameters after the last outer step.
        mixer: state of the mixer.
    """

    step: jax.Array
    inner: Any
    outer: Any
    anchor: Any
    mixer: Any


@registry.register(
    "method",
    "gossip_diloco",
    chooses=("mixer", "optimizer"),
    anchored=True,
    messages="parameters, every H steps",
    memory="2 copies",
    source="arXiv 2311.08105, with a mixer",
)
def gossip_diloco(
    inner: optax.GradientTransformation,
    mixer: gossip.Mixer,
    *,
    every: int = 30,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
) -> OldMethod:
    """DiLoCo with neighbours: H local steps, then a step with Nesterov momentum along the change to the mixed parameters.

        Δ_i = a_i − Σ_j w_ij x_j;   m_i ← μm_i + Δ_i;   a_i ← a_i − η(Δ_i + μm_i);   x_i ← a_i

    A worker sends the mixer's messages once in H steps: the parameters, or their code, to each neighbour. With the complete graph it
    is DiLoCo. Any data; graphs and codecs are the mixer's, but not those of push_sum, overlap_push_sum and dcd.

    Args:
        every: H, steps from one outer step to the next.
        outer_learning_rate: η.
        outer_momentum: μ, Nesterov's; 0: none.

    Reference: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo).
    """
    outer = optax.sgd(outer_learning_rate, outer_momentum or None, nesterov=True)
    return _Nesterov("gossip_diloco", inner, mixer, every, outer).method()


@dataclasses.dataclass(frozen=True)
class OuterSteps(abc.ABC):
    """Local steps with an outer step between neighbours: what the methods of this kind share.

    A method of its own defines `values`, `start` and `outer_step`.
    """

    name: str
    inner: optax.GradientTransformation
    mixer: gossip.Mixer
    every: int

    def __post_init__(self):
        check_phase_is_known(f"method {self.name!r}", self.mixer)
        if not self.mixer.keeps_mean:
            raise ValueError(
                f"method {self.name!r} steps along what mixing changes, and {self.mixer} mixes parameters of earlier exchanges; use "
                "mixer 'exact' or 'choco'"
            )
        if self.mixer.settle is not None:
            raise ValueError(
                f"method {self.name!r} moves parameters between two exchanges, and {self.mixer} must see every step; use "
                "mixer 'exact' or 'choco'"
            )

    @property
    def periodic(self) -> gossip.Mixer:
        """The mixer, in every H-th step."""
        return gossip.every(gossip.unrounded(self.mixer), self.every)

    @abc.abstractmethod
    def values(self, params: Any, change: Any) -> Any:
        """What is mixed: parameters, a change of them, or both."""

    @abc.abstractmethod
    def start(self, params: Any) -> Any:
        """The state of the outer step."""

    @abc.abstractmethod
    def outer_step(self, stepped: Any, state: GossipOuterState, phase: int) -> GossipOuterState:
        """The state after the outer step from this worker's parameters."""

    def init(self, params):
        memory = init_memory(lambda params: self.mixer.init(self.values(params, jax.tree.map(jnp.zeros_like, params))), params)
        anchor = jax.tree.map(jnp.copy, params)
        return GossipOuterState(jnp.zeros((), jnp.int32), self.inner.init(params), self.start(params), anchor, memory)

    def update(self, grads, state, params: Any = None, *, phase=None, **extra):
        check_update(params)
        phase = known_phase(phase)
        updates, inner = optax.with_extra_args_support(self.inner).update(grads, state.inner, params, **extra)
        state = state._replace(inner=inner)
        if phase != gossip.SILENT:
            state = self.outer_step(optax.apply_updates(params, updates), state, phase)
            updates = in_float32(jnp.subtract, state.anchor, params)
        return updates, state._replace(step=increment(state.step))

    def method(self) -> OldMethod:
        tx = transformation(self.init, self.update)
        periodic = self.periodic

        def num_bytes(params: Any, phase: int | None) -> np.ndarray:
            assert phase is not None  # It is known beforehand.
            return periodic.num_bytes(self.values(params, params), phase)

        return OldMethod(tx, periodic.phase, num_bytes, mixer=self.mixer, every=self.every)


@dataclasses.dataclass(frozen=True)
class _Nesterov(OuterSteps):
    """An outer optimizer that is given the change to the mixed parameters."""

    outer: optax.GradientTransformation

    def values(self, params, change):
        return params

    def start(self, params):
        return self.outer.init(params)

    def outer_step(self, stepped, state, phase):
        mixed, memory = mix_in_step(self.periodic, stepped, state, phase)
        change = in_float32(jnp.subtract, state.anchor, mixed)
        moves, outer = self.outer.update(change, state.outer, state.anchor)
        return state._replace(outer=outer, anchor=optax.apply_updates(state.anchor, moves), mixer=memory)
