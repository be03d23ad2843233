"""Local updates: every worker takes H steps alone, then all take one outer step along their average change.

    x_i ← x_i − α d_i(∇F_i(x_i))                                in every step
    Δ = (1/N) Σ_i (a − x_i);   a ← a − outer(Δ);   x_i ← a      in every H-th, with the anchor a the same on all workers

So one average of the size of the parameters is sent in H steps, where all-reduce sends H.

    inner        average               outer optimizer
    any          mean                  SGD, learning rate 1             local SGD, FedAvg; with H = 1 all-reduce of parameters
    AdamW        mean                  SGD 0.7, Nesterov 0.9            DiLoCo        (Douillard et al. 2023, arXiv 2311.08105)
    AdamW        top-k codec, error    SGD, learning rate 1             SparseLoCo    (Sarfi et al. 2025, arXiv 2508.15706)
                 decay 0.95

The inner optimizer's moments are not averaged, and are not reset by outer steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import options, reduce
from decjax.buckets import in_float32
from decjax.optim.decentralize import check_update
from decjax.optim.memories import communicating, init_memory, transformation, transient


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

    inner: Any
    outer: Any
    anchor: Any
    reducer: Any


@options.checked
def local_updates(
    inner: optax.GradientTransformation, reducer: reduce.Reducer, outer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with H local steps between two averages (equations: `decjax.optim.local_updates`).

    The update takes a static `phase`, `reducer.phase(step)`. Steps of phase `reduce.SILENT` send nothing.

    Put wrappers that may skip a step on one worker inside, around `inner`; see `decentralize`.

    Args:
        inner: the optimizer of a worker's own steps, clipping included.
        reducer: how changes are averaged, and how often: `reduce.every(…, H)`.
        outer: the optimizer of the outer step, which is given the average change Δ as its gradient.

    Example:
        >>> reducer = decjax.reduce.every(decjax.reduce.mean(), 30)
        >>> diloco = local_updates(optax.adamw(1e-3), reducer, optax.sgd(0.7, momentum=0.9, nesterov=True))

    Reference: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo); the others are named at the top of the module.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        memory = init_memory(reducer.init, params)
        return LocalUpdatesState(inner.init(params), outer.init(params), jax.tree.map(jnp.copy, params), memory)

    def update(grads, state, params: Any = None, *, phase=None, **extra):
        check_update(params)
        due = reduce.due_phase(reducer, phase)
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        if due == reduce.SILENT:
            return updates, state._replace(inner=inner_state)
        change = jax.tree.map(jnp.subtract, state.anchor, optax.apply_updates(params, updates))
        averaged, reducer_state = reducer.reduce(change, state.reducer, due)
        moves, outer_state = outer.update(averaged, state.outer, state.anchor)
        anchor = optax.apply_updates(state.anchor, moves)
        return in_float32(jnp.subtract, anchor, params), LocalUpdatesState(inner_state, outer_state, anchor, reducer_state)

    return transformation(init, update)
