"""Gradient sources: how a worker's gradient is computed, by a whole model or by one divided into pipeline stages.

    loss, grads, state = gradient(params, state, batch, key)

is a function of one worker, or of one stage of one worker, which has only its part of the parameters and the gradient. The loss is the
mean over the worker's batch. It is computed in microbatches, weighted by the denominators of their means, such as a number of tokens.
Their gradients are summed in float32, or in the parameters' dtype if it is wider, and rounded once. The state is kept from step to step:
a whole model's variables, such as batch statistics, or the state of compressed messages between stages.
"""

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp
import optax

from decjax import mesh, reduce, registry, schedules
from decjax.pipeline.boundary import UNCOMPRESSED, Boundary
from decjax.pipeline.executor import Pipeline, added, zero_sum
from decjax.pipeline.stages import Division
from decjax.typing import PyTree

Measure = Callable[[PyTree, PyTree, PyTree], tuple[dict[str, jax.Array], jax.Array]]


class Source(registry.Part, kind="source"):
    """A gradient source and the layout of its parameters; by default workers hold the whole model and the source has no state.

    Attributes:
        lasts: whether the state is kept when a run continues with another number of workers: true for variables, false for the state
            of messages between stages.
        divided: whether workers hold different parts of one model; such a source overrides `stacked` and `gathered`.
    """

    lasts = False
    divided = False

    @staticmethod
    def check(spec: object) -> None:
        """Raise a ValueError for a `RunSpec` whose options the source does not support."""

    def init(self, params: PyTree) -> PyTree:
        """Return the state of one worker or stage before the first step."""
        return ()

    def gradient(self, params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        """Return (loss, gradient, next state) of one worker or stage."""
        raise NotImplementedError

    def split(self, params: PyTree) -> PyTree:
        """Return a worker's parameters from those of a whole model; with stages, leaves [S, …]."""
        return params

    def join(self, params: PyTree) -> PyTree:
        """Return the parameters of a whole model, the inverse of `split`."""
        return params

    def stacked(self, params: PyTree, num_workers: int) -> PyTree:
        """Return the parameters of all workers, leaves [N, …], from what `split` returns."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_workers, *jnp.shape(x))), params)

    def gathered(self, params: PyTree) -> PyTree:
        """Return what `split` returned N times, leaves [N, …], from the parameters of all workers."""
        return params

    def models(self, params: PyTree) -> PyTree:
        """Return every worker's whole model, leaves [N, …], from the parameters of all workers."""
        return self.gathered(jax.vmap(self.join)(params))

    def variables(self, state: PyTree) -> PyTree:
        """Return the model's variables from a state of this source; () where it has none."""
        return state if self.lasts else ()

    def norm(self, grads: PyTree) -> jax.Array:
        """Return the ℓ2 norm of the whole gradient from one worker's or stage's part of it."""
        return optax.global_norm(grads)

    def averaging(self, reducer: reduce.Reducer) -> reduce.Reducer:
        """Return the reducer with which this source's gradients are averaged, made from one for all parameters."""
        return reducer

    @functools.cached_property
    def num_bytes(self) -> float:
        """The bytes that each worker sends to others for its gradient in a step, in messages of fixed size."""
        return 0.0

    @property
    def extra_bytes(self) -> Callable[[PyTree], jax.Array] | None:
        """The bytes beyond `num_bytes` that one worker has sent in all steps so far, as a function of the state; None: none."""
        return None

    @functools.cached_property
    def coded(self) -> Measure | None:
        """`Task.measure` of the whole model, with activations between stages compressed as in training; None: uncompressed."""
        return None

    @property
    def division(self) -> Division | None:
        """The division of the model into stages; None: a whole model."""
        return None

    @property
    def permutations(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The pairs (source, target) of every exchange between stages."""
        return ()


def stateless(gradient: Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, PyTree]]) -> Callable:
    """Return a `Source.gradient` made from `gradient(params, batch, key) -> (loss, grads)`, which has no state."""
    return lambda params, state, batch, key: (*gradient(params, batch, key), state)


class Whole(Source):
    """The gradient source of a whole model, on one device or a tensor-parallel group.

    Attributes:
        loss: `loss(params, variables, batch, key) -> (loss, variables)`, the mean over a batch; see `tasks.Task`.
        initial: `initial()`, the variables before the first step.
        microbatches: M, equal parts of the batch whose gradients are computed sequentially, to save memory.
        weight: `weight(batch)`, the denominator of a batch's loss; None: the same for all. See `tasks.Task`.
        around: a transformation of the function that computes the gradient, such as `mesh.one_by_one`.
    """

    lasts = True

    loss: Callable[..., tuple[jax.Array, PyTree]]
    initial: Callable[[], PyTree] = lambda: ()
    microbatches: int = 1
    weight: Callable[[PyTree], jax.Array | None] | None = None
    around: Callable[[Callable], Callable] = lambda gradient: gradient

    def init(self, params: PyTree) -> PyTree:
        return self.initial()

    def gradient(self, params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        return self._gradient(params, state, batch, key)

    @functools.cached_property
    def _gradient(self) -> Callable[..., tuple[jax.Array, PyTree, PyTree]]:
        return self.around(self._at_once if self.microbatches == 1 else self._in_parts)

    def _at_once(self, params, state, batch, key):
        (value, state), grads = jax.value_and_grad(self.loss, has_aux=True)(params, state, batch, key)
        return value, grads, state

    def _in_parts(self, params, state, batch, key):
        M = self.microbatches

        def add(carry, inputs):
            total, state = carry
            part, key, share = inputs
            *values, state = self._at_once(params, state, part, key)
            return (added(total, values, share), state), None

        parts = jax.tree.map(lambda x: mesh.spread(x.reshape(M, -1, *x.shape[1:]), 1), batch)
        weight_M = jax.vmap(self.weight)(parts) if self.weight else None
        share_M = jnp.ones(M) if weight_M is None else weight_M / weight_M.mean()
        zeros = [jnp.zeros(()), zero_sum(params)]
        (total, state), _ = jax.lax.scan(add, (zeros, state), (parts, jax.random.split(key, M), share_M))
        loss, grads = jax.tree.map(lambda x: x / M, total)
        return loss, optax.tree.cast_like(grads, params), state


class Staged(Source):
    """The gradient source of a model divided into pipeline stages.

    Attributes:
        stages: the division of the model.
        schedule: name of the schedule; see `schedules.make`.
        microbatches: M.
        remat: recompute forward passes in backward passes; see `Pipeline`.
        batch: shape and dtype of a worker's tokens_BxT1.
        boundary: how messages between stages are sent.
    """

    stages: Division
    schedule: schedules.Name
    microbatches: int
    remat: bool
    batch: jax.ShapeDtypeStruct
    boundary: Boundary = UNCOMPRESSED

    def __post_init__(self):
        if self.boundary.transfers and self.stages.autoencoder:
            raise ValueError(
                f"pipeline.autoencoder={self.stages.autoencoder} already compresses messages between stages; leave it out, or "
                "leave boundary.backward and boundary.forward empty"
            )

    @functools.cached_property
    def executor(self) -> Pipeline:
        """The gradient by the schedule."""
        schedule = schedules.make(self.schedule, self.stages.num_stages, self.microbatches, self.stages.num_chunks)
        return Pipeline(self.stages, schedule, remat=self.remat, boundary=self.boundary)

    @property
    def division(self) -> Division:
        return self.stages

    @property
    def permutations(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return (*self.executor.table.permutations, *self.stages.permutations)

    def init(self, params: PyTree) -> PyTree:
        return self.executor.init(self.batch)

    def gradient(self, params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        return self.executor.gradient(params, state, batch, key)

    def split(self, params: PyTree) -> PyTree:
        return self.stages.split(params)

    def join(self, params: PyTree) -> PyTree:
        return self.stages.join(params)

    def norm(self, grads: PyTree) -> jax.Array:
        return self.stages.global_norm(grads)

    @functools.cached_property
    def coded(self) -> Measure | None:
        """See `Source.coded`.

        Activations are compressed in pieces of a microbatch, or of the largest size that divides it and the batch; with a
        tensor-parallel group, in the parts that its devices send.
        """
        if not (received := self.boundary.received):
            return None

        def between(params, x_BxTxD, v):
            B, T, D = x_BxTxD.shape
            size = math.gcd(B, self.batch.shape[0] // self.microbatches)
            count = B // size * math.gcd(size * T, mesh.tensor_size())
            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), v), count)
            return jax.vmap(received)(x_BxTxD.reshape(count, -1, D), keys).reshape(x_BxTxD.shape)

        nll, _ = self.stages.parts.functions(self.stages.layers, between)

        def measure(params, variables, tokens_BxT1):
            nll_BxT = nll(params, tokens_BxT1, None)
            return {"loss": nll_BxT.sum(axis=1)}, jnp.full(len(nll_BxT), nll_BxT.shape[1], nll_BxT.dtype)

        return measure
