"""Graphs whose nodes have features and labels: `blocks` and `karate`."""

from collections.abc import Callable
import functools
from typing import TYPE_CHECKING, Annotated, NamedTuple
import zlib

import numpy as np

from decjax.options import Fraction, Range, Seed
from decjax.tasks.partition import choose

if TYPE_CHECKING:
    import networkx

MOST_NODES = 4096  # of a graph: partition "min_cut" takes its Laplacian as a whole matrix


class Labelled(NamedTuple):
    """A graph of V nodes with features and labels, and E directed edges, two for each undirected one.

    Attributes:
        features_VxD: float32.
        labels_V: int32, from 0 to K − 1.
        classes: K.
        edges_Ex2: int32, pairs (from, to).
        strength_E: float32, positive.
    """

    features_VxD: np.ndarray
    labels_V: np.ndarray
    classes: int
    edges_Ex2: np.ndarray
    strength_E: np.ndarray

    @property
    def crc(self) -> int:
        """A checksum of all of it."""
        return functools.reduce(lambda crc, x: zlib.crc32(np.ascontiguousarray(x).tobytes(), crc), self[:2] + self[3:], 0)

    def part(self, nodes: np.ndarray) -> "Labelled":
        """Return some nodes, in ascending order and renumbered, and the edges between them."""
        inside_E = np.isin(self.edges_Ex2, nodes).all(axis=1)
        edges_Ex2 = np.searchsorted(nodes, self.edges_Ex2[inside_E]).astype(np.int32)
        return Labelled(self.features_VxD[nodes], self.labels_V[nodes], self.classes, edges_Ex2, self.strength_E[inside_E])

    def padded(self, num_nodes: int, num_edges: int) -> "Labelled":
        """Return the graph with further nodes, and edges of strength 0."""
        sizes = {"features_VxD": num_nodes, "labels_V": num_nodes, "edges_Ex2": num_edges, "strength_E": num_edges}
        return self._replace(**{name: padded(getattr(self, name), size) for name, size in sizes.items()})


def padded(x: np.ndarray, size: int) -> np.ndarray:
    """Return an array with zeros appended along its first axis."""
    return np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))


def _labelled(graph: "networkx.Graph", features_VxD: np.ndarray, labels_V: np.ndarray) -> Labelled:
    """Return a graph with nodes 0 … V − 1 as arrays; edges in a fixed order."""
    edges = sorted((u, v, data.get("weight", 1.0)) for a, b, data in graph.edges(data=True) for u, v in ((a, b), (b, a)))
    edges_Ex2 = np.array([edge[:2] for edge in edges], np.int32).reshape(-1, 2)
    strength_E = np.array([edge[2] for edge in edges], np.float32)
    return Labelled(features_VxD.astype(np.float32), labels_V.astype(np.int32), int(labels_V.max()) + 1, edges_Ex2, strength_E)


def blocks(
    communities: Annotated[int, Range(2, MOST_NODES)] = 4,
    nodes: Annotated[int, Range(1, MOST_NODES)] = 100,
    inside: Fraction = 0.1,
    between: Fraction = 0.01,
    features: Annotated[int, Range(1, MOST_NODES)] = 8,
    noise: Annotated[float, Range(0, 1e6)] = 2.0,
    seed: Seed = 0,
) -> Labelled:
    """Return a stochastic block model: x_v = μ_k + σ ξ_v for a node v of community k, with all μ and ξ standard normal.

    Args:
        communities: K; they are the labels.
        nodes: of a community.
        inside: probability of an edge between two nodes of a community.
        between: probability of an edge between nodes of two communities.
        features: D, values of a node.
        noise: σ.
        seed: of the graph; it is the same in runs with other seeds.
    """
    import networkx  # Imported here because only this task needs it.

    if communities * nodes > MOST_NODES:
        raise ValueError(
            f"task graph 'blocks' has {communities} communities of {nodes} nodes; use at most {MOST_NODES} nodes in all"
        )
    p_KxK = np.where(np.eye(communities, dtype=bool), inside, between)
    graph = networkx.stochastic_block_model([nodes] * communities, p_KxK, seed=seed)
    labels_V, rng = np.arange(communities * nodes) // nodes, np.random.default_rng(seed)
    mean_KxD = rng.normal(size=(communities, features))
    return _labelled(graph, mean_KxD[labels_V] + noise * rng.normal(size=(len(labels_V), features)), labels_V)


def karate() -> Labelled:
    """Return Zachary's karate club: 34 members, the weights of their ties, and which of two clubs each joined.

    A member's features are the unit vector of its number.

    Reference: Zachary 1977, An information flow model for conflict and fission in small groups.
    """
    import networkx

    graph = networkx.karate_club_graph()
    labels_V = np.array([graph.nodes[v]["club"] == "Officer" for v in range(len(graph))])
    return _labelled(graph, np.eye(len(graph)), labels_V)


GRAPHS: dict[str, Callable[..., Labelled]] = {"blocks": blocks, "karate": karate}


@functools.lru_cache(4)
def load(text: str) -> Labelled:
    """Return the graph of a text such as "blocks(noise=1.0)"; a ValueError if there is none."""
    name, options = choose("graph", text, GRAPHS)
    return GRAPHS[name](**options)
