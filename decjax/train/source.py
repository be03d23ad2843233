"""Where a gradient comes from: a model on one device, or one divided into stages.

    loss, grads, state = gradient(params, state, tokens_BxT1, key)

of one worker, or of one stage of one worker, whose parameters and gradient are then its own share. The loss is the mean over the
worker's batch, taken in microbatches. The state is what a source remembers from step to step: nothing, for a whole model.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import mesh, models, pipeline, schedules


class Source(NamedTuple):
    """A gradient source, and how the model's parameters are laid out in it.

    Attributes:
        gradient: see the module; it talks to no other worker.
        init: `init(params) -> state`, of one worker or stage.
        split: from a whole model's parameters to a worker's, leaves [S, …] with stages.
        join: its inverse.
        norm: `norm(tree)`, the ℓ2 norm of a whole model's gradient, from a worker's or stage's share.
        coded_nll: `nll` of a whole model whose activations arrive from stage to stage as in training; None where they arrive as
            they are, or depend on what is remembered.
        division: into stages; None: a whole model.
        permutations: pairs (source, target) of stages of every exchange between them.
    """

    gradient: Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, Any, Any]]
    init: Callable[[Any], Any] = lambda params: ()
    split: Callable[[Any], Any] = lambda params: params
    join: Callable[[Any], Any] = lambda params: params
    norm: Callable[[Any], jax.Array] = optax.global_norm
    coded_nll: Callable[[Any, jax.Array, jax.Array], jax.Array] | None = None
    division: pipeline.Division | None = None
    permutations: tuple[tuple[tuple[int, int], ...], ...] = ()


def stateless(gradient: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]) -> Callable:
    """A source's gradient from `gradient(params, batch, key) -> (loss, grads)`, which remembers nothing."""
    return lambda params, state, batch, key: (*gradient(params, batch, key), state)


def plain(nll: Callable, microbatches: int = 1) -> Source:
    """The gradient of a whole model.

    Args:
        nll: `nll(params, batch, key)`, any shape; the loss is its mean.
        microbatches: M, parts of equal size that the batch is taken in, one after the other.
    """
    value_and_grad = jax.value_and_grad(lambda params, batch, key: nll(params, batch, key).mean())

    if microbatches == 1:
        return Source(stateless(value_and_grad))

    def gradient(params, batch, key):
        def add(total, inputs):
            return jax.tree.map(jnp.add, total, value_and_grad(params, *inputs)), None

        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch), jax.random.split(key, microbatches)
        total, _ = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)
        return jax.tree.map(lambda x: x / microbatches, total)

    return Source(stateless(gradient))


def pipelined(
    division: pipeline.Division, executor: pipeline.Pipeline, batch_size: int, context: int, coded_nll: Callable | None = None
) -> Source:
    """The gradient of a model that is divided into stages.

    Args:
        division: into stages.
        executor: of a schedule, from `pipeline.make_gradient`.
        batch_size: sequences of a worker's batch.
        context: T.
        coded_nll: see `Source`.
    """
    tokens = jax.ShapeDtypeStruct((batch_size, context + 1), jnp.int32)
    return Source(
        executor.gradient,
        lambda params: executor.init(tokens),
        division.split,
        division.join,
        division.global_norm,
        coded_nll,
        division,
        (*executor.table.permutations, *division.permutations),
    )


def of_model(
    model: models.Model,
    *,
    stages: int,
    microbatches: int,
    schedule: str,
    chunks: int,
    layers: tuple[int, ...],
    remat: bool,
    autoencoder: int = 0,
    fused_embedding: bool = False,
    batch_size: int,
    boundary: pipeline.Boundary | None = None,
) -> Source:
    """The source of a config's `pipeline` section.

    Args:
        model: to train.
        stages: S; 1: the whole model.
        microbatches: M.
        schedule, chunks: see `schedules.make`.
        layers: of each virtual stage; empty: equally many.
        remat: see `pipeline.make_gradient`.
        autoencoder, fused_embedding: see `pipeline.Division`.
        batch_size: sequences of a worker's batch.
        boundary: what travels between stages; None: everything as it is.

    Raises:
        ValueError: in one line: the value, the constraint and the fix.
    """
    if microbatches < 1 or batch_size % microbatches:
        raise ValueError(
            f"microbatches={microbatches} does not divide a worker's batch of {batch_size} sequences; "
            f"use one of {[m for m in range(1, batch_size + 1) if batch_size % m == 0]}, or another batch_size"
        )
    table = schedules.make(schedule, stages, microbatches, chunks)
    if stages == 1:
        given = dict(remat=remat, layers=layers, autoencoder=autoencoder, fused_embedding=fused_embedding)
        if idle := next((name for name, value in given.items() if value), None):
            raise ValueError(f"pipeline.{idle} belongs to a pipeline, got stages=1; leave it out")
        if boundary:
            raise ValueError(
                "boundary.backward and boundary.forward are forms of messages between stages, got stages=1; leave "
                "them empty, or use stages=2"
            )
        return plain(model.nll, microbatches)
    if boundary and autoencoder:
        raise ValueError(
            f"pipeline.autoencoder={autoencoder} is itself a form of messages between stages; leave it out, or leave "
            "boundary.backward and boundary.forward empty"
        )
    division = pipeline.divide(model.parts, stages, chunks, layers, autoencoder=autoencoder, fused_embedding=fused_embedding)
    received = boundary and boundary.received
    return pipelined(
        division,
        pipeline.make_gradient(division, table, remat=remat, boundary=boundary),
        batch_size,
        model.context,
        _coded_nll(division, received, batch_size // microbatches) if received else None,
    )


def _coded_nll(division: pipeline.Division, received: Callable, microbatch_size: int) -> Callable:
    """`nll` of a whole model, with what arrives of activations in place of what is sent.

    Messages are those of a microbatch, or of as many sequences as divide it and the batch: the parts that devices of a
    tensor-parallel group send.
    """

    def between(x_BxTxD, key):
        B, T, D = x_BxTxD.shape
        size = math.gcd(B, microbatch_size)
        count = B // size * math.gcd(size * T, mesh.tensor_size())
        parts = jax.vmap(received)(x_BxTxD.reshape(count, -1, D), jax.random.split(key, count))
        return parts.reshape(x_BxTxD.shape)

    return lambda params, tokens_BxT1, key: division.nll(params, tokens_BxT1, lambda x, v: between(x, jax.random.fold_in(key, v)))
