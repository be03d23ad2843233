"""Placement of a job on devices that differ in links, speed or memory: arXiv 2206.01288 (DT-FM). NumPy and SciPy only.

    links    networks as matrices of latency and bandwidth, and their files
    cost     seconds of an iteration's messages for a layout of stages × workers
    search   layouts whose messages take little time
    choice   which of the devices take part, the placement's file, and clusters that hold the whole model together

Examples:
  >>> import numpy as np
  >>> near, far = np.kron(np.eye(2), np.ones((2, 2))), np.kron(1 - np.eye(2), np.ones((2, 2)))
  >>> links = Links(0.01 * near + 0.1 * far, 1e9 * near + 1e7 * far)
  >>> network = Network(links.take([0, 2, 1, 3]), Job(workers=2, stages=2, gradient_bytes=1e8, activation_bytes=1e6))
  >>> sorted(best_of_all(network).layout.tolist())
  [[0, 2], [1, 3]]
"""

from decjax.contrib.placement.choice import DeviceCluster, Placement, clusters, load_device_order, place, save
from decjax.contrib.placement.cost import Job, Network
from decjax.contrib.placement.links import Links, load
from decjax.contrib.placement.search import Placed, anneal, best_of_all, genetic, random_layout

__all__ = [
    "DeviceCluster",
    "Job",
    "Links",
    "Network",
    "Placed",
    "Placement",
    "anneal",
    "best_of_all",
    "clusters",
    "genetic",
    "load",
    "load_device_order",
    "place",
    "random_layout",
    "save",
]
