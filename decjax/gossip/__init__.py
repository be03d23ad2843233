"""Mixing parameters over a topology: x_i <- Σ_j W_ij x_j, and variations of it.

A `Mixer` has two parts: `exchange`, which communicates and needs no gradient, and `combine`, which is local. So communication can
overlap with computation: in order "awc" the parameters are exchanged while the gradient is computed, and then combined. Both parts
take a static `phase`, which selects the rounds of the topology: each phase compiles to its own program without conditionals.

Mixers that send the parameters, whole or encoded: `exact`, `deepsqueeze`, `accelerated`, `relay`, `consensus_control`, `delayed` and
`overlap_push_sum`. Mixers that send changes, so that the codec's error fades as workers agree: `choco`, `dcd`, `beer`, `push_sum` and
`power_gossip`. Wrappers of any of them: `every`, `damp` and `unrounded`.

Parameters travel in a few flat buckets. Weighted sums are computed in float32 or wider, and cast back. `init` and `num_bytes` raise a
ValueError if encoded messages are not smaller than the parameters.
"""

from decjax.gossip.coded import Exact as exact  # Registered first, it comes first in tables.

# isort: split
from decjax.gossip.check import check_exchange, check_stage_exchange
from decjax.gossip.choco import Beer as beer
from decjax.gossip.choco import Choco as choco
from decjax.gossip.choco import Dcd as dcd
from decjax.gossip.choco import DeepSqueeze as deepsqueeze
from decjax.gossip.choco import ReplicaState
from decjax.gossip.coded import CompressedState
from decjax.gossip.delayed import Delayed as delayed
from decjax.gossip.delayed import DelayedState
from decjax.gossip.edges import PowerGossip as power_gossip
from decjax.gossip.edges import PowerState, RelayState
from decjax.gossip.edges import Relay as relay
from decjax.gossip.mixer import SILENT, Gossip, Linear, Mixer, Restartless, WrappedMixer, damp, every, mix, mix_due, unrounded
from decjax.gossip.push_sum import OverlapPushSum as overlap_push_sum
from decjax.gossip.push_sum import OverlapPushSumState, PushSumState
from decjax.gossip.push_sum import PushSum as push_sum
from decjax.gossip.repeated import Accelerated as accelerated
from decjax.gossip.repeated import ConsensusControl as consensus_control
from decjax.gossip.repeated import ControlState
from decjax.gossip.requirements import typical_contraction
from decjax.gossip.rounds import mix_round

__all__ = ["Mixer", "Gossip", "Linear", "SILENT", "mix", "mix_due", "mix_round"]
__all__ += ["WrappedMixer", "Restartless", "damp", "every", "unrounded"]
__all__ += ["check_exchange", "check_stage_exchange", "typical_contraction"]
__all__ += ["exact", "deepsqueeze", "accelerated", "consensus_control", "delayed", "relay", "overlap_push_sum"]
__all__ += ["choco", "dcd", "beer", "push_sum", "power_gossip"]
__all__ += ["CompressedState", "ControlState", "DelayedState", "OverlapPushSumState"]
__all__ += ["PowerState", "PushSumState", "RelayState", "ReplicaState"]
