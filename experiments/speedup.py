"""What overlap and few neighbors gain on slow links: one table, from one interleaved run, with PyTorch's peers.

    python -m experiments.speedup --rates=50mbit,100mbit,200mbit --peers=.venv-peers/bin/python --out=runs/speedup.json

Four emulated hosts (launch.cluster: root and iproute2), a transformer of 5.9M parameters, 8 sequences of 128 tokens per worker
and step, float32, one process a host and a core for two of them; "2 a host" rows have two processes a host. The peers, PyTorch's
DDP and decent-dp, need a Python with experiments/requirements-peers.txt.

Rows take turns; a figure is the median over the rounds of the mean time of a step. X is the time in which a link carries the
parameters once: P bytes over the throughput of one TCP connection, measured in the same run.
"""

import collections
from collections.abc import Callable
import statistics
from typing import NamedTuple

from absl import flags

from experiments import script
from experiments.bench.cluster.systems import ERRORS, WHOLE, Row, Runner, decjax, interleaved, torch
from experiments.methods import ALONE, HOSTS, ONE_PEER, RING, SHORTHANDS, STALE, SYNC
from experiments.script import Check
from launch import cluster

FLAGS = flags.FLAGS

TORCH_ALONE, DECENT = "PyTorch, no communication", "decent-dp one-peer-exp"
ALONE_2, TORCH_ALONE_2 = f"{ALONE}, 2 a host", f"{TORCH_ALONE}, 2 a host"
AER, DECENT_AER = "AER, 2 a host", "decent-dp AER, 2 a host"
ROWS = (
    decjax(ALONE, SHORTHANDS[ALONE]),
    decjax(SYNC, SHORTHANDS[SYNC], WHOLE),
    decjax(f"{SYNC}, buckets of 4 MB", SHORTHANDS[SYNC], 2**22),
    decjax(STALE, SHORTHANDS[STALE], WHOLE),
    *(decjax(name, SHORTHANDS[name]) for name in (ONE_PEER, f"{ONE_PEER}, bfloat16", f"{ONE_PEER}, int8", RING)),
    decjax(ALONE_2, SHORTHANDS[ALONE], local_size=2),
    decjax(AER, "topology=alternating_exponential_ring", local_size=2),
    torch(TORCH_ALONE, "alone"),
    torch("DDP", "ddp"),
    torch("DDP, buckets of 2 MB", "ddp", bucket_cap_mb=2, gradient_as_bucket_view=True),
    torch(DECENT, "decent_dp", topology="one-peer-exp", period=2),
    torch("decent-dp ring", "decent_dp", topology="ring", period=2),
    torch(TORCH_ALONE_2, "alone", local_size=2),
    torch(DECENT_AER, "decent_dp", topology="alternating-exp-ring", period=4, local_size=2),
)


class Measured(NamedTuple):
    """Measurements at one rate."""

    rate: str  # of the links
    throughput_Bps: float  # of one TCP connection, bytes per second
    step_s: dict[str, list[float]]  # row -> seconds per step, one per visit
    sent_bytes: dict[str, float]  # row -> bytes per step over the busiest link

    def time_s(self, row: str) -> float:
        """Return a row's median seconds per step; nan for a row that did not run."""
        return statistics.median(self.step_s.get(row) or [float("nan")])

    def once_s(self, num_bytes: float) -> float:
        """Return X, the seconds in which a link carries the parameters once."""
        return num_bytes / self.throughput_Bps


def measure(runner: Runner, rows: list[Row], rate: str, rounds: int, steps: Callable[[Row], int] = lambda row: 1) -> Measured:
    """Measure all rows at one rate: visit them in turn, `rounds` times, for at least `steps(row)` steps each."""
    runner.network.set_rate(rate)
    throughputs, step_s, sent_bytes = [], collections.defaultdict(list), collections.defaultdict(list)
    for k, (row, visit) in enumerate(interleaved(runner, rows, rounds, steps)):
        if k % len(runner.periods) == 0:
            throughputs.append(runner.throughput_Bps(ROWS[0]))
        step_s[row.name].append(visit.step_s)
        sent_bytes[row.name].append(visit.sent_bytes)
        print(f"{rate}: {row.name}: {script.ms(visit.step_s)} ms", flush=True)
    median_bytes = {name: statistics.median(values) for name, values in sent_bytes.items()}
    return Measured(rate, statistics.median(throughputs), dict(step_s), median_bytes)


def checks(measured: Measured, num_bytes: float) -> list[Check]:
    """Return the checks of overlap at one rate; nan (not met) for a row that did not run.

    With c the time of a step without communication and X that of the parameters on the link, an exchange that overlaps completely
    gives a step of max(c, X), a speed-up of (c + 2(n−1)/n·X) / max(c, X) over synchronous all-reduce. PyTorch's rows are divided by
    its own c.
    """
    time_s, rate = measured.time_s, measured.rate
    c, X = time_s(ALONE), measured.once_s(num_bytes)
    limit = max(c, X)
    ideal = (c + 2 * (HOSTS - 1) / HOSTS * X) / limit

    def relative(row: str, alone: str) -> float:
        return time_s(row) / time_s(alone)

    def against_decent(row: str) -> float:
        return relative(DECENT, TORCH_ALONE) / relative(row, ALONE)

    aer = relative(DECENT_AER, TORCH_ALONE_2) / relative(AER, ALONE_2)
    found = [
        Check(f"{ONE_PEER} ÷ max(c, X)", rate, time_s(ONE_PEER) / limit, 1.10, True),
        Check(f"speed-up over {SYNC} ÷ ideal", rate, relative(SYNC, ONE_PEER) / ideal, 0.9, False),
        Check(f"{DECENT} ÷ {ONE_PEER}, each ÷ own c", rate, against_decent(ONE_PEER), 1.0, False),
        Check(f"{DECENT_AER} ÷ {AER}, each ÷ own c", rate, aer, 1.25, False),
        Check("c ÷ PyTorch's c, two processes a core", rate, relative(ALONE, TORCH_ALONE), 1.2, True),
    ]
    if c < X:
        found.append(Check(f"speed-up over {STALE}", rate, relative(STALE, ONE_PEER), 1.3, False))
    if rate in ("50mbit", "100mbit"):
        for coded, bound in ((f"{ONE_PEER}, bfloat16", 1.8), (f"{ONE_PEER}, int8", 2.5)):
            found.append(Check(f"{DECENT} ÷ {coded}, each ÷ own c", rate, against_decent(coded), bound, False))
    return found


def tabulate(measured: list[Measured], rows: list[Row], refused: dict[str, str]) -> script.Table:
    """Return milliseconds per step, and their ratio to the step without communication, for every rate."""
    table = script.table("ms per step (÷ no communication)", *(at.rate for at in measured), "MB per host")
    for row in rows:
        if row.name in refused:
            table.add_row(row.name, *["cannot run"] * len(measured), "")
            continue
        alone = {(False, 1): ALONE, (False, 2): ALONE_2, (True, 1): TORCH_ALONE, (True, 2): TORCH_ALONE_2}[row.peer, row.local_size]
        cells = [f"{script.ms(at.time_s(row.name))} ({at.time_s(row.name) / at.time_s(alone):.2f})" for at in measured]
        table.add_row(row.name, *cells, f"{measured[-1].sent_bytes[row.name] / 1e6:.1f}")
    return table


def main() -> None:
    rows = script.choose(ROWS, FLAGS.row)
    with cluster.network(hosts=HOSTS, rate=cluster.UNLIMITED) as network, Runner(network, FLAGS.peers) as runner:
        runner.prepare_all(rows)
        measured = [measure(runner, rows, rate, FLAGS.rounds) for rate in FLAGS.rates]
    num_bytes = 4 * runner.num_parameters
    found = [check for at in measured for check in checks(at, num_bytes)]
    script.show(tabulate(measured, rows, runner.refused), script.tabulate(found))
    for at in measured:
        script.show(f"{at.rate}: {at.throughput_Bps * 8 / 1e6:.1f} Mbit/s one way, X = {script.ms(at.once_s(num_bytes))} ms")
    script.show(*runner.refusals)
    script.save(FLAGS.out, num_bytes=num_bytes, refused=runner.refused, measured=[at._asdict() for at in measured])


if __name__ == "__main__":
    script.define("json", "row", "peers", rows=ROWS)
    flags.DEFINE(cluster.Rates(), "rates", ["50mbit", "100mbit", "200mbit"], "Rates of every link, both ways.")
    script.selects("rates")
    flags.DEFINE_integer("rounds", 3, "Visits of each row at each rate.", lower_bound=1)
    script.run(main, ERRORS)
