"""Topologies that are drawn at random.

They are "erdos_renyi", "erdos_renyi_digraph", "random_matching", "random_digraph", "matcha", and the EquiTopo graphs "equitopo_d",
"equitopo_u", "equitopo_od" and "equitopo_ou". `decjax.topology.make` builds them.
"""

import decjax.contrib.random_graphs.graphs
