"""Gradient sources: how a worker's gradient is computed, by a whole model or by one divided into pipeline stages; for one whose tables
the workers divide among them see `decjax.pipeline.tables`.

    loss, grads, state = gradient(params, state, batch, key)

is a function of one worker, or of one stage of one worker, whose parameters and gradient are then that stage's part. The loss is
the mean over the worker's batch. It is computed in microbatches, which count in proportion to what their own means are divided by,
such as a number of tokens. Their gradients are added up in float32, or in the parameters' type where it is wider, and rounded once.
The state is what a source keeps from step to step: a whole model's variables, such as batch statistics, or the state of compressed
messages between stages.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import mesh, schedules
from decjax.pipeline import accumulate
from decjax.pipeline.boundary import Boundary
from decjax.pipeline.executor import make_gradient
from decjax.pipeline.stages import Division


class Source(NamedTuple):
    """A gradient source, which communicates with other workers only where tables are divided, and the layout of its parameters.

    Attributes:
        gradient: `gradient(params, state, batch, key) -> (loss, grads, state)`, of one worker or stage.
        init: `init(params) -> state`, of one worker or stage.
        split: from a whole model's parameters to a worker's; with stages, leaves [S, …].
        join: the inverse of `split`.
        norm: the ℓ2 norm of the whole gradient, from one worker's or stage's part of it.
        lasts: whether the state is kept when a run continues with another number of workers: yes for variables, no for that of
            messages between stages.
        coded: `measure` of a `tasks.Task` for the whole model, with activations between stages compressed as in training; None
            where they are not compressed, or what arrives depends on state.
        division: of the model into stages; None: a whole model.
        permutations: for every exchange between stages its pairs (source, target).
        deal: from what `split` gives to the parameters of all workers, leaves [N, …], where these hold different parts of one model;
            None: each holds all of it.
        gather: the inverse, N whole models.
        num_bytes: bytes that each worker sends to others for its gradient, where all messages are as small as usual.
        more_bytes: `more_bytes(state)`, of one worker, the bytes beyond these that it has sent in all steps so far; None: none.
    """

    gradient: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Any, Any]]
    init: Callable[[Any], Any] = lambda params: ()
    split: Callable[[Any], Any] = lambda params: params
    join: Callable[[Any], Any] = lambda params: params
    norm: Callable[[Any], jax.Array] = optax.global_norm
    lasts: bool = True
    coded: Callable[[Any, Any, Any], tuple[dict[str, jax.Array], jax.Array]] | None = None
    division: Division | None = None
    permutations: tuple[tuple[tuple[int, int], ...], ...] = ()
    deal: Callable[[Any], Any] | None = None
    gather: Callable[[Any], Any] | None = None
    num_bytes: float = 0.0
    more_bytes: Callable[[Any], jax.Array] | None = None

    def models(self, params: Any) -> Any:
        """Every worker's whole model, leaves [N, …], from the parameters of all workers."""
        joined = jax.vmap(self.join)(params)
        return self.gather(joined) if self.gather else joined

    def variables(self, state: Any) -> Any:
        """The model's variables, taken from a state of this source; () where it has none."""
        return state if self.lasts else ()


def stateless(gradient: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]) -> Callable:
    """A `Source.gradient` made from `gradient(params, batch, key) -> (loss, grads)`, which has no state."""
    return lambda params, state, batch, key: (*gradient(params, batch, key), state)


def whole(
    loss: Callable, variables: Callable[[], Any] = lambda: (), microbatches: int = 1, weight: Callable[[Any], Any] | None = None
) -> Source:
    """The gradient source of a whole model, on one device or a tensor-parallel group.

    Args:
        loss: `loss(params, variables, batch, key) -> (loss, variables)`, the mean over a batch; see `tasks.Task`.
        variables: `variables()`, the variables before the first step.
        microbatches: M, equal parts of the batch whose gradients are computed one after the other, to save memory.
        weight: `weight(batch)`, what the loss of a batch is divided by; None: the same for all. See `tasks.Task`.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def at_once(params, state, batch, key):
        (value, state), grads = value_and_grad(params, state, batch, key)
        return value, grads, state

    def in_parts(params, state, batch, key):
        def add(carry, inputs):
            total, state = carry
            part, key, share = inputs
            *found, state = at_once(params, state, part, key)
            return (accumulate.add(total, found, share), state), None

        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        share_M = jnp.ones(microbatches)
        if weight:
            weight_M = jax.vmap(weight)(parts)
            share_M = weight_M / weight_M.mean()
        zeros = [jnp.zeros(()), accumulate.zeros(params)]
        (total, state), _ = jax.lax.scan(add, (zeros, state), (parts, jax.random.split(key, microbatches), share_M))
        loss, grads = jax.tree.map(lambda x: x / microbatches, total)
        return loss, accumulate.rounded(grads, params), state

    return Source(at_once if microbatches == 1 else in_parts, lambda params: variables())


def check_microbatches(microbatches: int, batch_size: int) -> None:
    """Raises a ValueError if the number of microbatches does not divide a worker's batch."""
    if microbatches < 1 or batch_size % microbatches:
        fits = [m for m in range(1, min(batch_size, 10_000) + 1) if batch_size % m == 0]
        raise ValueError(
            f"microbatches={microbatches} does not divide a worker's batch of {batch_size} examples; "
            f"use one of {fits}, or another batch_size"
        )


def of_division(
    division: Division,
    *,
    schedule: schedules.Name,
    microbatches: int,
    remat: bool,
    batch: jax.ShapeDtypeStruct,
    boundary: Boundary | None = None,
) -> Source:
    """The gradient source of a model divided into pipeline stages.

    Args:
        division: of the model into stages.
        schedule: name of the schedule; see `schedules.make`.
        microbatches: M.
        remat: recompute forward passes in backward passes; see `make_gradient`.
        batch: shape and dtype of a worker's tokens_BxT1.
        boundary: how messages between stages are sent; None: uncompressed.

    Raises:
        ValueError: if a boundary is given for a division with autoencoders.
    """
    if boundary and division.autoencoder:
        raise ValueError(
            f"pipeline.autoencoder={division.autoencoder} already compresses messages between stages; leave it out, or "
            "leave boundary.backward and boundary.forward empty"
        )
    table = schedules.make(schedule, division.num_stages, microbatches, division.num_chunks)
    executor = make_gradient(division, table, remat=remat, boundary=boundary)
    return Source(
        executor.gradient,
        lambda params: executor.init(batch),
        division.split,
        division.join,
        division.global_norm,
        False,
        _measure(division, boundary.received, batch.shape[0] // microbatches) if boundary and boundary.received else None,
        division,
        (*executor.table.permutations, *division.permutations),
    )


def _measure(division: Division, received: Callable, microbatch_size: int) -> Callable:
    """`measure` of the whole model, with the activations between stages replaced by what arrives when they are compressed.

    They are compressed in pieces of a microbatch, or of the largest size that divides it and the batch; with a tensor-parallel
    group, in the parts that its devices send.
    """

    def between(params, x_BxTxD, v):
        del params
        B, T, D = x_BxTxD.shape
        size = math.gcd(B, microbatch_size)
        count = B // size * math.gcd(size * T, mesh.tensor_size())
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), v), count)
        return jax.vmap(received)(x_BxTxD.reshape(count, -1, D), keys).reshape(x_BxTxD.shape)

    nll, _ = division.parts.functions(division.layers, between)

    def measure(params, variables, tokens_BxT1):
        del variables
        nll_BxT = nll(params, tokens_BxT1, None)
        return {"loss": nll_BxT.sum(axis=1)}, jnp.full(len(nll_BxT), nll_BxT.shape[1], nll_BxT.dtype)

    return measure
