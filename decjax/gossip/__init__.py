"""Mixing parameters over a topology: x_i <- Σ_j W_ij x_j, and variations of it.

A `Mixer` has two parts: `exchange`, which communicates and needs no gradient, and `combine`, which is local. So communication can
overlap with computation: in order "awc" the parameters are exchanged while the gradient is computed, and then combined. Most mixers
mix in `exchange`; `damp` and `every` have their own `combine`. Both parts take a static `phase`, which selects the rounds of the
topology: each phase compiles to its own program, and no program has a conditional.

Mixers that send the parameters, whole or encoded by a codec C:

    exact          z = W^{tR+R−1} … W^{tR} x             R rounds a step; R = 1 is plain gossip
      with codec   x_i + Σ_j w_ij (C(x_j) − C(x_i))      the codec's error does not fade
    deepsqueeze    the same with C(x_i + e_i), and γ     e_i: what earlier messages lost
    accelerated    z_{r+1} = (1+η) W z_r − η z_{r−1}     static symmetric graphs only
    relay          (1/n) Σ_j x_j, each as old as its path   sums along a spanning tree; order "atc" only
    overlap_push_sum    push-sum, a step late            order "awc" only

Mixers that send changes, so that the codec's error fades as workers agree:

    choco          x_i + γ Σ_j w_ij (x̂_j − x̂_i)          x̂_i: the estimate of x_i that neighbors hold; C(x_i − x̂_i) travels
    dcd            Σ_j w_ij x_j                          C of a whole step travels; neighbors hold x_j itself
    beer           choco on symmetric graphs             for `optim.track`, which mixes a gradient tracker as well
    push_sum       choco of y_i x_i, divided by y_i      directed graphs: only columns need to sum to one
    power_gossip   x_i + Σ_j w_ij P (x_j − x_i)          P: projection on R columns, by a power iteration over each edge

Wrappers of any of them:

    every          mix in every p-th step                local updates in between
    damp           W' = γ W + (1−γ) I                    γ constant or a schedule
    unrounded      Wx in float32, of narrower x          for methods that step along Wx − x

Parameters travel in a few flat buckets. Weighted sums are computed in float32 or wider, and cast back.

Mixers are made with the topology, the channel on which parameters travel, and options; what they require of topology and codec, see
`requirements`, is checked then. `init` and `num_bytes` raise a ValueError if encoded messages are not smaller than the parameters.

Each mixer is a class in a module of its name with its equations and state (`Beer` is in `choco`); `decjax.gossip.choco` is the class
`Choco`. `mixer` defines a mixer, `rounds` executes a round of a topology, `coded` has the base classes of mixers with a codec, and
`check` tests whether messages arrive.
"""

from decjax.gossip.exact import Exact as exact  # Registered first, it comes first in tables.

# isort: split
from decjax.gossip.accelerated import Accelerated as accelerated
from decjax.gossip.check import check_exchange, check_stage_exchange
from decjax.gossip.choco import Beer as beer
from decjax.gossip.choco import Choco as choco
from decjax.gossip.coded import CompressedState
from decjax.gossip.consensus_control import ConsensusControl as consensus_control
from decjax.gossip.consensus_control import ControlState
from decjax.gossip.dcd import Dcd as dcd
from decjax.gossip.dcd import ReplicaState
from decjax.gossip.deepsqueeze import DeepSqueeze as deepsqueeze
from decjax.gossip.delayed import Delayed as delayed
from decjax.gossip.delayed import DelayedState
from decjax.gossip.mixer import SILENT, Gossip, Linear, Mixer, Restartless, WrappedMixer, damp, every, mix, mix_due, unrounded
from decjax.gossip.overlap_push_sum import OverlapPushSum as overlap_push_sum
from decjax.gossip.overlap_push_sum import OverlapPushSumState
from decjax.gossip.power_gossip import PowerGossip as power_gossip
from decjax.gossip.power_gossip import PowerState
from decjax.gossip.push_sum import PushSum as push_sum
from decjax.gossip.push_sum import PushSumState
from decjax.gossip.relay import Relay as relay
from decjax.gossip.relay import RelayState
from decjax.gossip.requirements import typical_contraction
from decjax.gossip.rounds import mix_round

__all__ = [
    "CompressedState",
    "ControlState",
    "Gossip",
    "Restartless",
    "SILENT",
    "Linear",
    "Mixer",
    "OverlapPushSumState",
    "PowerState",
    "PushSumState",
    "DelayedState",
    "RelayState",
    "ReplicaState",
    "WrappedMixer",
    "accelerated",
    "beer",
    "check_exchange",
    "check_stage_exchange",
    "choco",
    "consensus_control",
    "damp",
    "dcd",
    "deepsqueeze",
    "delayed",
    "every",
    "exact",
    "mix",
    "mix_due",
    "mix_round",
    "overlap_push_sum",
    "power_gossip",
    "push_sum",
    "relay",
    "typical_contraction",
    "unrounded",
]
