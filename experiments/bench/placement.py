"""The speed-up of a placement: step time with two slow links, in the hosts' own order and in that of launch.place.

    python -m experiments.bench.placement --out=runs/placement

Eight emulated hosts (launch.cluster: root and iproute2), one process a host, links of 50 Mbit/s, of which those of `--pairs` carry less.
Gossip over the one-peer exponential graph, a transformer of 1.2M parameters. First launch.calibrate measures the link of every pair,
then launch.place computes a placement, and then both orders train, in turns. A step's forecast is the maximum of the calibrated compute
time and the communication time of `decjax.contrib.placement`. A run's step is the mean over its intervals without the first two.
"""

import json
import pathlib
import statistics

from absl import flags
import numpy as np

from decjax import costmodel, topology
from decjax.contrib import placement
from experiments import script, trials
from experiments.bench.cluster import systems
from experiments.bench.cluster.group import done
from experiments.goodput import LARGER
from experiments.methods import ONE_PEER, SHORTHANDS
from launch import cluster, processes

FLAGS = flags.FLAGS

HOSTS, GRAPH = 8, "one_peer_exponential"
ORDERS = ("hosts' own", "placement")
EVERY, LEFT_OUT = 6, 2  # steps of an interval: whole periods of the graph; intervals at the start of a run
TOKENS = HOSTS * 2 * LARGER["context"]  # The config's batch is two sequences a worker.
CONFIG = f"configs/lm.py:{SHORTHANDS[ONE_PEER]},workers={HOSTS}"
SIZE = {f"model.{name}": value for name, value in LARGER.items()} | {"bucket_bytes": 2**21}


def measure(network: cluster.Network, out: pathlib.Path) -> pathlib.Path:
    """Measure the links, unless that is done; return their file."""
    links = out / "links.json"
    if not links.exists():
        options = [f"--config.{name}={value}" for name, value in SIZE.items()]
        options += [f"--out={out / 'profile.json'}", f"--links={links}", "--seconds=10", "--sizes=1e5,2e6"]
        done("launch.calibrate", network.run("launch.calibrate", [f"--config={CONFIG}", *options]))
    return links


def plan(links: pathlib.Path, out: pathlib.Path, parameters: float) -> pathlib.Path:
    """Compute a placement; return its file."""
    path = out / "placement.json"
    options = [f"--links={links}", f"--topology={GRAPH}", f"--model=params={parameters:g}", "--search_s=5", f"--out={path}"]
    done("launch.place", processes.start(processes.python("launch.place", options)).wait())
    return path


def forecast(links: pathlib.Path, layout: np.ndarray, workload: costmodel.Workload) -> float:
    """Return the predicted seconds of a step."""
    job = placement.Job(HOSTS, gradient_bytes=workload.total_bytes, topology=topology.make(GRAPH, HOSTS))
    return max(workload.compute_s, placement.Network(placement.load(links), job).seconds(layout))


def main() -> None:
    out = script.folder()
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = {order: [] for order in ORDERS}
    with cluster.network(hosts=HOSTS, rate=FLAGS.rate) as network:
        network.set_pairs(FLAGS.pairs)
        links = measure(network, out)
        _, workload = costmodel.load(out / "profile.json")
        assert workload  # launch.calibrate writes one.
        path = plan(links, out, workload.total_bytes / 4)
        options = dict(zip(ORDERS, ([], [f"--placement={path}"])))
        for number in range(FLAGS.rounds):
            for order in ORDERS if number % 2 else reversed(ORDERS):
                fields = SIZE | trials.TIMED | {"log_every": EVERY}
                workdir = out / f"{trials.name_of(order)}_{number}"
                run = trials.Trial(workdir, f"{CONFIG},steps={FLAGS.steps}", tuple(fields.items()))
                if not run.finished:
                    done(f"the run in {run.workdir}", network.run(processes.TRAIN, [*run.arguments, *options[order]]))
                found[order].append(statistics.fmean(run.step_s(TOKENS, LEFT_OUT)))
    layouts = dict(zip(ORDERS, (np.arange(HOSTS)[None], np.array(json.loads(path.read_text())["layout"]))))
    forecasts = {order: forecast(links, layouts[order], workload) for order in ORDERS}
    report(found, forecasts)


def report(found: dict[str, list[float]], forecasts: dict[str, float]) -> None:
    """Print a row for each order, and the speed-up."""
    table = script.table("order of hosts", "ms per step", "least", "largest", "forecast, ms")
    for order, times_s in found.items():
        table.add_row(order, *map(script.ms, (statistics.median(times_s), min(times_s), max(times_s), forecasts[order])))
    gain, expected = (of[ORDERS[0]] / of[ORDERS[1]] for of in ({o: statistics.median(t) for o, t in found.items()}, forecasts))
    script.show(table)
    script.show(f"the placement is {gain:.2f}× faster; predicted {expected:.2f}, {script.difference(expected, gain)}")
    script.fill("placement_cluster", table)


if __name__ == "__main__":
    script.define("out", "pages")
    flags.DEFINE_string("rate", "50mbit", "Rate of every link.")
    flags.DEFINE_string("pairs", "0-1:10mbit,4-5:10mbit", "Hosts whose messages to each other are slower.")
    flags.DEFINE_integer("rounds", 2, "Runs of each order.", lower_bound=1)
    flags.DEFINE_integer("steps", 48, "Steps of a run.", lower_bound=(LEFT_OUT + 1) * EVERY)
    script.run(main, (*systems.ERRORS, trials.Broken, ValueError))
