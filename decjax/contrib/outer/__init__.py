"""Variants of DiLoCo: outer steps with a momentum in units of the learning rate, between neighbors, or of one fragment at a time.

slowmo         SlowMo: methods "slowmo" and "slowmo_gossip"
gossip_diloco  outer steps between neighbors: methods "gossip_diloco" and "noloco"
streaming      Streaming DiLoCo: method "streaming_diloco"
"""

from decjax.contrib.outer.gossip_diloco import GossipDiLoCo, NoLoCo
from decjax.contrib.outer.slowmo import SlowMo, SlowMoGossip
from decjax.contrib.outer.streaming import StreamingDiLoCo

__all__ = ["GossipDiLoCo", "NoLoCo", "SlowMo", "SlowMoGossip", "StreamingDiLoCo"]
