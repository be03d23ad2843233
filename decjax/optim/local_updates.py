"""Local updates: every worker takes H steps alone, then all take one outer step along their average change."""

import abc
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import options, reduce
from decjax.buckets import in_float32
from decjax.optim.memories import communicating, init_memory, transient
from decjax.optim.method import Method, Reducing, Wrapping, check_update
from decjax.options import Count, Decay, Positive
from decjax.typing import PyTree


@communicating
@transient("reducer")
class LocalUpdatesState(NamedTuple):
    """State of `local_updates`.

    Attributes:
        inner: state of the inner optimizer.
        outer: state of the outer optimizer, the same on all workers.
        anchor: a, the parameters after the last outer step, the same on all workers.
        reducer: state of the reducer.
    """

    inner: PyTree
    outer: PyTree
    anchor: PyTree
    reducer: PyTree


@options.checked
def local_updates(
    inner: optax.GradientTransformation, reducer: reduce.Reducer, outer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to take H local steps between two averages (equations: `LocalUpdates`).

    The update takes a static `phase`, `reducer.phase(step)`. Steps of phase `reduce.SILENT` send nothing.

    Put wrappers that may skip a step on one worker inside, around `inner`; see `decentralize`.

    Args:
        inner: the optimizer of a worker's local steps, clipping included.
        reducer: how changes are averaged, and how often: `reduce.every(…, H)`.
        outer: the optimizer of the outer step, which is given the average change Δ as its gradient.

    Example:
        >>> reducer = decjax.reduce.every(decjax.reduce.mean(), 30)
        >>> diloco = local_updates(optax.adamw(1e-3), reducer, optax.sgd(0.7, momentum=0.9, nesterov=True))
    """
    return _WithOuter(inner, reducer, num_workers=1, every=1, optimizer_of_outer_steps=outer).tx


class LocalUpdates(Reducing, Wrapping):
    """Base of methods that average changes of H local steps, for an outer step; a subclass defines `outer`.

        x_i ← x_i − α d_i(∇F_i(x_i))                                in every step
        Δ = (1/N) Σ_i (a − x_i);   a ← a − outer(Δ);   x_i ← a      in every H-th, with the anchor a the same on all workers

    So one average of the size of the parameters is sent in H steps, where all-reduce sends H. The inner optimizer's moments are neither
    averaged nor reset by outer steps. With any inner optimizer and an outer step of SGD at rate 1 it is local SGD, also called FedAvg;
    with H = 1, all-reduce of parameters.

    Attributes:
        every: H, steps from one average to the next.
    """

    _: dataclasses.KW_ONLY
    every: Count = 30

    @property
    @abc.abstractmethod
    def outer(self) -> optax.GradientTransformation:
        """The optimizer of the outer step."""

    @functools.cached_property
    def communicator(self):
        return reduce.every(self.reducer, self.every)

    def init(self, params):
        memory = init_memory(self.communicator.init, params)
        return LocalUpdatesState(self.optimizer.init(params), self.outer.init(params), jax.tree.map(jnp.copy, params), memory)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        due = reduce.due_phase(self.communicator, phase)
        updates, inner = self.optimizer.update(grads, state.inner, params, **extra)
        if due == reduce.SILENT:
            return updates, state._replace(inner=inner)
        change = jax.tree.map(jnp.subtract, state.anchor, optax.apply_updates(params, updates))
        averaged, memory = self.communicator.reduce(change, state.reducer, due)
        moves, outer = self.outer.update(in_float32(lambda x: x, averaged), state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, moves)
        return in_float32(jnp.subtract, anchor, params), LocalUpdatesState(inner, outer, anchor, memory)


class _WithOuter(LocalUpdates):
    """Local updates with any outer optimizer."""

    _: dataclasses.KW_ONLY
    optimizer_of_outer_steps: optax.GradientTransformation

    @property
    def outer(self):
        return self.optimizer_of_outer_steps


class NesterovOuter(Method):
    """Base of methods whose outer step has Nesterov momentum.

    Attributes:
        outer_learning_rate: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step; 0: none.
    """

    _: dataclasses.KW_ONLY
    outer_learning_rate: Positive = 0.7
    outer_momentum: Decay = 0.9

    @property
    def outer(self) -> optax.GradientTransformation:
        """The optimizer of the outer step."""
        return optax.sgd(self.outer_learning_rate, self.outer_momentum or None, nesterov=True)


class DiLoCo(NesterovOuter, LocalUpdates, name="diloco"):
    """DiLoCo: every worker takes H local steps, then all take one step with Nesterov momentum along their average change.

        x_i ← x_i − α d_i(∇F_i(x_i)) in every step;   Δ = (1/N) Σ_i (a − x_i);   a ← a − outer(Δ);   x_i ← a in every H-th

    Reference: Douillard et al. 2023, arXiv 2311.08105.
    """


class SparseLoCo(DiLoCo, name="sparseloco"):
    """SparseLoCo: DiLoCo with compressed changes (a few of the values, in few bits), whose errors are added to later changes.

    The default reducer keeps the largest values of each block in 2 bits, and multiplies the remembered error by 0.95 each time.

    Reference: Sarfi et al. 2025, arXiv 2508.15706.
    """

    default_reducer = "codec(codec=block_topk(values=int2),decay=0.95,form='gather')"

    outer_learning_rate: Positive = 1.0
    outer_momentum: Decay = 0.0


class Local(Wrapping, name="local"):
    """No communication: every worker trains by itself."""

    alone = True

    num_workers: int

    def init(self, params):
        return self.inner.init(params)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        return self.optimizer.update(grads, state, params, **extra)

    def phase(self, step):
        return 0

    def num_bytes(self, params, phase):
        return np.zeros(self.num_workers)
