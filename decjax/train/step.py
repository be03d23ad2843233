"""The train step of one worker, or of one stage of one worker, in two parts:

    gradient   loss, g_i = ∇F_i(x_i)           communicates with other workers only where they divide tables
    update     x_i ← method(x_i, g_i)          exchanges parameters or gradients, and steps

`train.engine` compiles `Step.train_step` as one program, or its gradient, the method's exchange and the update separately, so that
they overlap. An exchange that does not need the gradient may start before it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from decjax import buckets, config, mesh
from decjax.optim.method import Method
from decjax.train.state import State
from decjax.typing import DType, PyTree


def at_rounded(gradient: Callable, dtype: DType) -> Callable:
    """Return a `Source.gradient` that is taken at rounded parameters.

    The parameters m that a run keeps are then the float32 master copy of those that the model computes with, x. In gossip with a
    `Channel` of the same dtype, workers send x, and m follows what is mixed (order "awc"):

        x_i = round(m_i)     m_i ← m_i + Σ_j w_ij (x_j − x_i) + u_i     u_i: the optimizer's update, from ∇F_i(x_i)

    So m keeps updates that are smaller than the distance of two values of x, and the mean of m over workers changes by u only, since
    the pull of neighbors sums to zero. The gradient is returned in the dtype of m.
    """

    def rounded(params, state, batch, key):
        loss, grads, state = gradient(buckets.cast(params, dtype), state, batch, key)
        return loss, optax.tree.cast_like(grads, params), state

    return rounded


class Step(NamedTuple):
    """The parts of a train step; its functions are of one worker or stage, to be mapped by `Workers.jit`."""

    gradient: Callable[
        ..., tuple[jax.Array, PyTree, PyTree]
    ]  # of a `Source`: (params, source, batch, key) -> (loss, grads, source)
    method: Method
    workers: mesh.Workers
    seed: int  # keys are fold_in(fold_in(seed, worker), step)

    @classmethod
    def of(cls, setup: config.Setup, workers: mesh.Workers) -> "Step":
        """Return the step of a run on these workers."""
        gradient, dtype = setup.source.gradient, setup.spec.param_dtype
        gradient = gradient if dtype == "float32" else at_rounded(gradient, dtype)
        return cls(gradient, setup.method, workers, setup.spec.seed)

    def take_gradient(self, params: PyTree, source: PyTree, batch: PyTree, number: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        """Return (loss, gradient, state of the gradient source) at step `number`."""
        worker_key = jax.random.fold_in(jax.random.key(self.seed), self.workers.axis.index)
        return self.gradient(params, source, batch, jax.random.fold_in(worker_key, number))

    def update(self, state: State, grads: PyTree, **phase_and_received: PyTree) -> State:
        """Return the state after the method's update; keyword arguments are those of `Method.tx`, `phase` and `received`."""
        updates, opt_state = self.method.tx.update(grads, state.opt_state, state.params, **phase_and_received)
        return State(optax.apply_updates(state.params, updates), opt_state, state.source)

    def train_step(self, state: State, batch: PyTree, number: jax.Array, *, phase: int | None) -> tuple[State, jax.Array]:
        """Return (next state, loss before it) of the whole step `number`, which sends the messages of its phase."""
        view = self.method.view
        params = view(state.params, state.opt_state) if view else state.params
        loss, grads, source = self.take_gradient(params, state.source, batch, number)
        state = state._replace(source=source)
        if self.workers.on_cpu:
            # CPU devices overlap nothing within one executable. An exchange that starts before the gradient blocks threads which
            # other devices need for computing: it takes a third of a small step; after the gradient it takes a tenth.
            grads, state = jax.lax.optimization_barrier((grads, state))
        return self.update(state, grads, phase=phase), loss
