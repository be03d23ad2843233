"""Mixers that feed back what codecs lose: CHOCO gossip, its form for gradient tracking (BEER), DeepSqueeze and DCD-PSGD."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decjax import buckets
from decjax.codecs import Codec
from decjax.gossip.coded import Compensated, WithCodec
from decjax.gossip.mixer import Mixer
from decjax.gossip.requirements import CONTRACTIVE, DOUBLY_STOCHASTIC, FINE_CODEC, SINGLE_WORKERS, STATIC, SYMMETRIC
from decjax.gossip.rounds import pull
from decjax.typing import PyTree


class Estimates(Compensated):
    """Base of mixers with estimates x̂ of what neighbors have: c = C(x − x̂); x̂ <- x̂ + c; d <- d + pull(c); x <- x + γd."""

    @property
    def per_round(self) -> bool:
        return True

    def remember(self, x: jax.Array, row_sum: float | jax.Array) -> PyTree:
        return x, (row_sum - 1) * x

    def encoded(self, x: jax.Array, memory: PyTree) -> jax.Array:
        return x - memory[0]

    def merge(self, x: jax.Array, c: jax.Array, pulled: jax.Array, memory: PyTree) -> tuple[jax.Array, PyTree]:
        estimate, drift = memory
        drift = drift + pulled
        return x + self.strength * drift, (estimate + c, drift)


class Choco(Estimates, name="choco"):
    """CHOCO gossip: compressed changes of the parameters travel, so that the codec's error fades as workers agree.

        c_i = C(x_i − x̂_i)     x̂_i <- x̂_i + c_i     x_i <- x_i + γ d_i     d_i = Σ_j w_ij x̂_j − x̂_i

    x̂_i is the estimate of x_i that its neighbors hold. d_i is kept as one array, however many neighbors there are:
    d_i <- d_i + Σ_j w_ij c_j − c_i, which holds as long as every change of x̂_j reaches worker i. On a time-varying graph there is
    therefore one pair (x̂, d) for each round of the period; the papers have static graphs only. With an exact codec and γ = 1 the
    result is Wx. Order "atc" is CHOCO-SGD as first published. Order "awc" is its form that sends after mixing; the message is
    delayed to overlap the next gradient, which leaves the trajectory unchanged.

    References: Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithms 1 and 2; Koloskova et al. 2020, arXiv 1907.09356.
    """

    messages = "compressed changes"
    memory = "2 copies a round of the period"
    sharded = True
    requires = (DOUBLY_STOCHASTIC, CONTRACTIVE)

    codec: Codec | str = "int8"


class Beer(Choco, name="beer"):
    """The mixer of BEER: `choco` on a static symmetric graph, as BEER's proof needs it.

    It mixes parameters and gradient trackers; the whole of BEER is `contrib.corrections.track(inner, beer(…))`.

    Reference: Zhao et al. 2022, "BEER: fast O(1/T) rate for decentralized nonconvex optimization with communication compression",
    arXiv 2201.13320.
    """

    method = "tracking"
    graph = "ring"
    memory = "2 copies"
    requires = (STATIC, SYMMETRIC, *Choco.requires)

    restart = Mixer.restart  # The memory is also of gradient trackers, which do not become equal when parameters are averaged.


class DeepSqueeze(Compensated, name="deepsqueeze"):
    """DeepSqueeze: compressed parameters travel, with what earlier messages have lost added to them.

        c_i = C(x_i + e_i)     e_i <- x_i + e_i − c_i     x_i <- x_i + γ Σ_j w_ij (c_j − c_i)

    Nothing is remembered about neighbors, so the graph may vary in time. The error stays as large as what the codec loses of x.

    Reference: Tang et al. 2019, "DeepSqueeze: decentralization meets error-compensated compression", arXiv 1907.07346, algorithm 1.
    """

    messages = "compressed parameters"
    memory = "1 copy"
    sharded = True
    requires = (DOUBLY_STOCHASTIC, CONTRACTIVE)

    codec: Codec | str = "int8"

    def remember(self, x: jax.Array, row_sum: float | jax.Array) -> PyTree:
        return jnp.zeros_like(x)

    def encoded(self, x: jax.Array, memory: PyTree) -> jax.Array:
        return jnp.add(x, memory)

    def merge(self, x: jax.Array, c: jax.Array, pulled: jax.Array, memory: PyTree) -> tuple[jax.Array, PyTree]:
        return x + self.strength * pulled, x + memory - c


class ReplicaState(NamedTuple):
    """State of `dcd`; the parameters are x⁻_i plus the decoded message.

    Attributes:
        step: int32 scalar, messages so far.
        codec: the codec's state for each bucket.
        message: for each bucket what the next exchange sends.
        known: x⁻_i, the parameters of this worker that its neighbors hold, for each bucket.
        drift: d_i = Σ_j w_ij x⁻_j − x⁻_i, for each bucket.
    """

    step: jax.Array
    codec: tuple
    message: tuple
    known: tuple
    drift: tuple


class Dcd(WithCodec, name="dcd"):
    """DCD-PSGD: compressed steps travel, and neighbors hold exact copies of each other's parameters.

        x½_i = Σ_j w_ij x_j + u_i     c_i = C(x½_i − x_i)     x_i <- x_i + c_i

    A worker changes its parameters by its decoded message, so its neighbors can do the same with their copy. u_i is the optimizer's
    step, computed at x_i in order "awc", where c_i travels while the next gradient is computed; in order "atc" the parameters
    between steps are Σ_j w_ij x_j. What the codec loses of a step is never sent, so it must lose little.

    Attributes:
        codec: C; it has to keep at least 0.9 of the energy of noise.

    Reference: Tang et al. 2018, "Communication compression for decentralized training", arXiv 1803.06443, algorithm 1.
    """

    graph = "ring"
    messages = "compressed steps"
    memory = "2 copies, a message"
    requires = (DOUBLY_STOCHASTIC, STATIC, SINGLE_WORKERS, FINE_CODEC)

    codec: Codec | str = "int8"

    def _encoded(self, layout: buckets.Layout, vectors: Sequence[jax.Array], states: tuple, step: jax.Array) -> tuple:
        forms = self.wire.codecs(layout)
        return tuple(form.encode(x_P, states[b], self.wire.key(step, b)) for b, (form, x_P) in enumerate(zip(forms, vectors)))

    def _decoded(self, layout: buckets.Layout, messages: tuple, like: tuple) -> list[jax.Array]:
        return [form.decode(m, x_P.shape, x_P.dtype) for form, m, x_P in zip(self.wire.codecs(layout), messages, like)]

    def init(self, params: PyTree) -> ReplicaState:
        return self._start(params, jnp.zeros((), jnp.int32))

    def restart(self, average: PyTree, state: ReplicaState) -> ReplicaState:
        return self._start(average, state.step)

    def _start(self, params: PyTree, step: jax.Array) -> ReplicaState:
        layout = self.layout(params)
        known = tuple(layout.pack(params, wide=True))
        nothing = tuple(map(jnp.zeros_like, known))
        states = self.wire.init(layout, known)
        return ReplicaState(step + 1, states, self._encoded(layout, nothing, states, step), known, nothing)

    def exchange(self, params: PyTree, state: ReplicaState, phase: int) -> tuple[PyTree, ReplicaState]:
        layout, axis = self.layout(params), self.channel.axis
        steps = self._decoded(layout, state.message, state.known)
        parts = zip(self.wire.codecs(layout), state.drift, state.message, steps)
        drift = tuple(d + pull(form, message, c, self.topology.rounds[0], axis) for form, d, message, c in parts)
        known = tuple(x + c for x, c in zip(state.known, steps))
        states = tuple(map(self.wire.codec.advance, state.codec, state.message))
        mixed = layout.unpack([x + d for x, d in zip(layout.pack(params, wide=True), drift)], params)
        return mixed, state._replace(codec=states, known=known, drift=drift)

    @property
    def settle(self):
        return self._settled

    def _settled(self, mixed: PyTree, stepped: PyTree, state: ReplicaState) -> tuple[PyTree, ReplicaState]:
        """Encode the optimizer's step as the next message, and change the parameters by what is decoded from it."""
        layout = self.layout(stepped)
        steps = [x - known for x, known in zip(layout.pack(stepped, wide=True), state.known)]
        message = self._encoded(layout, steps, state.codec, state.step)
        moved = [known + c for known, c in zip(state.known, self._decoded(layout, message, state.known))]
        return layout.unpack(moved, stepped), state._replace(step=state.step + 1, message=message)
