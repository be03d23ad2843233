"""Assign pipeline stages and workers to devices where links differ, so that messages take least time.

    python -m launch.place --links=configs/links/worldwide.json --stages=8 --out=placement.json \\
        --model=depth=24,width=2048,heads=16,vocabulary=50257,context=2048,batch=64,bytes=2
    python -m launch.train --config=CONFIG --workdir=WORKDIR --placement=placement.json

A genetic search and simulated annealing are compared with random layouts. launch.calibrate --links measures the links; configs/links
has some. --model is a config, the sizes of a transformer, or with one stage params=65e6 (and bytes=4, tokens= of a worker's step).
Devices without memory for a stage's parameters, gradients and Adam's moments are left out, as are devices that would slow the job.
"""

from collections.abc import Callable
import time
from typing import NamedTuple

from absl import flags
import numpy as np
from rich import console

from decjax import topology
from decjax.contrib import placement
from decjax.contrib.placement import choice, search
from decjax.errors import ConfigError
from launch import command, config_file, memory, plan_model

FLAGS = flags.FLAGS

RANDOM = 20  # layouts that the searches are compared with
TRIALS = 10**9  # searches end by time
MOMENTS_BYTES = 8.0  # of a parameter: Adam's two


class Model(NamedTuple):
    """What a placement needs of a model.

    Attributes:
        parameters: of the whole model.
        bytes: of a parameter in messages.
        flop: operations of one iteration, forward and backward, of all workers; 0: unknown.
        activation_bytes: of all workers' activations between two stages; None: it cannot have stages.
        depth: layers; each stage has at least one.
    """

    parameters: float
    bytes: float
    flop: float = 0.0
    activation_bytes: float | None = None
    depth: int = 1


class Work(NamedTuple):
    """A job, and what one of its stages needs of a device."""

    job: placement.Job
    stage_flop: float
    stage_bytes: float


def work(model: Model, workers: int, stages: int, graph: str | None) -> Work:
    """Divide a model into the work of workers and stages; `graph` is a topology's name, or None for all-reduce."""
    command.check(
        (
            stages == 1 or model.activation_bytes is not None,
            f"--stages={stages} needs the size of activations",
            "give --model=depth=…,width=… or a transformer's config",
        ),
        (stages <= model.depth, f"--stages={stages} must be at most depth={model.depth} of the model", "use fewer stages"),
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


def load_links() -> tuple[placement.Links, int]:
    """Return the links of --links and the number of devices to use."""
    links = placement.load(FLAGS.links)
    devices, most, stages = FLAGS.devices or links.num_devices, links.num_devices, FLAGS.stages
    command.check(
        (devices <= most, f"--devices={devices} must be from 2 to {most}, the devices of {FLAGS.links}", "use fewer"),
        (
            devices % stages == 0,
            f"--stages={stages} does not divide {devices} devices",
            "choose a multiple of the stages as --devices",
        ),
    )
    return links, devices


class Row(NamedTuple):
    """Result of a search."""

    name: str
    placed: placement.Placement
    took_s: float


NetworkOf = Callable[[list[int]], placement.Network]


def networks(links: placement.Links, job: placement.Job, among: list[choice.Candidates]) -> NetworkOf:
    """Return a function that makes the network of a candidate; the network of a single candidate is large and made only once."""
    make = lambda devices: placement.Network(links.take(devices), job)
    if len(among) > 1:
        return make
    only = make(among[0].devices)
    return lambda devices: only


def searched(network_of: NetworkOf, among: list[choice.Candidates], devices: int, seconds: float) -> list[Row]:
    """Return the best placement of each search, which takes `seconds`."""
    share_s = seconds / len(among)
    searches: dict[str, Callable[[placement.Network], placement.Placed]] = {
        "genetic": lambda network: placement.genetic(network, trials=TRIALS, seconds=share_s),
        "annealing": lambda network: placement.anneal(network, trials=TRIALS, seconds=share_s),
    }
    if devices <= search.MAX_ALL:
        searches["all layouts"] = placement.best_of_all
    rows = []
    for name, do in searches.items():
        begun = time.monotonic()
        rows.append(Row(name, choice.place_among(network_of, do, among), time.monotonic() - begun))
    return rows


def at_random(network: placement.Network, compute_s: float, seconds: float) -> list[float]:
    """Return the iteration times of random layouts; fewer than `RANDOM` if they take longer than `seconds`."""
    ends, times_s = time.monotonic() + seconds, []
    while not times_s or (len(times_s) < RANDOM and time.monotonic() < ends):
        layout = placement.random_layout(network, np.random.default_rng(len(times_s)))
        times_s.append(compute_s + network.seconds(layout))
    return times_s


# -- Output ----------------------------------------------------------------------------------------------------


def report(rows: list[Row], random_s: list[float], title: str) -> console.Group:
    """Return the table of searches and the mean of random layouts."""
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
    """Return one line per worker with the devices of its stages."""
    lines = (f"worker {w}: " + " → ".join(links.names[device] for device in column) for w, column in enumerate(layout.T))
    return "\n".join(lines)


def draw(path: str, links: placement.Links, best: placement.Placement, random_s: list[float], rows: list[Row]) -> None:
    """Draw iteration times on the left, and on the right the links in the order of the placement, with a frame per stage."""
    from matplotlib import colors, figure, patches

    drawn = figure.Figure(figsize=(12, 5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1.3))
    names = ["random", *(row.name for row in rows)]
    parts = [(0.0, float(np.mean(random_s))), *((row.placed.compute_s, row.placed.messages_s) for row in rows)]
    left.barh(names, [messages for _, messages in parts], left=[compute for compute, _ in parts], color="#0072B2")
    if best.compute_s:
        left.barh(names[1:], [row.placed.compute_s for row in rows], color="0.7")
    left.invert_yaxis()
    left.set_xlabel("seconds of an iteration" + (" (gray: computing)" if best.compute_s else ""))
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


def model_of(text: str, workers: int) -> Model:
    """Return the model of --model."""
    if plan_model.has_sizes(text) or (plan_model.is_config(text) and FLAGS.stages > 1):
        model = plan_model.transformer(text)
        batch = model.batch_size
        flop = 3 * (model.depth * model.layer_flops(batch) + model.head_flops(batch))
        return Model(model.parameters, model.gradient_bytes, flop, model.boundary_bytes(batch), model.depth)
    if plan_model.is_config(text):
        size = plan_model.size(text)
        numbers = plan_model.Numbers(size.params, size.tokens)
    else:
        numbers = plan_model.parse(text, plan_model.Numbers)
    return Model(numbers.params, numbers.bytes, 6 * numbers.params * (numbers.tokens or 0) * workers)


def main(argv: list[str]) -> int:
    command.options_only(argv)
    memory.keep_freed()  # Matrices of thousands of devices take hundreds of megabytes each.
    links, devices = load_links()
    stages, name = FLAGS.stages, FLAGS.topology
    workers = devices // stages
    job, *needs = work(model_of(FLAGS.model, workers), workers, stages, name)
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
    if FLAGS.out:
        placement.save(FLAGS.out, links, best, links=FLAGS.links, workers=workers, stages=stages, topology=name)
        terminal.print(f"wrote {FLAGS.out}", markup=False)
    return 0


if __name__ == "__main__":  # Other commands define flags of the same names, and one process may import several.
    flags.DEFINE_string("links", None, "Links between devices, a JSON file.", required=True)
    flags.DEFINE_string("model", None, "Config, depth=24,width=2048,…, or params=65e6.", required=True)
    flags.DEFINE_integer("devices", None, "Number of devices; default: all of the file.", lower_bound=2)
    flags.DEFINE_integer("stages", 1, "Pipeline stages of a worker.", lower_bound=1)
    flags.DEFINE_string("topology", None, "Graph of gossip between workers; default: all-reduce.")
    flags.DEFINE_float("search_s", 20.0, "Time of each search, seconds.", lower_bound=1e-3)
    flags.DEFINE(command.FILE, "out", None, "Order of devices to write, for launch.train --placement.")
    flags.DEFINE(command.FIGURE, "plot", None, "Figure to write, such as placement.png.")
    command.run(main, errors=(ValueError, ConfigError, config_file.ConfigFileError))
