"""Models that classify the nodes of a graph: their interface, and a graph convolution network."""

from collections.abc import Callable
import itertools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from decjax import registry
from decjax.options import Count
from decjax.typing import PyTree


class Graph(NamedTuple):
    """A graph as arrays of fixed size: V nodes, E directed edges. An undirected edge is two.

    Padding: edges of strength 0, and nodes without edges.
    """

    features_VxD: PyTree
    edges_Ex2: PyTree  # int32: the node that sends, the node that receives
    strength_E: PyTree


class GraphModel(NamedTuple):
    """A classifier of nodes as pure functions, which a registered factory returns as `build(features, classes)`.

    Attributes:
        init: `init(key) -> params`.
        apply: `apply(params, graph) -> logits_VxK`, of one graph; its sizes may differ from call to call.
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, Graph], jax.Array]


class GraphConvolution(nnx.Module):
    """Â X W + b."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(inputs, outputs, use_bias=False, kernel_init=nnx.initializers.glorot_uniform(), rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x_VxD, spread):
        return spread(self.linear(x_VxD)) + self.bias[...][None]


class GCN(nnx.Module):
    """Graph convolutions with ReLU between them."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs):
        self.layers = nnx.List(GraphConvolution(inputs, outputs, rngs) for inputs, outputs in itertools.pairwise(widths))

    def __call__(self, graph: Graph):
        senders_E, receivers_E = graph.edges_Ex2[:, 0], graph.edges_Ex2[:, 1]
        root_V = jax.lax.rsqrt(1 + jax.ops.segment_sum(graph.strength_E, receivers_E, len(graph.features_VxD)))

        def spread(x_VxF):
            x_VxF = x_VxF * root_V[:, None]
            received_VxF = jax.ops.segment_sum(graph.strength_E[:, None] * x_VxF[senders_E], receivers_E, len(x_VxF))
            return (x_VxF + received_VxF) * root_V[:, None]

        x_VxF = graph.features_VxD
        for layer in self.layers[:-1]:
            x_VxF = jax.nn.relu(layer(x_VxF, spread))
        return self.layers[-1](x_VxF, spread)


@registry.register("model", "gcn")
def gcn(*, hidden: Count = 16, depth: Count = 2) -> Callable[[int, int], GraphModel]:
    """A graph convolution network: a node's layer is a weighted mean over the node and its neighbors, times a matrix.

    With a_vu the strength of the edge from node u to node v, 0 where there is none,

        Ã = A + I,   d_v = Σ_u ã_vu;     X ← ReLU(D^-½ Ã D^-½ X W + b)     in every layer, without the ReLU in the last

    Args:
        hidden: F, values of a node between two layers.
        depth: L, layers; a node's output depends on nodes that are at most L edges away.

    Reference: Kipf and Welling 2017, arXiv 1609.02907. There the network has no biases.
    """

    def build(features: int, classes: int) -> GraphModel:
        widths = (features, *(hidden,) * (depth - 1), classes)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: GCN(widths, nnx.Rngs(0))))
        init = lambda key: nnx.to_pure_dict(nnx.state(GCN(widths, nnx.Rngs(key)), nnx.Param))
        return GraphModel(init, lambda params, graph: nnx.merge(graphdef, nnx.State(params))(graph))

    return build
