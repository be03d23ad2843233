"""Predicts the time per iteration of training methods on a cluster, and when decentralized training beats all-reduce. NumPy only.

    profile     clusters, workloads, and how compute times vary
    json_files  their JSON form
    groups      workers of several devices
    exchange    latency and bandwidth cost of a round of messages on a cluster
    methods     what is sent over which topology
    simulator   times of training steps, by a max-plus recursion over workers
    model       time per iteration of a method whose workers are one device each
    fit         fits a cluster's numbers to measurements
    plan        ranks methods, and says where each one is the fastest

Impossible values are refused by a ValueError of one line: the value and what is allowed.

Examples:
  >>> from decjax import topology
  >>> cluster = Cluster("4 hosts", 4, 1, intra=Link(1e-6, 5e9), inter=Link(1e-4, 25e6))
  >>> workload = Workload(forward_s=0.3, backward_s=(0.6,), num_bytes=(24e6,))
  >>> sync = predict(cluster, workload, all_reduce(4)).mean_s
  >>> f"{sync / predict(cluster, workload, gossip(topology.make('one_peer_exponential', 4))).mean_s:.2f} times faster"
  '2.44 times faster'
"""

from decjax.costmodel.groups import divided, grouped
from decjax.costmodel.json_files import load, load_workload, save
from decjax.costmodel.methods import Method, all_reduce, compressed, gossip, no_communication
from decjax.costmodel.model import Prediction, predict
from decjax.costmodel.profile import Cluster, Compressed, Jitter, Link, Workload

__all__ = [
    "Cluster",
    "Compressed",
    "Jitter",
    "Link",
    "Method",
    "Prediction",
    "Workload",
    "all_reduce",
    "compressed",
    "divided",
    "gossip",
    "grouped",
    "load",
    "load_workload",
    "no_communication",
    "predict",
    "save",
]
