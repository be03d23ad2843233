"""Measures an assumption of lazy error propagation: that compression errors are independent of the changes between messages.

Recorded is cos(e, X_j − X_{j+1}), with X_j and X_{j+1} successive gradients of one link that are compressed, and e the error
remembered after X_j. The paper's argument for convergence needs the two to be independent, so the cosine to be near zero.

Reference: Song et al. 2023, arXiv 2301.09830, figure 11.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import schedules
from decjax.pipeline import links
from decjax.pipeline.boundary import Boundary, Transfer


class Probe(NamedTuple):
    """State of `probed`, of one stage."""

    boundary: Any  # state of the boundary that is measured
    last: jax.Array  # [C, B, T, D], X_j, the latest compressed gradient of each chunk's link, before compression
    cosine_CxM: jax.Array  # at each microbatch's latest compressed gradient; NaN where none was sent, or e or the change is zero


def probed(boundary: Boundary) -> Boundary:
    """A boundary with the same messages, which also records the cosines in its state, a `Probe`.

    The given one must be `coded`, with compressed gradients and error "carry", "flush" or "reset".
    """
    label = schedules.BACKWARD, True

    def init(like, schedule):
        C, M = schedule.num_chunks, schedule.num_microbatches
        return Probe(boundary.init(like, schedule), jnp.zeros((C, *like.shape), links.WIDE), jnp.full((C, M), jnp.nan))

    def watched(transfer, looks):
        def send(x, state, place):
            message, inner = transfer.send(x, state.boundary, place)
            if looks:
                error, wide = state.boundary[schedules.BACKWARD].sender.error[place.chunk], x.astype(links.WIDE)
                change = state.last[place.chunk] - wide
                cosine = jnp.sum(error * change) / (jnp.linalg.norm(error.ravel()) * jnp.linalg.norm(change.ravel()))
                state = state._replace(
                    last=state.last.at[place.chunk].set(wide),
                    cosine_CxM=state.cosine_CxM.at[place.chunk, place.microbatch].set(cosine),
                )
            return message, state._replace(boundary=inner)

        def receive(message, state, place):
            x, inner = transfer.receive(message, state.boundary, place)
            return x, state._replace(boundary=inner)

        return Transfer(send, receive)

    transfers = {own: watched(transfer, own == label) for own, transfer in boundary.transfers.items()}
    return boundary._replace(
        init=init, transfers=transfers, finish=lambda state: state._replace(boundary=boundary.finish(state.boundary))
    )
