"""The task "nodes": classification of the nodes of a graph, whose workers each see a part of it."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import numpy as np
import optax

from decjax.contrib.graphs import data as graphs
from decjax.contrib.graphs import partition as graph_partition
from decjax.contrib.graphs.model import Graph, GraphModel
from decjax.options import Natural
from decjax.tasks.partition import choose
from decjax.tasks.task import Data, HeldOut, Task
from decjax.typing import PyTree


class Subgraphs(NamedTuple):
    """A batch of graphs, their nodes' labels, and weights: 1 for nodes that count for the loss, 0 for all others and for padding."""

    graphs: Graph  # leaves [B, …]
    labels_BxV: PyTree
    weight_BxV: PyTree


class Nodes(Task, name="nodes"):
    """Classification of a graph's nodes by workers that each see the edges inside of their own part; metrics are loss and accuracy.

    Worker i has the nodes V_i of a partition, their features, and the edges between two of them; edges to other parts are left out.
    With T ⊂ V the nodes that are trained on, T_i a worker's, and ℓ the cross-entropy,

        L_i(x) = mean_{v ∈ T_i} ℓ(f(x; G[V_i])_v, y_v);     evaluation is of f(x; G), with all edges, on the nodes that are held out

    Held-out nodes are in the graph during training, without their labels. All parts are padded to the size of the largest one. An
    example is a whole graph, so a worker's batch is usually one.

    Attributes:
        model: `build(features, classes) -> GraphModel`.
        graph: "karate", Zachary's club, or a stochastic block model, "blocks(communities=4,nodes=100,inside=0.1,between=0.01,
            features=8,noise=2.0,seed=0)"; see `contrib.graphs.data`.
        partition: which nodes each worker has: "random", "min_cut", or "super(clusters=8)", with so many clusters for each worker; see
            `contrib.graphs.partition`.
        targets: nodes of a worker that count for the loss of a step, drawn in each step; 0: all that it trains on.
        validation: share of the nodes that is held out, between 0 and 1; they are the same in all runs.

    Reference: Zhu et al. 2023, arXiv 2305.09887.
    """

    models = ("gcn",)
    evaluated_once = True
    item = "graphs"

    model: Callable[[int, int], GraphModel]
    graph: str = "blocks"
    partition: str = "random"
    targets: Natural = 0
    validation: HeldOut = 0.25

    def __post_init__(self):
        choose("partition", self.partition, graph_partition.PARTITIONS)
        self.network  # noqa: B018  Refuses an unknown graph.

    @functools.cached_property
    def data(self) -> graphs.Labelled:
        """The whole graph."""
        return graphs.load(self.graph)

    @functools.cached_property
    def network(self) -> GraphModel:
        """The model for this graph's features and classes."""
        return self.model(self.data.features_VxD.shape[1], self.data.classes)

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "nats", "accuracy": ""}

    def init(self, key: jax.Array) -> PyTree:
        return self.network.init(key)

    def weight(self, batch: Subgraphs) -> jax.Array:
        return batch.weight_BxV.sum()

    def examples(self, batch_size: int) -> PyTree:
        return jax.eval_shape(lambda: self.whole(np.zeros(len(self.data.labels_V)), batch_size))

    def loss(self, params: PyTree, variables: PyTree, batch: Subgraphs, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        sums, weight_B = self.measure(params, variables, batch)
        return sums["loss"].sum() / weight_B.sum(), variables

    def measure(self, params: PyTree, variables: PyTree, examples: Subgraphs) -> tuple[dict[str, jax.Array], jax.Array]:
        logits_BxVxK = jax.vmap(self.network.apply, (None, 0))(params, examples.graphs)
        nll_BxV = optax.softmax_cross_entropy_with_integer_labels(logits_BxVxK, examples.labels_BxV)
        right_BxV = (logits_BxVxK.argmax(axis=-1) == examples.labels_BxV) * 1.0
        sums = {"loss": nll_BxV, "accuracy": right_BxV}
        return {name: (x * examples.weight_BxV).sum(axis=1) for name, x in sums.items()}, examples.weight_BxV.sum(axis=1)

    def whole(self, weight_V: np.ndarray, batch_size: int = 1) -> Subgraphs:
        """Return B times the whole graph."""
        return _repeated(self.data, np.tile(weight_V.astype(np.float32), (batch_size, 1)))

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        V = len(self.data.labels_V)
        held_out = np.random.default_rng(0).permutation(V)[: max(1, round(self.validation * V))]
        trained_V = ~np.isin(np.arange(V), held_out)
        part_V = graph_partition.divide(self.partition, self.data, num_workers, seed)
        trained_N = np.bincount(part_V, trained_V, num_workers)
        if not trained_N.all():
            raise ValueError(
                f"task partition={self.partition!r}: worker {trained_N.argmin()} of {num_workers} has no node to train on; use fewer "
                "workers, another partition, or a smaller validation share"
            )
        if self.targets >= (most := int(trained_N.max())):
            raise ValueError(
                f"task targets={self.targets} has no effect: a worker has at most {most} nodes to train on; use less, or 0 for all"
            )
        own = [np.flatnonzero(part_V == worker) for worker in range(num_workers)]
        parts = [self.data.part(nodes) for nodes in own]
        largest = max(len(part.labels_V) for part in parts), max(len(part.strength_E) for part in parts)
        parts = [part.padded(*largest) for part in parts]
        weights = [graphs.padded(trained_V[nodes].astype(np.float32), largest[0]) for nodes in own]

        def batch(worker, step):
            rng = np.random.default_rng((seed, worker, step))
            return _repeated(parts[worker], np.stack([self.drawn(weights[worker], rng) for _ in range(batch_size)]))

        kept = (part_V[self.data.edges_Ex2[:, 0]] == part_V[self.data.edges_Ex2[:, 1]]).mean() if len(self.data.edges_Ex2) else 1.0
        return Data(
            batch=batch,
            validation=lambda limit: self.whole(~trained_V),
            fingerprint=f"{self.graph}, {V} nodes, crc {self.data.crc:08x}",  # Not of the parts: another N has others.
            facts=lambda: {"kept_edges": float(kept)},
        )

    def drawn(self, weight_V: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the weights of a step's targets, from those of all nodes that a worker trains on."""
        possible = np.flatnonzero(weight_V)
        if not self.targets or self.targets >= len(possible):
            return weight_V
        chosen_V = np.zeros_like(weight_V)
        chosen_V[rng.choice(possible, self.targets, replace=False)] = 1
        return chosen_V


def _repeated(graph: graphs.Labelled, weight_BxV: np.ndarray) -> Subgraphs:
    """Return a batch of one graph with different weights."""
    features_BxVxD, edges_BxEx2, strength_BxE, labels_BxV = (
        np.broadcast_to(x, (len(weight_BxV), *x.shape))
        for x in (graph.features_VxD, graph.edges_Ex2, graph.strength_E, graph.labels_V)
    )
    return Subgraphs(Graph(features_BxVxD, edges_BxEx2, strength_BxE), labels_BxV, weight_BxV)
