"""Independent subnetwork training: the method "ist"."""

from decjax.contrib.subnetworks.method import IndependentSubnetworks, SubnetworkState

__all__ = ["IndependentSubnetworks", "SubnetworkState"]
