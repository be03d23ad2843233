"""CHOCO gossip, and its form for gradient tracking (BEER): compressed changes travel."""

from decjax import registry
from decjax.channel import Channel
from decjax.codecs import Codec
from decjax.gossip.coded import Scheme, compensated
from decjax.gossip.mixer import Mixer
from decjax.topology import Topology


def estimates(gamma: float) -> Scheme:
    """The scheme of CHOCO: c = C(x − x̂); x̂ <- x̂ + c; d <- d + pull(c); x <- x + γd."""

    def merge(x, c, pulled, memory):
        known, drift = memory
        drift = drift + pulled
        return x + gamma * drift, (known + c, drift)

    return Scheme(lambda x, row_sum: (x, (row_sum - 1) * x), lambda x, memory: x - memory[0], merge, per_round=True)


@registry.register(
    "mixer",
    "choco",
    needs="doubly stochastic graph, contractive codec",
    messages="compressed changes",
    memory="2 copies a round of the period",
)
def choco(
    topology: Topology, channel: Channel = Channel(), *, codec: Codec | str = "int8", gamma: float | None = None, rounds: int = 1
) -> Mixer:
    """CHOCO gossip: compressed changes of the parameters travel, so that the codec's error fades as workers agree.

        c_i = C(x_i − x̂_i)     x̂_i <- x̂_i + c_i     x_i <- x_i + γ d_i     d_i = Σ_j w_ij x̂_j − x̂_i

    x̂_i is the estimate of x_i that its neighbours hold. d_i is kept as one array, however many neighbours there are:
    d_i <- d_i + Σ_j w_ij c_j − c_i, which holds as long as every change of x̂_j reaches worker i. On a time-varying graph there is
    therefore one pair (x̂, d) for each round of the period; the papers have static graphs only. With an exact codec and γ = 1 the
    result is Wx. In order "atc" this is CHOCO-SGD as first published; in order "awc" it is the form that sends after mixing, with
    the message delayed until it overlaps the next gradient, and the same trajectory.

    Args:
        topology: doubly stochastic; it may vary in time.
        channel: how parameters travel.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of the fraction it keeps.
        rounds: R ≥ 1, rounds per step.

    References: Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithms 1 and 2; Koloskova et al. 2020, arXiv 1907.09356.
    """
    return compensated("choco", topology, channel, codec, gamma, rounds, estimates)


@registry.register(
    "mixer",
    "beer",
    method="tracking",
    topology="ring",
    needs="static symmetric graph, contractive codec",
    messages="compressed changes",
    memory="2 copies",
)
def beer(
    topology: Topology, channel: Channel = Channel(), *, codec: Codec | str = "int8", gamma: float | None = None, rounds: int = 1
) -> Mixer:
    """The mixer of BEER: `choco` on a static symmetric graph, as BEER's proof needs it.

    It mixes parameters and gradient trackers; the whole of BEER is `optim.track(inner, beer(…))`.

    Args:
        topology: static, with symmetric W.
        channel: how parameters travel.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of the fraction it keeps.
        rounds: R ≥ 1, rounds per step.

    Reference: Zhao et al. 2022, "BEER: fast O(1/T) rate for decentralized nonconvex optimization with communication compression",
    arXiv 2201.13320.
    """
    if not (topology.is_static and topology.is_symmetric):
        kind = "varies in time" if not topology.is_static else "is directed"
        raise ValueError(
            f"mixer 'beer' needs a static symmetric graph, but topology {topology.name!r} {kind}; use 'ring', "
            "'torus' or 'hypercube', or mixer 'choco'"
        )
    # No restart: its memory is of gradient trackers as well, which do not become equal when parameters are averaged.
    return compensated("beer", topology, channel, codec, gamma, rounds, estimates)._replace(restart=None)
