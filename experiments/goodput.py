"""How much training survives processes that are killed.

Compared are gossip, DiLoCo and all-reduce that continue without a worker, and all-reduce that ends and continues from its last checkpoint.

    python -m experiments.goodput --out=runs/goodput
    python -m experiments.goodput --out=runs/goodput --minutes=5 --calm_minutes=2 --row=gossip

Four emulated hosts (launch.cluster: root and iproute2), links of 100 Mbit/s, one process a host, the byte model of configs/lm.py. One
row has a model of ten times as many parameters: a process that returns receives them, and Adam's moments, over its link. Every row
trains twice: without faults for `--calm_minutes`, and for `--minutes` while a random process is killed `--per_hour` times an
hour. Another process replaces it at once. Events are in OUT/ROW/events.jsonl, the launcher's output in OUT/ROW/launcher.log; finished
rows are not repeated.

A worker *lives* as long as its process does, and *takes part* while it is in the group that takes steps. The speed of a machine drifts,
so the run with faults is also compared with its own *quiet* stretches, in which nothing has died for a while.
"""

from collections.abc import Iterator, Sequence
import itertools
import math
import pathlib
import statistics
from typing import NamedTuple

from absl import flags

from experiments import script, trials
from experiments.bench.cluster.systems import ERRORS
from experiments.fault_runs import Event, Launch
from experiments.methods import HOSTS, ONE_PEER, SHORTHANDS, SYNC
from launch import cluster

FLAGS = flags.FLAGS

LARGER = dict(vocabulary=512, context=128, width=160, hidden=640, heads=5, depth=4)
FIELDS = {"log_every": 20, "checkpoint.every": 100, "schedule.final_fraction": 1.0, "bucket_bytes": 2**21}
RATE, PER_HOUR = "100mbit", 125.0  # of the pages
QUIET_S = 12.0  # after a death, until the group has recovered


class Row(NamedTuple):
    """A method, and how it handles a worker that dies."""

    name: str
    shorthand: str
    elastic: bool = True
    is_larger: bool = False  # with ten times as many parameters


ROWS = (
    Row("gossip", SHORTHANDS[ONE_PEER]),
    Row("gossip, 1.4M parameters", SHORTHANDS[ONE_PEER], is_larger=True),
    Row("DiLoCo", "method=diloco,every=20"),
    Row(SYNC, SHORTHANDS[SYNC]),
    Row(f"{SYNC}, from its checkpoint", SHORTHANDS[SYNC], elastic=False),
)


def path_of(out: pathlib.Path, row: Row, per_hour: float) -> pathlib.Path:
    """Return the file with the events of a row with so many faults an hour."""
    return out / f"{trials.name_of(row.name)}_{per_hour:g}" / "events.jsonl"


def events(row: Row, minutes: float, per_hour: float) -> list[Event]:
    """Return the events of a row with so many faults an hour; train it unless that is done."""
    path = path_of(script.folder(), row, per_hour)
    larger = {f"model.{name}": value for name, value in LARGER.items()} if row.is_larger else {}
    fields = larger | trials.STEPS_ONLY | FIELDS
    trial = trials.Trial(path.parent / "run", f"configs/lm.py:{row.shorthand},workers={HOSTS},steps=1000000", tuple(fields.items()))
    chaos = lambda start: f"storm(per_hour={per_hour:g},seed={start})" if per_hour else ""
    launch = Launch(HOSTS, FLAGS.rate, chaos, 60 * minutes, row.elastic)
    return launch.events(path, path.parent / "launcher.log", trial)


class Phase(NamedTuple):
    """The time between two events."""

    start_s: float
    end_s: float
    living: frozenset[int]  # processes
    members: frozenset[int]  # living processes that take steps


def phases(events: Sequence[Event]) -> Iterator[Phase]:
    """Yield the phases from the first row of metrics to the last.

    A run that ended and was started again takes part from its first new row of metrics.
    """
    rows = [event.at_s for event in events if event.kind == "row"]
    living, members = frozenset[int](), frozenset[int]()
    for event, following in itertools.pairwise(events):
        if event.kind == "start":
            living |= frozenset(event.value)
        elif event.kind in ("kill", "stop"):
            living -= frozenset(event.value)
        elif event.kind == "view":
            members = frozenset(event.value)
        elif event.kind == "row" and not members & living:
            members = living
        members &= living
        start_s, end_s = max(event.at_s, rows[0]), min(following.at_s, rows[-1])
        if end_s > start_s:
            yield Phase(start_s, end_s, living, members)


class Figures(NamedTuple):
    """Results of a run, from the first row of metrics to the last."""

    steps_per_s: float
    each_per_s: float  # steps of a worker per second that it lives
    quiet_per_s: float  # steps per second between rows that are long after any death; nan: there are none
    participation: float  # of the time of living workers
    resumed_s: list[float]  # from each death to the next step, or view, of the others
    whole_s: list[float]  # from each death until all workers take part again


def figures(events: Sequence[Event]) -> Figures:
    """Return the results of a run."""
    rows, found = [event for event in events if event.kind == "row"], list(phases(events))
    living_s = sum((phase.end_s - phase.start_s) * len(phase.living) for phase in found)
    part_s = sum((phase.end_s - phase.start_s) * len(phase.members) for phase in found)
    worker_steps = sum((late.value[0] - early.value[0]) * late.value[2] for early, late in itertools.pairwise(rows))
    deaths = [event.at_s for event in events if event.kind == "kill" and rows[0].at_s < event.at_s < rows[-1].at_s]
    steps = [event.at_s for event in events if event.kind in ("view", "row")]
    whole = [phase.start_s for phase in found if len(phase.members) == HOSTS]
    quiet = [
        (early, late)
        for early, late in itertools.pairwise(rows)
        if not any(early.at_s - QUIET_S < at_s <= late.at_s for at_s in deaths)
    ]
    return Figures(
        steps_per_s=_rate([(rows[0], rows[-1])]),
        each_per_s=worker_steps / living_s,
        quiet_per_s=_rate(quiet),
        participation=part_s / living_s,
        resumed_s=[next((time_s for time_s in steps if time_s > at_s), math.inf) - at_s for at_s in deaths],
        whole_s=[found_s - at_s for at_s in deaths if (found_s := next((s for s in whole if s > at_s), None)) is not None],
    )


def _rate(intervals: Sequence[tuple[Event, Event]]) -> float:
    """Return the steps per second between rows of metrics; nan if there are none."""
    seconds = sum(late.at_s - early.at_s for early, late in intervals)
    return sum(late.value[0] - early.value[0] for early, late in intervals) / seconds if seconds else math.nan


def tabulate(results: dict[str, tuple[Figures, Figures]]) -> script.Table:
    """Return a row for each method: its figures without and with injected faults."""
    table = script.table(
        "",
        "steps/s without faults",
        "steps/s with faults",
        "share",
        "per worker-second",
        "vs. quiet periods",
        "in the group",
        "deaths",
        "resumes after, s",
        "all back after, s",
    )
    for name, (calm, faulty) in results.items():
        shares = (
            faulty.steps_per_s / calm.steps_per_s,
            faulty.each_per_s / calm.each_per_s,
            faulty.each_per_s / faulty.quiet_per_s,
            faulty.participation,
        )
        table.add_row(
            name,
            f"{calm.steps_per_s:.2f}",
            f"{faulty.steps_per_s:.2f}",
            *(f"{100 * share:.1f} %" for share in shares),
            str(len(faulty.resumed_s)),
            *(
                f"{statistics.median(times):.1f} (max {max(times):.1f})" if times else ""
                for times in (faulty.resumed_s, faulty.whole_s)
            ),
        )
    return table


def draw(path: str, recorded: dict[str, list[Event]], rate: str = RATE, per_hour: float = PER_HOUR) -> None:
    """Draw loss against time, and the number of workers that take part."""
    caption = f"{HOSTS} hosts, links of {rate.replace('mbit', ' Mbit/s')}; a random process is killed {per_hour:g} times an hour"
    with script.panels(path, 2, (11.0, 4.2), caption) as (by_time, workers):
        for color, (name, events) in zip(script.COLORS, recorded.items()):
            rows = [event for event in events if event.kind == "row"]
            by_time.plot([row.at_s / 60 for row in rows], [row.value[1] for row in rows], color=color, label=name, linewidth=1.4)
            found = list(phases(events))
            at_min = [phase.start_s / 60 for phase in found]
            workers.plot(at_min, [len(phase.members) for phase in found], color=color, drawstyle="steps-post", linewidth=1.0)
        by_time.set(xlabel="minutes", ylabel="training loss, nats/byte")
        workers.set(xlabel="minutes", ylabel="participating workers", yticks=range(HOSTS + 1), ylim=(0, HOSTS + 0.2))
        by_time.legend(frameon=False, fontsize=8)


def main() -> None:
    out, rows = script.folder(), script.choose(ROWS, FLAGS.row)
    runs = (FLAGS.calm_minutes, 0.0), (FLAGS.minutes, FLAGS.per_hour)
    script.check_tables("goodput")
    if not all(path_of(out, row, per_hour).exists() for row in rows for _, per_hour in runs):
        with cluster.network(hosts=HOSTS, rate=FLAGS.rate):
            pass  # Fails early if the machine cannot emulate the cluster.
    script.claim(out, rate=FLAGS.rate, minutes=FLAGS.minutes, calm_minutes=FLAGS.calm_minutes, per_hour=FLAGS.per_hour)
    recorded, results = {}, {}
    for row in rows:
        calm, faulty = (events(row, *run) for run in runs)
        recorded[row.name], results[row.name] = faulty, (figures(calm), figures(faulty))
        script.show(f"{row.name}: {results[row.name][1].steps_per_s:.2f} steps/s with faults")
    table = tabulate(results)
    script.show(table)
    numbers = {name: [each._asdict() for each in pair] for name, pair in results.items()}
    script.publish("goodput", table, lambda path: draw(path, recorded, FLAGS.rate, FLAGS.per_hour), **numbers)


if __name__ == "__main__":
    script.define("out", "row", "pages", rows=ROWS)
    flags.DEFINE_string("rate", RATE, "Rate of every link.")
    flags.DEFINE_float("minutes", 30.0, "Duration of each run with faults.", lower_bound=0.5)
    flags.DEFINE_float("calm_minutes", 4.0, "Duration of each run without faults.", lower_bound=0.5)
    flags.DEFINE_float("per_hour", PER_HOUR, "Processes that are killed.", lower_bound=1.0)
    script.run(main, ERRORS)
