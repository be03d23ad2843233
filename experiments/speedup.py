"""What overlap and few neighbours gain on slow links: one table, from one interleaved run, with PyTorch's peers in it.

    python -m experiments.speedup --rates=50mbit,100mbit,200mbit --peers=.venv-peers/bin/python --out=runs/speedup.json

Four hosts in a box (launch.cluster: root and iproute2), a transformer of 5.9M parameters, 8 sequences of 128 tokens per worker
and step, float32, one process a host and a core for two of them; "2 a host" rows have two processes a host. The peers, PyTorch's
DDP and decent-dp, need a Python with experiments/requirements-peers.txt; without it their rows say so.

Rows take turns; a figure is the median over the rounds of the mean time of a step. X is the time in which a link carries the
parameters once: P bytes over the throughput of one TCP connection, measured in the same run.
"""

import collections
from collections.abc import Callable
import json
import pathlib
import statistics
from typing import NamedTuple

from absl import flags
import rich.box
import rich.console
import rich.table

from experiments import checks as checks_lib
from experiments.bench.box.group import Failed
from experiments.bench.box.systems import WHOLE, Box, Row, decjax, interleaved, torch
from experiments.checks import Check
from launch import cluster, command

HOSTS = 4
ALONE, TORCH_ALONE = "no communication", "PyTorch, no communication"
ALONE_2, TORCH_ALONE_2 = f"{ALONE}, 2 a host", f"{TORCH_ALONE}, 2 a host"
SYNC, STALE, ONE_PEER, DECENT = "all-reduce", "all-reduce, one step stale", "one-peer exponential", "decent-dp one-peer-exp"
AER, DECENT_AER = "AER, 2 a host", "decent-dp AER, 2 a host"
ROWS = (
    decjax(ALONE, "method=local"),
    decjax(SYNC, "method=allreduce", WHOLE),
    decjax("all-reduce, buckets of 4 MB", "method=allreduce", 2**22),
    decjax(STALE, "method=allreduce,stale", WHOLE),
    decjax(ONE_PEER, "topology=one_peer_exponential"),
    decjax(f"{ONE_PEER}, bfloat16", "topology=one_peer_exponential,codec=bfloat16"),
    decjax(f"{ONE_PEER}, int8", "topology=one_peer_exponential,codec=int8"),
    decjax("ring", "topology=ring"),
    decjax(ALONE_2, "method=local", local_size=2),
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
    """All figures of one rate.

    Attributes:
        rate: of the links, as given.
        throughput_Bps: of one TCP connection, bytes per second.
        step_s: row -> seconds per step, one per visit.
        sent_bytes: row -> bytes per step over the busiest link.
    """

    rate: str
    throughput_Bps: float
    step_s: dict[str, list[float]]
    sent_bytes: dict[str, float]

    def time_s(self, row: str) -> float:
        """Median time of a step, seconds; nan for a row that did not run."""
        return statistics.median(self.step_s.get(row) or [float("nan")])

    def once_s(self, num_bytes: float) -> float:
        """X: seconds in which a link carries the parameters once."""
        return num_bytes / self.throughput_Bps


def measure(box: Box, rows: list[Row], rate: str, rounds: int, steps: Callable[[Row], int] = lambda row: 1) -> Measured:
    """Visits all rows in turn at one rate, for so many steps at least."""
    box.network.set_rate(rate)
    throughputs, step_s, sent_bytes = [], collections.defaultdict(list), collections.defaultdict(list)
    for k, (row, visit) in enumerate(interleaved(box, rows, rounds, steps)):
        if k % len(box.periods) == 0:
            throughputs.append(box.throughput_Bps(ROWS[0]))
        step_s[row.name].append(visit.step_s)
        sent_bytes[row.name].append(visit.sent_bytes)
        print(f"{rate}: {row.name}: {visit.step_s * 1e3:.0f} ms", flush=True)
    return Measured(
        rate, statistics.median(throughputs), dict(step_s), {name: statistics.median(values) for name, values in sent_bytes.items()}
    )


# -- What is asked of the figures -------------------------------------------------------------------------------------


def checks(measured: Measured, num_bytes: float) -> list[Check]:
    """What overlap should reach at one rate; nan (not met) where a row did not run.

    With c the step without communication and X the parameters over the link, the exchange hides if a step takes max(c, X), and
    gains (c + 2(n−1)/n·X) / max(c, X) over synchronous all-reduce. Peers are each taken relative to their own c.
    """
    time_s, rate = measured.time_s, measured.rate
    c, X = time_s(ALONE), measured.once_s(num_bytes)
    limit = max(c, X)
    ideal = (c + 2 * (HOSTS - 1) / HOSTS * X) / limit

    def relative(row, alone):
        return time_s(row) / time_s(alone)

    decent = relative(DECENT, TORCH_ALONE)
    found = [
        Check(f"{ONE_PEER} ÷ max(c, X)", rate, time_s(ONE_PEER) / limit, 1.10, True),
        Check(f"speed-up over {SYNC} ÷ ideal", rate, time_s(SYNC) / time_s(ONE_PEER) / ideal, 0.9, False),
        Check(f"{DECENT} ÷ {ONE_PEER}, each ÷ own c", rate, decent / relative(ONE_PEER, ALONE), 1.0, False),
        Check(
            f"{DECENT_AER} ÷ {AER}, each ÷ own c", rate, relative(DECENT_AER, TORCH_ALONE_2) / relative(AER, ALONE_2), 1.25, False
        ),
        Check("c ÷ PyTorch's c, two processes a core", rate, c / time_s(TORCH_ALONE), 1.2, True),
    ]
    if c < X:
        found.append(Check(f"speed-up over {STALE}", rate, time_s(STALE) / time_s(ONE_PEER), 1.3, False))
    if rate in ("50mbit", "100mbit"):
        found += [
            Check(
                f"{DECENT} ÷ {ONE_PEER}, {codec}, each ÷ own c",
                rate,
                decent / relative(f"{ONE_PEER}, {codec}", ALONE),
                bound,
                False,
            )
            for codec, bound in (("bfloat16", 1.8), ("int8", 2.5))
        ]
    return found


# -- The tables -------------------------------------------------------------------------------------------------------


def tabulate(measured: list[Measured], rows: list[Row], refused: dict[str, str]) -> rich.table.Table:
    """Milliseconds per step and the ratio to the step without communication, for every rate."""
    table = rich.table.Table(box=rich.box.MARKDOWN)
    table.add_column("ms per step (÷ no communication)")
    for at in measured:
        table.add_column(at.rate, justify="right")
    table.add_column("MB out of a host", justify="right")
    for row in rows:
        if row.name in refused:
            table.add_row(row.name, *["cannot run"] * len(measured), "")
            continue
        alone = {(False, 1): ALONE, (False, 2): ALONE_2, (True, 1): TORCH_ALONE, (True, 2): TORCH_ALONE_2}[row.peer, row.local_size]
        cells = [f"{at.time_s(row.name) * 1e3:.0f} ({at.time_s(row.name) / at.time_s(alone):.2f})" for at in measured]
        table.add_row(row.name, *cells, f"{measured[-1].sent_bytes[row.name] / 1e6:.1f}")
    return table


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    if unknown := set(chosen.row) - {row.name for row in ROWS}:
        command.fail(f"row={sorted(unknown)[0]!r} is unknown; the rows are: {'; '.join(row.name for row in ROWS)}")
    rows = [row for row in ROWS if not chosen.row or row.name in chosen.row]
    console = rich.console.Console(width=140, highlight=False)
    with cluster.network(hosts=HOSTS, rate=cluster.UNLIMITED) as network, Box(network, chosen.peers) as box:
        for row in rows:
            box.prepare(row)
            print(f"{row.name}: {box.refused.get(row.name) or 'ready'}", flush=True)
        measured = [measure(box, rows, rate, chosen.rounds) for rate in chosen.rates]
    num_bytes = 4 * box.num_parameters
    console.print(tabulate(measured, rows, box.refused))
    console.print(checks_lib.tabulate([check for at in measured for check in checks(at, num_bytes)]))
    for at in measured:
        console.print(f"{at.rate}: {at.throughput_Bps * 8 / 1e6:.1f} Mbit/s one way, X = {at.once_s(num_bytes) * 1e3:.0f} ms")
    for name, why in box.refused.items():
        console.print(f"{name} cannot run: {why}")
    if chosen.out:
        pathlib.Path(chosen.out).write_text(
            json.dumps({"num_bytes": num_bytes, "refused": box.refused, "measured": [at._asdict() for at in measured]}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    # Defined here, because tests import several experiments.
    flags.DEFINE_list("rates", ["50mbit", "100mbit", "200mbit"], "Of every link, both ways.")
    flags.DEFINE_integer("rounds", 3, "Visits of each row at each rate.", lower_bound=1)
    flags.DEFINE_string("peers", None, "A Python with experiments/requirements-peers.txt, for the rows of PyTorch.")
    flags.DEFINE_multi_string("row", [], "A row to measure, may be repeated; none: all.")
    flags.DEFINE_string("out", None, "JSON of everything measured.")
    command.run(main, errors=(cluster.ClusterError, Failed, OSError))
