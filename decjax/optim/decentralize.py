"""Make any optax optimizer decentralized (parameters are mixed) or synchronous (gradients are averaged).

`decentralize` must be the outermost transformation: a scaling or clipping around it would also scale the mixing.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, options, reduce
from decjax.buckets import in_float32
from decjax.optim.inner import of_one_worker
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import Exchange, Order, Ordered, Reducing, Wrapping, check_update, known_phase
from decjax.options import Count, Fraction
from decjax.typing import DType, PyTree


@communicating
@transient("mixer")
class DecentralizeState(NamedTuple):
    """State of `decentralize`.

    Attributes:
        step: steps so far, an int32 scalar; it gives the phase where the caller gives none.
        inner: state of the wrapped optimizer.
        mixer: state of the mixer.
    """

    step: jax.Array
    inner: PyTree
    mixer: PyTree


def mix_in_step(mixer: gossip.Mixer, x: PyTree, state: PyTree, phase: int | None, received: PyTree = None) -> tuple[PyTree, PyTree]:
    """Return (mixed x, state of the mixer), with the neighbors' messages exchanged here unless `received` holds them."""
    if received is not None:
        return mixer.combine(x, received, state.mixer, known_phase(phase), state.step)
    return gossip.mix_due(mixer, x, state.mixer, phase, state.step)


def _settle(mixer: gossip.Mixer, params: PyTree, updates: PyTree, mixer_state: PyTree) -> tuple[PyTree, PyTree]:
    stepped = optax.apply_updates(params, updates)
    return mixer.settle(params, stepped, mixer_state) if mixer.settle else (stepped, mixer_state)


@communicating
@transient("reducer", "pending")
class SynchronizeState(NamedTuple):
    """State of `synchronize`.

    Attributes:
        inner: state of the wrapped optimizer.
        reducer: state of the reducer.
        pending: if stale, (whether there was a step before, its gradient); otherwise ().
    """

    inner: PyTree
    reducer: PyTree
    pending: PyTree


class Gossiping(Ordered, Wrapping):
    """Base of methods that mix values with the neighbors' around an optimizer's step, in some steps and by some share.

    Attributes:
        share: the learning rate ÷ its peak, by step.
        every: p; mix in every p-th step only.
        strength: γ in W' = γW + (1−γ)I, from 0 (no mixing) to 1 (full).
        strength_power: q; γ is multiplied by (learning rate ÷ its peak)^q.
        static_phase: compile one program for each phase of the topology; false: one program for all, whose exchange cannot overlap.
    """

    share: optax.Schedule | None = None
    every: Count = 1
    strength: Fraction = 1.0
    strength_power: float = 0.0
    static_phase: bool = True

    @functools.cached_property
    def optimizer(self):
        return of_one_worker(self.inner)

    @functools.cached_property
    def communicator(self):
        mixer, share, power = gossip.every(self.mixer, self.every), self.share, self.strength_power
        if not power:
            return gossip.damp(mixer, self.strength)
        if share is None:
            raise ValueError(f"strength_power={power} scales mixing with the learning rate: give `share`, or leave it 0")
        return gossip.damp(mixer, lambda step: jnp.asarray(self.strength * share(step) ** power))

    @property
    def exchange(self):
        return super().exchange if self.static_phase else None

    def phase(self, step):
        return super().phase(step) if self.static_phase else None

    def num_bytes(self, params, phase):
        if self.static_phase:
            return super().num_bytes(params, phase)
        # One program holds all phases, so its bytes are declared as the mean over a period of steps.
        mixer = self.communicator
        steps = range(self.every * sum(phase != gossip.SILENT for phase in mixer.phases))
        return np.mean([mixer.num_bytes(params, mixer.phase(step)) for step in steps], axis=0)


class Decentralized(Gossiping, name="decentralized"):
    """Decentralized training (gossip): each worker mixes its parameters with its neighbors' around any optimizer's step.

        order "awc", adapt while communicating     x_i^{t+1} = Σ_j W^t_ij x_j^t − α_t d_i(∇F_i(x_i^t))
        order "atc", adapt then communicate        x_i^{t+1} = Σ_j W^t_ij ( x_j^t − α_t d_j(∇F_j(x_j^t)) )

    x_i^t are the parameters of worker i before step t, d_i its optimizer's direction, α the learning rate and W^t the mixing matrix. In
    order "awc" the exchange does not depend on the gradient and can run while it is computed. The optimizer's moments are not exchanged.

    Reference: arXiv 2410.11998, decentralized Adam.
    """

    def init(self, params):
        return DecentralizeState(jnp.zeros((), jnp.int32), self.optimizer.init(params), init_memory(self.communicator.init, params))

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params, self.order, phase, received)
        mixer = self.communicator
        if self.order == "awc":
            mixed, mixer_state = mix_in_step(mixer, params, state, phase, received)
            updates, inner_state = self.optimizer.update(grads, state.inner, mixed, **extra)
            if mixer.settle is None:
                updates = in_float32(lambda y, x, u: (y - x) + u, mixed, params, updates)
            else:
                settled, mixer_state = _settle(mixer, mixed, updates, mixer_state)
                updates = in_float32(jnp.subtract, settled, params)
        else:
            updates, inner_state = self.optimizer.update(grads, state.inner, params, **extra)
            settled, mixer_state = _settle(mixer, params, updates, state.mixer)
            mixed, mixer_state = mix_in_step(mixer, settled, state._replace(mixer=mixer_state), phase)
            updates = in_float32(jnp.subtract, mixed, params)
        return updates, DecentralizeState(increment(state.step), inner_state, mixer_state)


class AllReduce(Reducing, Wrapping, name="allreduce"):
    """Data-parallel training: gradients are averaged over all workers, exactly or compressed; see `synchronize`.

    Attributes:
        stale: apply the average of the previous step's gradients, so that averaging overlaps with computing the next ones.
    """

    averages_gradients = True

    stale: bool = False

    @functools.cached_property
    def optimizer(self):
        return of_one_worker(self.inner)

    @property
    def exchange(self) -> Exchange | None:
        return (lambda params, state, phase: stale_exchange(self.reducer, state, phase)) if self.stale else None

    def init(self, params):
        pending = (jnp.zeros((), bool), jax.tree.map(jnp.zeros_like, params)) if self.stale else ()
        return SynchronizeState(self.optimizer.init(params), init_memory(self.reducer.init, params), pending)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        if self.stale:
            return self._update_stale(grads, state, params, phase, received, **extra)
        if received is not None:
            raise ValueError("received needs stale=True: the average of this step's gradient cannot be there already")
        averaged, reducer_state = self.reducer.reduce(grads, state.reducer, reduce.due_phase(self.reducer, phase))
        updates, inner_state = self.optimizer.update(averaged, state.inner, params, **extra)
        return updates, SynchronizeState(inner_state, reducer_state, ())

    def _update_stale(self, grads, state, params, phase, received, **extra):
        averaged, reducer_state = stale_exchange(self.reducer, state, phase) if received is None else received
        # Without this barrier compilers may put the update, which does not use this step's gradient, before the forward
        # pass, which would then wait for the all-reduce.
        averaged, grads = jax.lax.optimization_barrier((averaged, grads))
        updates, inner_state = self.optimizer.update(averaged, state.inner, params, **extra)
        is_due, _ = state.pending
        updates = jax.tree.map(lambda u: jnp.where(is_due, u, jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), inner_state, state.inner)
        return updates, SynchronizeState(inner_state, reducer_state, (jnp.ones((), bool), grads))


@options.checked
def decentralize(
    inner: optax.GradientTransformation, mixer: gossip.Mixer, order: Order = "awc"
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that each update also mixes parameters with the neighbors' (equations: `Decentralized`).

    The result's `update(grads, state, params, phase=None)` runs inside a function mapped over the worker axis and returns
    `(mixed − params) + update`, so that `optax.apply_updates` gives x^{t+1}. In order "awc" the inner optimizer receives the
    *mixed* parameters, so decoupled weight decay acts on them: (1−αλ)(Wx)_i.

    Put wrappers that may skip a step on one worker (`optax.apply_if_finite`, `optax.MultiSteps` with a `should_skip_update_fn`)
    inside, around `inner`. Outside, a worker that skips leaves the others waiting for its message, a deadlock; with simulated
    workers the mean of the parameters changes. `decjax.apply_if_finite` checks this.

    Args:
        inner: any optax optimizer, clipping included.
        mixer: what is exchanged, and how; see `decjax.gossip`.
        order: "awc", whose exchange can overlap with the gradient, or "atc", whose exchange waits for it.

    Returns:
        A transformation whose update takes `phase`, `mixer.phase(step)` as a static int: compile one program per phase. Without it
            one program holds all phases and chooses by the step counter in the state (`lax.switch`); its exchange cannot overlap.
            In order "awc", `received` may hold the result of `mixer.exchange(params, state.mixer, phase)`, run by another program.

    Raises:
        ValueError: if the order is unknown; from `update`, if `received` comes with order "atc" or without a phase.

    Example:
        >>> topology = decjax.topology.make("ring", 8)
        >>> tx = decjax.decentralize(optax.adamw(1e-3), decjax.gossip.exact(topology))
    """
    return Decentralized(inner, mixer, order=order).tx


@options.checked
def synchronize(
    inner: optax.GradientTransformation, reducer: reduce.Reducer, stale: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Pass an optimizer the gradient averaged over all workers, so that all replicas stay equal.

        x^{t+1} = x^t − α_{t−s} d( (1/N) Σ_i ∇F_i(x^{t−s}) ),     s = 1 if stale, else 0

    With `stale`, a step applies the average of the previous step's gradients, so that their all-reduce can run while the gradient
    is computed; the first step then changes nothing. The update takes `phase`, `reducer.phase(step)`, which may be left out where
    the reducer has only one. Clipping inside `inner` acts on the averaged gradient.

    Put wrappers that may skip a step on one worker inside, around `inner`; see `decentralize`.

    Args:
        inner: any optax optimizer.
        reducer: how gradients are averaged; see `decjax.reduce`.
        stale: overlap the all-reduce, one step late. `received` may then hold the result of `stale_exchange`.

    Raises:
        ValueError: from `update`, if `received` is given without `stale`, or no phase is given to a reducer with several.
    """
    return AllReduce(inner, reducer, num_workers=1, stale=stale).tx  # only `num_bytes` uses the number


def stale_exchange(reducer: reduce.Reducer, state: SynchronizeState, phase: int | None = None) -> tuple[PyTree, PyTree]:
    """Average the previous step's gradients, all that a stale `synchronize` sends; return (averaged gradient, reducer state).

    It does not depend on this step's gradient, so another program can run it; pass the result to `update` as `received`.
    """
    _, grads = state.pending
    return reducer.reduce(grads, state.reducer, reduce.due_phase(reducer, phase))


@options.checked
def decentralized_adam(
    learning_rate: optax.ScalarOrSchedule,
    mixer: gossip.Mixer,
    order: Order = "awc",
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: DType | None = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Decentralized Adam, `decentralize(optax.adam(learning_rate, …), mixer, order)`; other arguments are those of `optax.adam`."""
    return decentralize(optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov), mixer, order)


@options.checked
def decentralized_adamw(
    learning_rate: optax.ScalarOrSchedule,
    mixer: gossip.Mixer,
    order: Order = "awc",
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: DType | None = None,
    weight_decay: float = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Decentralized AdamW, `decentralize(optax.adamw(learning_rate, …), mixer, order)`; other arguments are those of `optax.adamw`.

    In order "awc" the weight decay acts on the mixed parameters.
    """
    adamw = optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov)
    return decentralize(adamw, mixer, order)
