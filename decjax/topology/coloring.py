"""Edge colorings: the edges of a graph split into sets of messages that can travel at the same time.

Edges of one color share no end: they form a partial permutation of senders and receivers, or a matching of an undirected graph.
With fewer colors a round takes fewer collectives.
"""

import collections
from collections.abc import Sequence
import itertools


def permutations(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return partial permutations that together have these directed edges (source, target): as many as the largest degree (Kőnig)."""
    return _classes(_color_bipartite(edges))


def matchings(edges: Sequence[tuple[int, int]], num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return matchings that together have these edges: Δ of them, the largest degree, in a bipartite graph, else at most Δ + 1 (Vizing).

    Each undirected edge is given once and is in one of the matchings, possibly with its ends swapped.
    """
    side = _two_coloring(edges, num_nodes)
    if side is not None:
        return permutations([(u, v) if side[u] == 0 else (v, u) for u, v in edges])
    return _classes(_color_misra_gries(edges, num_nodes))


def _two_coloring(edges: Sequence[tuple[int, int]], num_nodes: int) -> list[int] | None:
    """Return the side (0 or 1) of each node of a bipartite graph, None if the graph has an odd cycle."""
    neighbors: list[list[int]] = [[] for _ in range(num_nodes)]
    for u, v in edges:
        neighbors[u].append(v)
        neighbors[v].append(u)
    side = [-1] * num_nodes
    for root in range(num_nodes):
        stack = [(root, 0)] if side[root] < 0 else []
        while stack:
            u, own = stack.pop()
            if side[u] == 1 - own:
                return None
            if side[u] < 0:
                side[u] = own
                stack += [(v, 1 - own) for v in neighbors[u]]
    return side


def _classes(colored: dict[tuple[int, int], int]) -> list[list[tuple[int, int]]]:
    classes: dict[int, list[tuple[int, int]]] = {}
    for edge, color in colored.items():
        classes.setdefault(color, []).append(edge)
    return [classes[color] for color in sorted(classes)]


def _lowest_zero_bit(mask: int) -> int:
    return (~mask & (mask + 1)).bit_length() - 1


def _color_bipartite(edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Edge coloring of a bipartite graph (left, right) with as many colors as the largest degree.

    An edge without a common free color at its ends takes one that is free on the left, after the path that alternates between it and
    one that is free on the right has been flipped (the proof of Kőnig's theorem).
    """
    ends = collections.Counter(end for u, v in edges for end in ((0, u), (1, v)))
    num_colors = max(ends.values(), default=0)
    at: dict[tuple[int, int], dict[int, int]] = {end: {} for end in ends}  # at[side, node][color] = the other end
    used = dict.fromkeys(ends, 0)  # the colors at a node, as bits

    def toggle(left, right, color, on):
        for side, node, other in ((0, left, right), (1, right, left)):
            used[side, node] ^= 1 << color
            if on:
                at[side, node][color] = other
            else:
                del at[side, node][color]

    for u, v in edges:
        color = _lowest_zero_bit(used[0, u] | used[1, v])
        if color >= num_colors:
            color, other = _lowest_zero_bit(used[0, u]), _lowest_zero_bit(used[1, v])
            path = []
            side, node, step = 1, v, color
            while step in at[side, node]:
                end = at[side, node][step]
                path.append((end, node, step) if side else (node, end, step))
                side, node, step = 1 - side, end, color + other - step
            for left, right, step in path:
                toggle(left, right, step, on=False)
            for left, right, step in path:
                toggle(left, right, color + other - step, on=True)
        toggle(u, v, color, on=True)
    return {(node, v): color for (side, node), table in at.items() if side == 0 for color, v in table.items()}


def _color_misra_gries(edges: Sequence[tuple[int, int]], num_nodes: int) -> dict[tuple[int, int], int]:
    """Edge coloring of any simple graph with at most Δ + 1 colors (Misra and Gries, 1992)."""
    at: list[dict[int, int]] = [{} for _ in range(num_nodes)]  # at[u][color] = the node at the other end
    color_of: list[dict[int, int]] = [{} for _ in range(num_nodes)]  # color_of[u][v] = color

    def free_color(u):
        return next(color for color in itertools.count() if color not in at[u])

    def recolor(u, v, color):
        at[u][color], at[v][color] = v, u
        color_of[u][v] = color_of[v][u] = color

    def erase(u, v):
        color = color_of[u].pop(v)
        del color_of[v][u], at[u][color], at[v][color]
        return color

    for u, v in edges:
        # A fan: neighbors of u, each joined to u by a color that is free at the one before.
        fan = [v]
        while extension := [w for color, w in at[u].items() if color not in at[fan[-1]] and w not in fan]:
            fan.append(extension[0])
        c, d = free_color(u), free_color(fan[-1])
        # Swap c and d along the path from u that alternates between them, so that d becomes free at u.
        path, node, step = [], u, d
        while step in at[node]:
            path.append((node, at[node][step]))
            node, step = at[node][step], c + d - step
        # All are erased before any is recolored: two edges that meet at a node swap their colors there.
        erased = [erase(*edge) for edge in path]
        for (a, b), color in zip(path, erased, strict=True):
            recolor(a, b, c + d - color)
        # The first member where d is free takes d, and those before it the color of the next one. (The flip leaves them a fan up to
        # there: that such a member exists is the theorem.)
        last = next(index for index, w in enumerate(fan) if d not in at[w])
        colors = [erase(u, w) for w in fan[1 : last + 1]] + [d]
        for w, color in zip(fan, colors, strict=False):
            recolor(u, w, color)
    return {(u, v): color_of[u][v] for u, v in edges}
