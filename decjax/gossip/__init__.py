"""Mixing parameters over a topology: x_i <- Σ_j W_ij x_j, and variations of it.

A `Mixer` has two parts: `exchange`, which communicates and needs no gradient, and `combine`, which is local. So communication can
overlap with computation: in order "awc" the parameters are exchanged while the gradient is computed, and then combined. Both parts
take a static `phase`, which selects the rounds of the topology: each phase compiles to its own program without conditionals.

Mixers that send the parameters, whole or encoded: `exact` and `deepsqueeze`. Mixers that send changes, so that the codec's error fades as
workers agree: `choco`, `dcd` and `beer`. Wrappers of any of them: `every`, `damp` and `unrounded`. `decjax.contrib.mixers` has more.

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
from decjax.gossip.mixer import SILENT, Gossip, Linear, Mixer, Restartless, WrappedMixer, damp, every, mix, mix_due, unrounded
from decjax.gossip.requirements import typical_contraction
from decjax.gossip.rounds import mix_round

__all__ = ["Mixer", "Gossip", "Linear", "SILENT", "mix", "mix_due", "mix_round"]
__all__ += ["WrappedMixer", "Restartless", "damp", "every", "unrounded"]
__all__ += ["check_exchange", "check_stage_exchange", "typical_contraction"]
__all__ += ["exact", "deepsqueeze", "choco", "dcd", "beer", "CompressedState", "ReplicaState"]
