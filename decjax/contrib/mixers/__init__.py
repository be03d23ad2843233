"""Mixers that few runs need.

directed      gossip on directed graphs: mixers "push_sum" and "overlap_push_sum"
repeated      several rounds a step: mixers "accelerated" and "consensus_control"
edges         memory of each edge: mixers "power_gossip" and "relay"
asynchronous  asynchronous gossip, simulated: mixer "delayed"
"""

from decjax.contrib.mixers.asynchronous import Delayed as delayed
from decjax.contrib.mixers.asynchronous import DelayedState
from decjax.contrib.mixers.directed import OverlapPushSum as overlap_push_sum
from decjax.contrib.mixers.directed import OverlapPushSumState, PushSumState
from decjax.contrib.mixers.directed import PushSum as push_sum
from decjax.contrib.mixers.edges import PowerGossip as power_gossip
from decjax.contrib.mixers.edges import PowerState, RelayState
from decjax.contrib.mixers.edges import Relay as relay
from decjax.contrib.mixers.repeated import Accelerated as accelerated
from decjax.contrib.mixers.repeated import ConsensusControl as consensus_control
from decjax.contrib.mixers.repeated import ControlState

__all__ = ["accelerated", "consensus_control", "delayed", "overlap_push_sum", "power_gossip", "push_sum", "relay"]
__all__ += ["ControlState", "DelayedState", "OverlapPushSumState", "PowerState", "PushSumState", "RelayState"]
