"""Classification of the nodes of a graph, of which each worker sees a part: task "nodes", model "gcn" and method "tma".

task       the task
model      the interface of models that classify a graph's nodes, and a graph convolution network
data       graphs with labeled nodes
partition  how the nodes are divided between the workers
uneven     local steps, of which slow workers take fewer
"""

from decjax.contrib.graphs.model import Graph, GraphModel, gcn
from decjax.contrib.graphs.task import Nodes
from decjax.contrib.graphs.uneven import TMA

__all__ = ["Graph", "GraphModel", "Nodes", "TMA", "gcn"]
