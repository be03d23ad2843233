"""Boundaries that record how compression errors relate to the changes between messages of pipeline stages.

Records cos(e, X_j − X_{j+1}), with X_j and X_{j+1} successive compressed gradients of one link, and e the error remembered after X_j. The
convergence proof assumes that the two are independent, so that the cosine is near zero.

Reference: Song et al. 2023, arXiv 2301.09830, figure 11.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import schedules
from decjax.pipeline.boundary import BACKWARD, WIDE, Boundary, Place, Transfer
from decjax.pipeline.ticks import Label
from decjax.typing import PyTree


class Probe(NamedTuple):
    """State of a `Probed` boundary, of one stage."""

    boundary: PyTree  # state of the boundary that is measured
    last: jax.Array  # [C, B, T, D], X_j, the latest compressed gradient of each chunk's link, before compression
    cosine_CxM: jax.Array  # at each microbatch's latest compressed gradient; NaN if none was sent, or e or the change is zero


@dataclasses.dataclass(frozen=True)
class Probed(Boundary):
    """A boundary with the same messages that records the cosines in its state, a `Probe`.

    Attributes:
        boundary: with compressed gradients and error "carry", "flush" or "reset".
    """

    boundary: Boundary

    @functools.cached_property
    def transfers(self) -> Mapping[Label, Transfer]:
        return {
            label: Transfer(functools.partial(self._send, label, transfer.send), functools.partial(self._receive, transfer.receive))
            for label, transfer in self.boundary.transfers.items()
        }

    def init(self, like: jax.ShapeDtypeStruct, schedule: schedules.Schedule) -> Probe:
        C, M = schedule.num_chunks, schedule.num_microbatches
        return Probe(self.boundary.init(like, schedule), jnp.zeros((C, *like.shape), WIDE), jnp.full((C, M), jnp.nan))

    def compresses(self, send: schedules.Send) -> bool:
        return self.boundary.compresses(send)

    def finish(self, state: Probe) -> Probe:
        return state._replace(boundary=self.boundary.finish(state.boundary))

    def _send(
        self, label: Label, send: Callable[..., tuple[PyTree, PyTree]], x: jax.Array, state: Probe, place: Place
    ) -> tuple[PyTree, Probe]:
        message, inner = send(x, state.boundary, place)
        if label == (BACKWARD, True):
            error, wide = state.boundary[BACKWARD].sender.error[place.chunk], x.astype(WIDE)
            change = state.last[place.chunk] - wide
            cosine = jnp.sum(error * change) / (jnp.linalg.norm(error.ravel()) * jnp.linalg.norm(change.ravel()))
            state = state._replace(
                last=state.last.at[place.chunk].set(wide), cosine_CxM=state.cosine_CxM.at[place.chunk, place.microbatch].set(cosine)
            )
        return message, state._replace(boundary=inner)

    def _receive(
        self, receive: Callable[..., tuple[PyTree, PyTree]], message: PyTree, state: Probe, place: Place
    ) -> tuple[jax.Array, Probe]:
        x, inner = receive(message, state.boundary, place)
        return x, state._replace(boundary=inner)
