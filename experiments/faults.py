"""Every kind of fault: how soon the others take steps again, how soon the process takes part again, and the effect on the loss.

    python -m experiments.faults --out=runs/faults

Emulated hosts (launch.cluster: root and iproute2), links of 100 Mbit/s, one process a host, one-peer exponential gossip on the byte model
of configs/lm.py. With 4 and with 8 processes a run has six faults, one after the other: process 1, and then process 0, is killed,
frozen, and cut off. The bounds follow from `elastic.heartbeat_s`: twice that and three seconds until the others step again, and ten
seconds from the start of a process, or from the end of a cut, until it takes part.

For the loss, runs of 4 processes have injected faults of all kinds, and are compared with fault-free runs of as many worker-steps.
Events are in OUT/RUN.jsonl; finished runs are not repeated.
"""

from collections.abc import Callable, Iterator, Sequence
import itertools
import math
import pathlib
from typing import NamedTuple

from absl import flags

from experiments import script, seeds, trials
from experiments.bench.cluster.systems import ERRORS
from experiments.fault_runs import Event, Launch
from experiments.methods import HOSTS, ONE_PEER, SHORTHANDS
from launch import cluster

FLAGS = flags.FLAGS

COUNTS = (4, 8)  # processes
HEARTBEAT_S = 5.0  # config.elastic.heartbeat_s
KINDS, LASTS_S = ("kill", "freeze", "cut"), 15  # duration of a freeze or a cut
FIRST_S, APART_S = 20, 40  # of the first fault, for each process that has to start; between two faults
STOPPED_S, BACK_S = 2 * HEARTBEAT_S + 3, 10.0  # bounds
STORM = "storm(per_hour=360,kinds=all,lasts_s=10,seed={seed})"


class Found(NamedTuple):
    """Effects of a fault, in seconds."""

    kind: str
    process: int
    stopped_s: float  # from the fault until the others step again
    back_s: float  # from the start of the process, or the end of the cut, until it takes part


def schedule(processes: int) -> str:
    """Return the faults of a run, as --chaos has them."""
    return ",".join(
        f"{kind}={target}@{FIRST_S * processes + APART_S * place}s" + (f"+{LASTS_S}s" if kind != "kill" else "")
        for place, (target, kind) in enumerate(itertools.product((1, 0), KINDS))
    )


def found(events: Sequence[Event]) -> Iterator[Found]:
    """Yield the effects of each fault of a run; inf if there were none."""

    def first(kind: str, after_s: float, fits: Callable[[list[int]], bool] = lambda processes: True) -> float:
        return next((event.at_s for event in events if event.kind == kind and event.at_s > after_s and fits(event.value)), math.inf)

    for event in events:
        if event.kind in KINDS:
            (target,) = event.value
            left_s = first("view", event.at_s, lambda members: target not in members)
            start_s = first("start", event.at_s, lambda started: target in started)
            if event.kind == "cut":
                start_s = max(start_s, event.at_s + LASTS_S)
            back_s = first("view", left_s, lambda members: target in members)
            yield Found(event.kind, target, first("row", left_s) - event.at_s, back_s - start_s)


def train(workdir: pathlib.Path, launch: Launch, steps: int, log_every: int, **fields: object) -> tuple[list[Event], trials.Trial]:
    """Return (events, run) of a run of the byte model, which is trained unless that is done."""
    common = {"log_every": log_every, "checkpoint.every": 200, "elastic.heartbeat_s": HEARTBEAT_S}
    config = f"configs/lm.py:{SHORTHANDS[ONE_PEER]},workers={launch.hosts},steps={steps}"
    trial = trials.Trial(workdir, config, tuple((trials.STEPS_ONLY | common | fields).items()))
    return launch.events(workdir.with_name(f"{workdir.name}.jsonl"), workdir.with_name(f"{workdir.name}.log"), trial), trial


def inject(out: pathlib.Path, processes: int) -> list[Found]:
    """Return the effects of all six faults with so many processes."""
    limit_s = FIRST_S * processes + APART_S * 2 * len(KINDS)
    launch = Launch(processes, FLAGS.rate, lambda start: schedule(processes), limit_s)
    return list(found(train(out / f"{processes}_processes", launch, 10**6, 1)[0]))


class Loss(NamedTuple):
    """Effects of injected faults with one seed."""

    faults: int
    share: float  # worker-steps, relative to those without faults
    stormy: float  # nats/byte
    calm: float  # of a fault-free run of as many worker-steps


def faulty_and_calm(out: pathlib.Path, seed: int) -> Loss:
    """Train with injected faults, and without for as many worker-steps."""
    steps = FLAGS.steps
    storm = Launch(HOSTS, FLAGS.rate, lambda start: STORM.format(seed=seed))
    events, stormy = train(out / f"storm_{seed}", storm, steps, 10, seed=seed)
    rows = [(0, 0.0, HOSTS), *(event.value for event in events if event.kind == "row")]
    share = sum((late[0] - early[0]) * late[2] for early, late in itertools.pairwise(rows)) / (steps * HOSTS)
    _, calm = train(out / f"calm_{seed}", Launch(HOSTS, FLAGS.rate), round(share * steps), 10, seed=seed)
    return Loss(sum(event.kind in KINDS for event in events), share, *(run.summary()["eval_loss"] for run in (stormy, calm)))


def tabulate_faults(by_count: dict[int, list[Found]]) -> script.Table:
    """Return a row for each fault, with the bounds in the head."""
    table = script.table(
        "processes", "fault", "others step after, s", f"limit: {STOPPED_S:g}", "rejoins after, s", f"limit: {BACK_S:g}", left=2
    )
    for count, faults in by_count.items():
        for fault in faults:
            bounded = ((fault.stopped_s, STOPPED_S), (fault.back_s, BACK_S))
            cells = [cell for seconds, bound_s in bounded for cell in (f"{seconds:.1f}", "met" if seconds <= bound_s else "NO")]
            table.add_row(str(count), f"{fault.kind} process {fault.process}", *cells)
    return table


def tabulate_losses(losses: list[Loss]) -> script.Table:
    """Return a row for each seed, and the mean ± 2σ of one seed."""
    table = script.table("seed", "faults", "worker-steps", "loss with faults", "loss without", "difference")
    for seed, (faults, share, stormy, calm) in enumerate(losses):
        more = script.difference(stormy, calm, 2)
        table.add_row(str(seed), str(faults), f"{100 * share:.1f} %", f"{stormy:.4f}", f"{calm:.4f}", more)
    stormy, calm = (seeds.spread([getattr(each, which) for each in losses]) for which in ("stormy", "calm"))
    table.add_row("mean ± 2σ", "", "", stormy.text(4), calm.text(4), script.difference(stormy.mean, calm.mean, 2))
    return table


def main() -> int:
    out = script.folder()
    script.check_tables("faults", *(["faults_loss"] if FLAGS.seeds else []))
    with cluster.network(hosts=max(FLAGS.processes, default=HOSTS), rate=FLAGS.rate):
        pass  # Fails early if the machine cannot emulate the cluster.
    script.claim(out, rate=FLAGS.rate, steps=FLAGS.steps)
    by_count = {count: inject(out, count) for count in FLAGS.processes}
    table = tabulate_faults(by_count)
    script.show(table)
    losses = [faulty_and_calm(out, seed) for seed in range(FLAGS.seeds)]
    if losses:
        script.report("faults_loss", tabulate_losses(losses))
    faults = {count: [each._asdict() for each in rows] for count, rows in by_count.items()}
    script.publish("faults", table, faults=faults, losses=[each._asdict() for each in losses])
    return 0 if all(f.stopped_s <= STOPPED_S and f.back_s <= BACK_S for rows in by_count.values() for f in rows) else 1


if __name__ == "__main__":
    script.define("out", "pages")
    flags.DEFINE_string("rate", "100mbit", "Rate of every link.")
    flags.DEFINE_multi_integer("processes", COUNTS, "Number of processes; may be repeated.", lower_bound=3)
    script.selects("processes")
    flags.DEFINE_integer("seeds", 3, "Seeds of the runs whose loss is compared; 0: none.", lower_bound=0)
    script.selects("seeds")
    flags.DEFINE_integer("steps", 1000, "Steps of a run with injected faults.", lower_bound=100)
    script.run(main, ERRORS)
