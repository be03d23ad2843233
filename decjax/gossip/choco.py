"""Mixers with contractive codecs: CHOCO gossip, its form for gradient tracking (BEER), and DeepSqueeze."""

import jax
import jax.numpy as jnp

from decjax.codecs import Codec
from decjax.gossip.coded import Compensated
from decjax.gossip.mixer import Mixer
from decjax.gossip.requirements import CONTRACTIVE, DOUBLY_STOCHASTIC, STATIC, SYMMETRIC
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
    result is Wx. In order "atc" this is CHOCO-SGD as first published; in order "awc" it is the form that sends after mixing, with
    the message delayed until it overlaps the next gradient, and the same trajectory.

    References: Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithms 1 and 2; Koloskova et al. 2020, arXiv 1907.09356.
    """

    messages = "compressed changes"
    memory = "2 copies a round of the period"
    requires = (DOUBLY_STOCHASTIC, CONTRACTIVE)

    codec: Codec | str = "int8"


class Beer(Choco, name="beer"):
    """The mixer of BEER: `choco` on a static symmetric graph, as BEER's proof needs it.

    It mixes parameters and gradient trackers; the whole of BEER is `optim.track(inner, beer(…))`.

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
    requires = (DOUBLY_STOCHASTIC, CONTRACTIVE)

    codec: Codec | str = "int8"

    def remember(self, x: jax.Array, row_sum: float | jax.Array) -> PyTree:
        return jnp.zeros_like(x)

    def encoded(self, x: jax.Array, memory: PyTree) -> jax.Array:
        return jnp.add(x, memory)

    def merge(self, x: jax.Array, c: jax.Array, pulled: jax.Array, memory: PyTree) -> tuple[jax.Array, PyTree]:
        return x + self.strength * pulled, x + memory - c
