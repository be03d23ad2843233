"""Every kind of fault: how soon the others take steps again, how soon who was gone takes part again, and what it does to the loss.

    python -m experiments.faults --out=runs/faults

Emulated hosts (launch.cluster: root and iproute2), links of 100 Mbit/s, one process a host, one-peer exponential gossip on the byte model
of configs/lm.py. With 4 and with 8 processes a run goes through six faults, one after the other: process 1, and then process 0, is killed,
frozen, and cut off. The bound is that of a user who counts on `elastic.heartbeat_s`: twice that and three seconds until the others
step again, and ten seconds from the start of a process, or from the end of a cut, until it takes part.

For the loss, runs of 4 processes go through injected faults of all kinds, and are compared with fault-free runs of as many worker-steps.
What happened is in OUT/RUN/events.jsonl; runs that are there are not made again.
"""

from collections.abc import Iterator, Sequence
import itertools
import pathlib
from typing import Any, NamedTuple

from absl import flags

from experiments import script, seeds, trials
from experiments.bench.cluster.group import Failed
from experiments.goodput import Event, Launch, Recorder, follow, read
from experiments.methods import HOSTS, ONE_PEER, SHORTHANDS
from launch import cluster, command

FLAGS = flags.FLAGS

COUNTS = (4, 8)  # processes
HEARTBEAT_S = 5.0  # config.elastic.heartbeat_s
KINDS, LASTS_S = ("kill", "freeze", "cut"), 15  # how long a freeze or a cut lasts
FIRST_S, APART_S = 20, 40  # of the first fault, for each process that has to start; between two faults
BACK_S = 10.0  # from the start of a process until it takes part
STORM = "storm(per_hour=360,kinds=all,lasts_s=10,seed={seed})"


class Found(NamedTuple):
    """Effects of a fault, in seconds."""

    kind: str
    process: int
    stopped_s: float  # from the fault until the others step again
    back_s: float  # from the start of the process, or the end of the cut, until it takes part


def schedule(processes: int) -> str:
    """The faults of a run, as launch.chaos reads them."""
    faults = [(kind, target) for target in (1, 0) for kind in KINDS]
    lasts = {"kill": ""}
    return ",".join(
        f"{kind}={target}@{FIRST_S * processes + APART_S * place}s{lasts.get(kind, f'+{LASTS_S}s')}"
        for place, (kind, target) in enumerate(faults)
    )


def found(events: Sequence[Event]) -> Iterator[Found]:
    """Yield the effects of each fault of a run; inf where there were none."""

    def first(kind: str, after_s: float, fits=lambda value: True) -> float:
        return next(
            (event.at_s for event in events if event.kind == kind and event.at_s > after_s and fits(event.value)), float("inf")
        )

    for event in events:
        if event.kind not in KINDS:
            continue
        (target,) = event.value
        left_s = first("view", event.at_s, lambda members: target not in members)
        started_s = first("start", event.at_s, lambda started: target in started)
        if event.kind == "cut":
            started_s = max(started_s, event.at_s + LASTS_S)
        back_s = first("view", left_s, lambda members: target in members)
        yield Found(event.kind, target, first("row", left_s) - event.at_s, back_s - started_s)


def train(run: trials.Trial, hosts: int, chaos: str, over_s: float | None = None) -> list[Event]:
    """The events of a run, which is made unless it is there, to its end or for so many seconds."""
    path = run.workdir.with_name(f"{run.workdir.name}.jsonl")
    if not path.exists():
        note = Recorder(path.with_suffix(".part"), run.workdir)
        is_over = (lambda: note.passed_s > over_s) if over_s else (lambda: False)
        launch = Launch(hosts, FLAGS.rate, elastic=True, chaos=chaos)
        if (code := follow(launch, run.arguments, note, path.with_suffix(".log"), is_over)) not in (None, 0):
            raise Failed(f"the run in {run.workdir} ended with exit code {code}; see {path.with_suffix('.log')}")
        path.with_suffix(".part").rename(path)
    return read(path)


def trial(workdir: pathlib.Path, hosts: int, steps: int, log: int, **further: Any) -> trials.Trial:
    """A run of the byte model."""
    given = trials.STEPS_ONLY | {"log_every": log, "checkpoint.every": 200, "elastic.heartbeat_s": HEARTBEAT_S} | further
    return trials.Trial(workdir, f"configs/lm.py:{SHORTHANDS[ONE_PEER]},workers={hosts},steps={steps}", tuple(given.items()))


def go_through(out: pathlib.Path, processes: int) -> list[Found]:
    """All six faults with so many processes."""
    over_s = FIRST_S * processes + APART_S * 2 * len(KINDS)
    run = trial(out / f"{processes}_processes", processes, steps=10**6, log=1)
    return list(found(train(run, processes, schedule(processes), over_s)))


class Loss(NamedTuple):
    """What injected faults did to one seed."""

    faults: int
    share: float  # worker-steps, of those that all workers would have taken
    stormy: float  # nats/byte
    calm: float  # of a fault-free run of as many worker-steps


def faulty_and_calm(out: pathlib.Path, seed: int) -> Loss:
    """A run with injected faults, and one without, of as many worker-steps."""
    steps = FLAGS.steps
    stormy = trial(out / f"storm_{seed}", HOSTS, steps, 10, seed=seed)
    events = train(stormy, HOSTS, STORM.format(seed=seed))
    rows = [(0, 0.0, HOSTS), *(event.value for event in events if event.kind == "row")]
    share = sum((late[0] - early[0]) * late[2] for early, late in itertools.pairwise(rows)) / (steps * HOSTS)
    calm = trial(out / f"calm_{seed}", HOSTS, round(share * steps), 10, seed=seed)
    train(calm, HOSTS, "")
    counted = sum(event.kind in KINDS for event in events)
    return Loss(counted, share, *(run.summary()["eval_loss"] for run in (stormy, calm)))


# -- What is shown ----------------------------------------------------------------------------------------------------


def tabulate_faults(by_count: dict[int, list[Found]], bound_s: float) -> Any:
    """One row a fault, with the bounds of `bound_s` and `BACK_S` in the head."""
    table = script.table(
        "processes", "fault", "others step after, s", f"asked: {bound_s:g}", "back after, s", f"asked: {BACK_S:g}", left=2
    )
    words = {True: "met", False: "NO"}
    for count, faults in by_count.items():
        for fault in faults:
            cells = (
                f"{fault.stopped_s:.1f}",
                words[fault.stopped_s <= bound_s],
                f"{fault.back_s:.1f}",
                words[fault.back_s <= BACK_S],
            )
            table.add_row(str(count), f"{fault.kind} process {fault.process}", *cells)
    return table


def tabulate_losses(losses: list[Loss]) -> Any:
    """One row a seed, and the mean ± 2σ of one seed."""
    table = script.table("seed", "faults", "worker-steps", "loss with faults", "loss without", "difference")
    for seed, each in enumerate(losses):
        numbers = (
            f"{100 * each.share:.1f} %",
            f"{each.stormy:.4f}",
            f"{each.calm:.4f}",
            script.difference(each.stormy, each.calm, 2),
        )
        table.add_row(str(seed), str(each.faults), *numbers)
    stormy, calm = (seeds.spread([getattr(each, which) for each in losses]) for which in ("stormy", "calm"))
    table.add_row("mean ± 2σ", "", "", stormy.text(4), calm.text(4), script.difference(stormy.mean, calm.mean, 2))
    return table


def main() -> int:
    out = script.folder()
    script.check_tables("faults", *(["faults_loss"] if FLAGS.seeds else []))
    with cluster.network(hosts=max(FLAGS.processes, default=HOSTS), rate=FLAGS.rate):
        pass  # Refuses at once what would end the command later.
    script.claim(out, rate=FLAGS.rate, steps=FLAGS.steps)
    bound_s = 2 * HEARTBEAT_S + 3
    by_count = {count: go_through(out, count) for count in FLAGS.processes}
    faults = tabulate_faults(by_count, bound_s)
    script.show(faults)
    losses = [faulty_and_calm(out, seed) for seed in range(FLAGS.seeds)]
    if losses:
        script.report("faults_loss", tabulate_losses(losses))
    script.publish(
        "faults",
        faults,
        faults={count: [each._asdict() for each in rows] for count, rows in by_count.items()},
        losses=[each._asdict() for each in losses],
    )
    return 0 if all(f.stopped_s <= bound_s and f.back_s <= BACK_S for rows in by_count.values() for f in rows) else 1


if __name__ == "__main__":
    flags.DEFINE(command.FOLDER, "out", None, "Run directories, events and figures go here.", required=True)
    flags.DEFINE_string("rate", "100mbit", "Of every link.")
    flags.DEFINE_multi_integer("processes", COUNTS, "How many there are; may be repeated.", lower_bound=3)
    script.selects("processes")
    flags.DEFINE_integer("seeds", 3, "Of the runs whose loss is compared; 0: none.", lower_bound=0)
    script.selects("seeds")
    flags.DEFINE_integer("steps", 1000, "Of a run with injected faults.", lower_bound=100)
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (command.UserError, Failed, OSError))
