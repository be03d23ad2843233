"""Which device does what: `launch.plan --links=FILE`, whose flags these are.

The network is a file of links (`decjax.contrib.placement.links` describes the forms; configs/links has some). Searched is the layout of
--stages × workers on --devices of them whose messages take least: with all-reduce, or with gossip over --topologies. The model is

    configs/lm.py:workers=8           a config: its parameters; with stages its activations too, if it is a transformer
    depth=24,width=1024,heads=16,…    a transformer, as for layouts
    params=65e6                       parameters alone, for --stages=1; bytes=4 of each, tokens= of a worker's step

Devices that have too little memory for a stage's parameters, gradients and Adam's moments are left out, and slow ones if the job is
faster without. --placement writes the order of devices that launch.train --placement takes.
"""

from collections.abc import Callable
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np
from rich import console

from decjax import costmodel, topology
from decjax.contrib import placement
from decjax.contrib.placement import choice, search
from decjax.costmodel import profile
from launch import command, memory

FLAGS = flags.FLAGS

RANDOM = 20  # layouts whose mean the others are compared with
TRIALS = 10**9  # Time ends the searches.
MOMENTS_BYTES = 8.0  # of a parameter: Adam's two


class Model(NamedTuple):
    """What a model is for a placement.

    Attributes:
        parameters: of the whole model.
        bytes: of a parameter that is sent.
        flop: operations of one iteration, forward and backward, of all workers; 0: unknown.
        activation_bytes: of all workers' activations between two stages; None: it cannot have stages.
        depth: layers, of which each stage has one at least.
    """

    parameters: float
    bytes: float
    flop: float = 0.0
    activation_bytes: float | None = None
    depth: int = 1


def of_transformer(given: costmodel.Transformer) -> Model:
    """Of its sizes and batch."""
    flop = 3 * (given.depth * given.layer_flops(given.batch_size) + given.head_flops(given.batch_size))
    return Model(given.parameters, given.gradient_bytes, flop, given.boundary_bytes(given.batch_size), given.depth)


def of_numbers(values: dict[str, Any], workers: int) -> Model:
    """Of `params=`, `bytes=` and `tokens=`."""
    return Model(values["params"], values["bytes"], 6 * values["params"] * (values["tokens"] or 0) * workers)


class Work(NamedTuple):
    """What is placed."""

    job: placement.Job
    stage_flop: float
    stage_bytes: float


def work(model: Model, workers: int, stages: int, graph: str | None) -> Work:
    """A model's work when it is divided; `graph` is a topology's name, or None for all-reduce."""
    if stages > 1 and model.activation_bytes is None:
        raise ValueError(
            f"--stages={stages}: what stages send each other follows from --model=depth=…,width=… or a transformer's config"
        )
    if stages > model.depth:
        raise ValueError(
            f"--stages={stages}: a stage has at least one layer, and the model has depth={model.depth}; use fewer stages"
        )
    job = placement.Job(
        workers,
        stages,
        gradient_bytes=model.parameters * model.bytes / stages,
        activation_bytes=(model.activation_bytes or 0.0) / workers,
        topology=topology.make(graph, workers) if graph else None,
    )
    kept_bytes = model.parameters / stages * (2 * model.bytes + MOMENTS_BYTES)
    return Work(job, model.flop / workers / stages, kept_bytes)


def workers_of(devices: int, stages: int) -> int:
    """How many workers so many devices make."""
    if devices % stages:
        raise ValueError(f"--stages={stages} does not divide {devices} devices; choose --devices, a multiple of the stages")
    return devices // stages


def load_links() -> tuple[placement.Links, int]:
    """The network of --links, and how many of its devices are asked for."""
    links = placement.load(FLAGS.links)
    devices = FLAGS.devices or links.num_devices
    if not 2 <= devices <= links.num_devices:
        raise ValueError(
            f"--devices={devices} must be from 2 to {links.num_devices}, the devices of {FLAGS.links}; leave it out for all"
        )
    return links, devices


def graph() -> str | None:
    """The topology of --topologies; None: all-reduce."""
    if len(FLAGS.topologies) > 1:
        raise ValueError(
            f"--topologies={','.join(FLAGS.topologies)}: a placement is for one graph; give one, or none for all-reduce"
        )
    return FLAGS.topologies[0] if FLAGS.topologies else None


class Row(NamedTuple):
    """What a search came to."""

    name: str
    placed: placement.Placement
    took_s: float


NetworkOf = Callable[[list[int]], placement.Network]


def networks(links: placement.Links, job: placement.Job, among: list[choice.Candidates]) -> NetworkOf:
    """What makes the networks of candidates, which can be large: of a single one it is made once."""
    make = lambda devices: placement.Network(links.take(devices), job)
    if len(among) > 1:
        return make
    only = make(among[0].devices)
    return lambda devices: only


def searched(network_of: NetworkOf, among: list[choice.Candidates], devices: int, seconds: float) -> list[Row]:
    """The best of each search for so many devices, which has so many seconds."""
    share_s = seconds / len(among)
    searches: dict[str, Callable[[placement.Network], placement.Placed]] = {
        "genetic": lambda network: placement.genetic(network, trials=TRIALS, seconds=share_s),
        "annealing": lambda network: placement.anneal(network, trials=TRIALS, seconds=share_s),
    }
    if devices <= search.MAX_ALL:
        searches["all layouts"] = placement.best_of_all
    found = []
    for name, do in searches.items():
        begun = time.monotonic()
        found.append(Row(name, choice.place_among(network_of, do, among), time.monotonic() - begun))
    return found


def at_random(network: placement.Network, compute_s: float, seconds: float) -> list[float]:
    """Seconds of random layouts of devices that could take part, with their computing; fewer if so many seconds are over."""
    ends, found = time.monotonic() + seconds, []
    while not found or (len(found) < RANDOM and time.monotonic() < ends):
        layout = placement.random_layout(network, np.random.default_rng(len(found)))
        found.append(compute_s + network.seconds(layout))
    return found


# -- What is shown ----------------------------------------------------------------------------------------------------


def report(rows: list[Row], random_s: list[float], title: str) -> console.Group:
    """The searches beside random layouts."""
    table = command.table("search", "s", "computing s", "messages s", "of random", "layouts tried", "took s")
    mean_s = float(np.mean(random_s))
    for row in rows:
        placed = row.placed
        numbers = placed.seconds, placed.compute_s, placed.messages_s
        table.add_row(
            row.name, *(f"{x:.4g}" for x in numbers), f"{placed.seconds / mean_s:.2f}", str(placed.tried), f"{row.took_s:.1f}"
        )
    spread = f"{mean_s:.4g} ({min(random_s):.4g} to {max(random_s):.4g})"
    return console.Group(title, table, f"random layouts, mean and range of {len(random_s)}: {spread} s")


def pipelines(links: placement.Links, layout: np.ndarray) -> str:
    """One line a worker: its devices, stage by stage."""
    lines = (f"worker {w}: " + " → ".join(links.names[device] for device in column) for w, column in enumerate(layout.T))
    return "\n".join(lines)


def draw(path: str, links: placement.Links, best: placement.Placement, random_s: list[float], rows: list[Row]) -> None:
    """Seconds of an iteration on the left; on the right the links in the order of the placement, with a frame for each stage."""
    from matplotlib import colors, figure, patches

    drawn = figure.Figure(figsize=(12, 5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1.3))
    names = ["random", *(row.name for row in rows)]
    parts = [(0.0, float(np.mean(random_s))), *((row.placed.compute_s, row.placed.messages_s) for row in rows)]
    left.barh(names, [messages for _, messages in parts], left=[compute for compute, _ in parts], color="#0072B2")
    if best.compute_s:
        left.barh(names[1:], [row.placed.compute_s for row in rows], color="0.7")
    left.invert_yaxis()
    left.set_xlabel("seconds of an iteration" + (" (grey: computing)" if best.compute_s else ""))
    left.spines[["top", "right"]].set_visible(False)
    order, (S, W) = best.layout.ravel(), best.layout.shape
    mbit = 8e-6 * links.bandwidth_Bps[np.ix_(order, order)]
    np.fill_diagonal(mbit, np.nan)
    low, high = np.nanmin(mbit), np.nanmax(mbit)
    image = right.imshow(mbit, norm=colors.LogNorm(low, max(high, 1.01 * low)), cmap="cividis")
    for s in range(S):
        right.add_patch(patches.Rectangle((s * W - 0.5, s * W - 0.5), W, W, fill=False, edgecolor="#D55E00", linewidth=1.5))
    step = max(1, len(order) // 16)
    right.set_yticks(range(0, len(order), step), [links.names[device] for device in order[::step]], fontsize=7)
    right.set_xticks([])
    right.set_title("links in the order of the placement; a frame is a stage", fontsize=10)
    drawn.colorbar(image, ax=right, label="Mbit/s, from row to column")
    drawn.savefig(path, dpi=140)


def run(find_model: Callable[[int], Model]) -> None:
    """Searches, prints, draws, and writes the placement; `find_model` gives the model for a number of workers."""
    memory.keep_freed()  # Matrices of thousands of devices take hundreds of megabytes each.
    links, devices = load_links()
    profile.check_number("--search_s", FLAGS.search_s, profile.Rate)
    stages, name = FLAGS.stages, graph()
    workers = workers_of(devices, stages)
    job, *needs = work(find_model(workers), workers, stages, name)
    among = choice.choices(links, job, *needs)
    network_of = networks(links, job, among)
    rows = searched(network_of, among, devices, FLAGS.search_s)
    random_s = at_random(network_of(among[-1].devices), among[-1].compute_s, FLAGS.search_s)
    best = min(rows, key=lambda row: row.placed.seconds).placed
    terminal = command.console()
    title = (
        f"{devices} of {links.num_devices} devices of {FLAGS.links}: {workers} workers × {stages} stages, {name or 'all-reduce'}"
    )
    terminal.print(report(rows, random_s, title))
    terminal.print(pipelines(links, best.layout), markup=False, soft_wrap=True)
    if left_out := sorted(set(range(links.num_devices)) - set(best.layout.ravel().tolist())):
        terminal.print(f"left out: {', '.join(links.names[i] for i in left_out)}", markup=False, style="dim", soft_wrap=True)
    if FLAGS.plot:
        draw(FLAGS.plot, links, best, random_s, rows)
        terminal.print(f"wrote {FLAGS.plot}", markup=False)
    if FLAGS.placement:
        placement.save(FLAGS.placement, links, best, links=FLAGS.links, workers=workers, stages=stages, topology=name)
        terminal.print(f"wrote {FLAGS.placement}", markup=False)
