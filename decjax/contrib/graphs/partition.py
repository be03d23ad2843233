"""How the nodes of a graph are divided between workers.

    random    every node to a random worker (RandomTMA)
    min_cut   few edges between parts: the nodes, in the order of the second eigenvector of the Laplacian, are cut in two, pairs are
              swapped as long as that cuts fewer edges (Kernighan and Lin), and both halves are divided further
    super     many small clusters, made by min_cut, each to a random worker (SuperTMA)

Parts differ by one node at most, those of "super" by a cluster. The paper's clusters are made by METIS.

References: Zhu et al. 2023, arXiv 2305.09887; Kernighan and Lin 1970.
"""

from collections.abc import Callable

import numpy as np

from decjax.contrib.graphs.data import Labelled
from decjax.options import Count
from decjax.tasks.partition import choose


def divide(text: str, graph: Labelled, num_parts: int, seed: int) -> np.ndarray:
    """Return the part of every node, [V], as a function of (text, graph, number of parts, seed).

    Args:
        text: "random", "min_cut", or "super(clusters=8)", with so many clusters for each part.
        graph: whose nodes are divided.
        num_parts: N ≥ 1.
        seed: of the run.

    Raises:
        ValueError: if the text is no partition, or there are more parts, or clusters, than nodes.
    """
    name, options = choose("partition", text, PARTITIONS)
    if num_parts > (V := len(graph.labels_V)):
        raise ValueError(f"partition {text!r}: {num_parts} workers are more than the graph's {V} nodes; use at most {V}")
    return PARTITIONS[name](graph, num_parts, np.random.default_rng((seed, num_parts)), **options)


def _random(graph: Labelled, num_parts: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(len(graph.labels_V)) % num_parts


def _min_cut(graph: Labelled, num_parts: int, rng: np.random.Generator) -> np.ndarray:
    import networkx
    import scipy.linalg

    del rng  # Nothing of it is random.
    undirected = networkx.Graph()
    undirected.add_nodes_from(range(len(graph.labels_V)))
    undirected.add_weighted_edges_from(zip(*graph.edges_Ex2.T.tolist(), graph.strength_E.tolist()))
    part_V = np.zeros(len(undirected), int)

    def cut(nodes: list[int], parts: range) -> None:
        if len(parts) == 1:
            part_V[nodes] = parts[0]
            return
        own, half = undirected.subgraph(nodes), len(parts) // 2
        laplacian_VxV = networkx.laplacian_matrix(own, nodes).toarray().astype(float)
        second_V = scipy.linalg.eigh(laplacian_VxV, subset_by_index=(1, 1))[1][:, 0]
        order = np.argsort(second_V * second_V[np.abs(second_V).argmax()], kind="stable")  # Of a vector of either sign.
        count = len(nodes) * half // len(parts)  # At least a node for each part, since parts are no more than nodes.
        sides = {nodes[i] for i in order[:count]}, {nodes[i] for i in order[count:]}
        second, first = networkx.community.kernighan_lin_bisection(own, sides, seed=0)  # Some versions draw the order of ties.
        cut(sorted(first), parts[:half])
        cut(sorted(second), parts[half:])

    cut(list(undirected), range(num_parts))
    return part_V


def _super(graph: Labelled, num_parts: int, rng: np.random.Generator, clusters: Count = 8) -> np.ndarray:
    count, V = clusters * num_parts, len(graph.labels_V)
    if count > V:
        raise ValueError(
            f"partition 'super' with clusters={clusters}: {count} clusters for {num_parts} workers, and the graph has {V} nodes; use "
            f"clusters=1 to {V // num_parts}"
        )
    return (rng.permutation(count) % num_parts)[_min_cut(graph, count, rng)]


PARTITIONS: dict[str, Callable[..., np.ndarray]] = {"random": _random, "min_cut": _min_cut, "super": _super}
