"""Predicts the time per iteration of training methods on a cluster, and when decentralized training beats all-reduce. NumPy only.

    profile       clusters, workloads, and how compute times vary
    json_files    their JSON form
    exchange      latency and bandwidth cost of a round of messages on a cluster
    methods       what is sent over which topology
    simulator     times of training steps, by a max-plus recursion over workers
    model         time per iteration of a method whose workers are one device each
    transformer   parameters, operations and bytes of a decoder
    layout        workers × stages × tensor: what devices compute, send and keep in memory
    iteration     time per iteration of a layout, under a pipeline schedule
    fit           fits a cluster's numbers to measurements
    plan          ranks methods, and says where each one is the fastest
    plan_layouts  ranks layouts

Impossible values are refused by a ValueError of one line: the value and what is allowed.

Examples:
  >>> from decjax import topology
  >>> cluster = Cluster("4 hosts", 4, 1, intra=Link(1e-6, 5e9), inter=Link(1e-4, 25e6))
  >>> workload = Workload(forward_s=0.3, backward_s=(0.6,), num_bytes=(24e6,))
  >>> sync = predict(cluster, workload, all_reduce(4)).mean_s
  >>> f"{sync / predict(cluster, workload, gossip(topology.make('one_peer_exponential', 4))).mean_s:.2f} times faster"
  '2.44 times faster'
"""

from decjax.costmodel.iteration import LayoutPrediction, choose_compressed_stages, predict_layout
from decjax.costmodel.json_files import load, load_workload, save
from decjax.costmodel.layout import Boundary, DeviceLayout, Footprint, Traffic, Work, memory, work
from decjax.costmodel.methods import Method, all_reduce, compressed, gossip, no_communication
from decjax.costmodel.model import Prediction, predict
from decjax.costmodel.profile import Cluster, Compressed, Jitter, Link, Workload
from decjax.costmodel.transformer import Transformer

__all__ = [
    "Boundary",
    "Cluster",
    "Compressed",
    "DeviceLayout",
    "Footprint",
    "Jitter",
    "LayoutPrediction",
    "Link",
    "Method",
    "Prediction",
    "Traffic",
    "Transformer",
    "Work",
    "Workload",
    "all_reduce",
    "choose_compressed_stages",
    "compressed",
    "gossip",
    "load",
    "load_workload",
    "memory",
    "no_communication",
    "predict",
    "predict_layout",
    "save",
    "work",
]
