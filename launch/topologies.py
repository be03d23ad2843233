"""Compare topologies: their cost, and how fast workers reach consensus.

    python -m launch.topologies --workers=12
    python -m launch.topologies --workers=16 --local_size=4 --plot --out=topologies.png

Columns: rounds in a period; maximum number of neighbors in a round; parameter-sized messages that a worker sends per step (mean);
spectral gap 1 − ‖W − J/n‖₂ of the worst round, and of the product over a period (1: exact averaging); rounds until the average is
exact, from phase 0. Topologies that do not exist for the number of workers or the options follow with the reason.
"""

import collections

from absl import flags
import numpy as np
from rich import markup, table

from decjax import topology as tp
from launch import command

FLAGS = flags.FLAGS

# Each option is passed to every topology that has it.
_OPTIONS = {
    "local_size": flags.DEFINE_integer("local_size", None, "Workers per node (AER, hierarchical)."),
    "outer": flags.DEFINE_string("outer", None, "Graph between nodes (hierarchical)."),
    "k": flags.DEFINE_integer("k", None, "Maximum number of neighbors per round (base_k)."),
    "shape": flags.DEFINE_list("shape", None, "Rows,columns (torus, one_peer_torus)."),
    "pairwise": flags.DEFINE_boolean("pairwise", None, "i <-> i XOR 2^k (one_peer_exponential)."),
    "degree": flags.DEFINE_integer("degree", None, "Neighbors (random_digraph, equitopo_d, equitopo_u)."),
    "rounds": flags.DEFINE_integer("rounds", None, "Length of random schedules, and of sun's."),
    "seed": flags.DEFINE_integer("seed", None, "Seed of random graphs."),
    "p": flags.DEFINE_float("p", None, "Edge probability (erdos_renyi)."),
    "eta": flags.DEFINE_float("eta", None, "Mixing strength (equitopo_od, equitopo_ou)."),
    "base": flags.DEFINE_string("base", None, "Graph whose matchings are activated (matcha)."),
    "centers": flags.DEFINE_integer("centers", None, "Workers that exchange with all others (sun)."),
    "budget": flags.DEFINE_float("budget", None, "Share of active matchings (matcha)."),
}
WIDTH = 100


def build(num_workers: int, chosen: dict[str, object]) -> tuple[list[tp.Topology], dict[str, str]]:
    """Return the topologies that exist for a number of workers, and the reasons for the others."""
    built, refused = [], {}
    for name in tp.names():
        try:
            built.append(tp.make(name, num_workers, **{o: chosen[o] for o in tp.options(name) if o in chosen}))
        except ValueError as error:
            refused[name] = str(error).removeprefix(f"topology {name!r} ")
    return built, refused


def report(topologies: list[tp.Topology], refused: dict[str, str], num_workers: int) -> list[table.Table]:
    """Return the table of topologies and, if any do not exist at this size, the table of reasons."""
    width = max(map(len, tp.names()))
    headers = ("period", "max\ndegree", "messages\nper step", "gap of\nworst\nround", "gap of\nperiod", "exact\nafter")
    main = command.table("topology", *headers, title=f"{num_workers} workers")
    main.columns[0].min_width = width
    for topology in topologies:
        messages = np.mean([round_.volume() for round_ in topology.rounds])
        gaps = ["–", "–"]
        if tp.is_doubly_stochastic(topology):
            worst = min(tp.spectral_gap(topology, phase) for phase in range(topology.period))
            gaps = [_gap(worst), _gap(tp.spectral_gap(topology))]
        counts = str(topology.period), str(topology.max_degree), f"{messages:.2f}"
        main.add_row(topology.name, *counts, *gaps, str(tp.rounds_to_exact(topology) or "–"))
    main.caption = "gap = 1 − ‖W − J/n‖₂; 1: exact averaging; –: only columns sum to one (push-sum)"
    if not refused:
        return [main]
    rest = command.table(title="not possible")
    rest.show_header = False
    rest.add_column(no_wrap=True, min_width=width, style="dim")
    rest.add_column(style="dim")
    for name, reason in refused.items():
        rest.add_row(name, markup.escape(reason))
    return [main, rest]


def _gap(gap: float) -> str:
    """Format with four digits; 0 and 1 without decimals, so that small gaps are visible."""
    nearest = round(gap)
    return str(nearest) if abs(gap - nearest) < 1e-9 else f"{gap:.4f}"


def plot(topologies: list[tp.Topology], path: str) -> None:
    """Draw every topology in a panel: workers on a circle, edges colored by phase, arrows if directed."""
    import matplotlib
    from matplotlib import figure, patches

    num_columns = min(6, len(topologies))
    num_rows = -(-len(topologies) // num_columns)
    drawn = figure.Figure(figsize=(2.5 * num_columns, 2.75 * num_rows), layout="constrained")
    axes = drawn.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, topology in zip(axes.flat, topologies, strict=False):
        angles = np.pi / 2 - 2 * np.pi * np.arange(topology.num_workers) / topology.num_workers
        xy_Nx2 = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        colors = matplotlib.colormaps["turbo"](np.linspace(0.08, 0.92, topology.period)) if topology.period > 1 else ["#33506b"]
        times_drawn = collections.Counter()
        for phase, color in enumerate(colors):
            W_NxN = topology.matrix(phase)
            for target, source in np.argwhere(W_NxN):
                both_ways = W_NxN[source, target] > 0
                if source == target or (both_ways and source > target):
                    continue
                # Repeated edges bend towards the center, a little more each time.
                clockwise = np.linalg.det(xy_Nx2[[source, target]]) < 0
                bend = (0.1 if clockwise else -0.1) * times_drawn[frozenset((source, target))]
                times_drawn[frozenset((source, target))] += 1
                axis.add_patch(
                    patches.FancyArrowPatch(
                        *xy_Nx2[[source, target]],
                        arrowstyle="-" if both_ways else "-|>",
                        connectionstyle=f"arc3,rad={bend}",
                        mutation_scale=7,
                        shrinkA=2,
                        shrinkB=0 if both_ways else 3,
                        linewidth=0.9,
                        color=color,
                        alpha=0.8,
                    )
                )
        axis.scatter(*xy_Nx2.T, s=16, color="black", zorder=3)
        rounds = "1 round" if topology.period == 1 else f"{topology.period} rounds"
        axis.set_title(f"{topology.name}\n{rounds}, degree {topology.max_degree}", fontsize=9)
        axis.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    drawn.suptitle(
        f"Topologies of {topologies[0].num_workers} workers: edges colored by phase (blue first, red last), arrows where one-way",
        fontsize=11,
    )
    drawn.savefig(path, dpi=140)


def main(argv):
    command.options_only(argv)
    chosen = {name: holder.value for name, holder in _OPTIONS.items() if holder.value is not None}
    if "shape" in chosen:
        chosen["shape"] = tuple(int(side) if side.strip().isdecimal() else side for side in chosen["shape"])
    command.check((FLAGS.plot or not FLAGS["out"].present, f"--out={FLAGS.out} has no effect without --plot", "add --plot"))
    if FLAGS.plot:
        command.output("out", FLAGS.out, figure=True)
    topologies, refused = build(FLAGS.workers, chosen)
    terminal = command.console(WIDTH)
    for part in report(topologies, refused, FLAGS.workers):
        terminal.print(part)
    if FLAGS.plot:
        plot(topologies, FLAGS.out)
        terminal.print(f"wrote {FLAGS.out}", markup=False, soft_wrap=True)


if __name__ == "__main__":  # Other commands have an --out as well, and one process may import several.
    flags.DEFINE_integer("workers", None, "Number of workers.", 1, tp.MAX_WORKERS, required=True)
    flags.DEFINE_boolean("plot", False, "Whether to draw all topologies.")
    flags.DEFINE_string("out", "topologies.png", "Where --plot writes the figure.")
    command.run(main, errors=(ValueError,))
