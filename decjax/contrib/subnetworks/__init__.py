"""Independent subnetwork training: the method "ist"."""

from decjax.contrib.subnetworks.method import SubnetworkState, ist

__all__ = ["SubnetworkState", "ist"]
