"""Gossip of compressed messages.

Every mixer here rests on one operation, the pull of neighbours on what messages stand for, Σ_j w_ij c_j − c_i. Both ends
decode the same message, so pulls add up to zero over workers, and the mean of the parameters stays what it is whatever
a codec loses. The mixers differ in what is encoded and in what the pull is added to, for C the codec:

                     encoded           memory                                        mixed
    differences      x_i               –                                             x_i + pull(c)
    deepsqueeze      x_i + e_i         e_i <- x_i + e_i − c_i                        x_i + γ pull(c)
    choco, beer      x_i − x̂_i         x̂_i <- x̂_i + c_i;  d_i <- d_i + pull(c)       x_i + γ d_i
    push_sum         y_i x_i − x̂_i     as choco;  y_i <- y_i + γ pull(y)             (y_i x_i + γ d_i) / y_i
    dcd              x½_i − x_i        x_i <- x_i + c_i;  d_i <- d_i + pull(c)       x_i + d_i;  a local step on it is x½_i

d_i = Σ_j w_ij x̂_j − x̂_i, kept as one array however many neighbours there are, is right as long as every change of x̂_j
reaches worker i. On a time-varying graph choco and push_sum therefore keep one (x̂, d) for each round of the period; that
is ours, the papers have static graphs. Memories start from the parameters that `init` is given, which have to be the same
on all workers; afterwards parameters may be anything.

Members of a node (topologies with L > 1) average exactly, and each exchanges its share of the mean.
"""

from decjax import codecs
from decjax.channel import Channel
from decjax.gossip import schemes
from decjax.gossip.fits import check_contractive, check_doubly_stochastic, check_messages, strength
from decjax.gossip.messages import Messages
from decjax.gossip.mixer import Mixer
from decjax.topology import Topology


def differences(topology: Topology, channel: Channel = Channel(), *, codec: codecs.Codec, rounds: int = 1) -> Mixer:
    """Whole parameters are encoded and mixed as differences: x_i <- x_i + Σ_j w_ij (C(x_j) − C(x_i)).

    Nothing is remembered, so any graph will do, and what the codec loses comes back as noise of the size of C(x) − x.

    Args:
        topology: who talks to whom.
        channel: how parameters travel.
        codec: C.
        rounds: R, rounds per step.

    Returns:
        The `Mixer`; `exact(codec=…)` is the same.

    Raises:
        ValueError: if R < 1, or topology and codec do not fit; from `init` and `num_bytes`, if the codec makes nothing smaller.
    """
    check_messages("exact", topology, codec)
    return schemes.scheme_mixer(schemes.differences(), Messages(topology, codec, channel), rounds)


def deepsqueeze(
    topology: Topology, channel: Channel = Channel(), *, codec: codecs.Codec, gamma: float | None = None, rounds: int = 1
) -> Mixer:
    """DeepSqueeze: whole parameters, with what earlier messages have lost.

        c_i = C(x_i + e_i)     e_i <- x_i + e_i − c_i     x_i <- x_i + γ Σ_j w_ij (c_j − c_i)

    No memory of neighbours, so time-varying graphs will do. Noise stays of the size of what the codec loses of x.

    Args:
        topology: doubly stochastic.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of what it keeps.
        channel, rounds: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Tang et al. 2019, "DeepSqueeze: decentralization meets error-compensated compression", arXiv 1907.07346, algorithm 1.
    """
    check_messages("deepsqueeze", topology, codec)
    check_doubly_stochastic("deepsqueeze", topology)
    check_contractive("deepsqueeze", codec)
    scheme = schemes.deepsqueeze(strength("deepsqueeze", gamma, codec))
    return schemes.scheme_mixer(scheme, Messages(topology, codec, channel), rounds)


def choco(
    topology: Topology, channel: Channel = Channel(), *, codec: codecs.Codec, gamma: float | None = None, rounds: int = 1
) -> Mixer:
    """CHOCO gossip: neighbours know an estimate x̂_i of each other, and what has changed since travels.

        c_i = C(x_i − x̂_i)     x̂_i <- x̂_i + c_i     x_i <- x_i + γ Σ_j w_ij (x̂_j − x̂_i)

    With an exact codec and γ = 1 this is Wx. In order "atc" it is CHOCO-SGD as first published; in order "awc" it is the
    form that sends after mixing, its message delayed to where it overlaps the next gradient, with the same trajectory.
    Memory: x̂ and Σ_j w_ij (x̂_j − x̂_i), once for each round of the topology's period.

    Args:
        topology: doubly stochastic; if it varies in time, each of its rounds keeps estimates of its own.
        codec: C, contractive.
        gamma: γ in (0, 1]; None: 1 for a codec that keeps 0.9 of the energy of noise, else half of what it keeps.
        channel, rounds: see `differences`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, algorithms 1 and 2; Koloskova et al. 2020, arXiv 1907.09356.
    """
    check_messages("choco", topology, codec)
    check_doubly_stochastic("choco", topology)
    check_contractive("choco", codec)
    scheme = schemes.choco(strength("choco", gamma, codec))
    return schemes.scheme_mixer(scheme, Messages(topology, codec, channel), rounds)


def beer(
    topology: Topology, channel: Channel = Channel(), *, codec: codecs.Codec, gamma: float | None = None, rounds: int = 1
) -> Mixer:
    """The mixer of BEER: `choco` on a static symmetric graph. BEER itself is `optim.track(inner, beer(…))`.

    Args:
        topology: static and symmetric, as the proof needs it.
        channel, codec, gamma, rounds: see `choco`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if γ, topology or codec do not fit.

    Reference:
        Zhao et al. 2022, "BEER: fast O(1/T) rate for decentralized nonconvex optimization with communication compression",
        arXiv 2201.13320.
    """
    if not (topology.is_static and topology.is_symmetric):
        kind = "varies in time" if not topology.is_static else "is directed"
        raise ValueError(
            f"mixer 'beer' needs a static symmetric graph, but topology {topology.name!r} {kind}; use 'ring', "
            "'torus' or 'hypercube', or mixer 'choco'"
        )
    check_messages("beer", topology, codec)
    check_contractive("beer", codec)
    scheme = schemes.choco(strength("beer", gamma, codec))
    mixer = schemes.scheme_mixer(scheme, Messages(topology, codec, channel), rounds)
    return mixer._replace(restart=None)  # Its memory is of trackers as well, which no average of parameters makes equal.
