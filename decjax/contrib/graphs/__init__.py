"""Classification of the nodes of a graph, of which each worker sees a part: task "nodes" and model "gcn".

task       the task
model      the interface of models that classify a graph's nodes, and a graph convolution network
data       graphs with labelled nodes
partition  how the nodes are divided between the workers
"""

from decjax.contrib.graphs.model import Graph, GraphModel, gcn
from decjax.contrib.graphs.task import Nodes, nodes

__all__ = ["Graph", "GraphModel", "Nodes", "gcn", "nodes"]
