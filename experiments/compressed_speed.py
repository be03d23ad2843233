"""What compression gains on slow links: one table, from one interleaved run, beside the cost model and PyTorch's PowerSGD.

    python -m experiments.compressed_speed --peers=.venv-peers/bin/python --out=runs/compressed_speed.json

Four hosts in a box (launch.cluster: root and iproute2), the transformer of experiments.speedup with 5.9M parameters, float32, one
process a host and a core for two of them. First launch.calibrate measures a worker's step, the links and what each compressed
method computes, without any message; from that the cost model predicts every row of decjax. Then the rows take turns; a figure
is the median over the rounds of the mean time of a step.

With c the step without communication and X the time in which a link carries the parameters, all-reduce takes c + 1.5 X, so nothing
is 8 times as fast where c > 1.5/7 X; and what compressing costs, some 60 ms, is less than a tenth of c only if c is long enough. At
50 Mbit/s on two cores both leave room for five sequences a worker, the default; four miss the one, eight, as experiments.speedup
has, the other.
"""

import json
import math
import pathlib
from typing import Any

from absl import flags
import rich.box
import rich.console
import rich.table

from decjax import costmodel, topology
from experiments import box_runtime, speedup
from experiments import checks as checks_lib
from experiments.bench.box import systems
from experiments.bench.box.group import Failed
from experiments.checks import Check
from experiments.speedup import ALONE, HOSTS, ONE_PEER, SYNC, TORCH_ALONE, Measured
from launch import cluster, command

STEPS = 6  # of a visit at least; less of rows that take seconds
GOSSIP, REDUCE = "gossip", "all-reduce"
DDP, HOOK = "DDP", "DDP, PowerSGD rank 4"
EXACT = {ALONE: "method=local", SYNC: "method=allreduce", ONE_PEER: "topology=one_peer_exponential"}
# Family -> row -> shorthand of configs/lm.py. PowerGossip needs pairs, which of four workers base_k makes, as a hypercube does.
COMPRESSED = {
    GOSSIP: {
        "int8": "codec=int8",
        "int4": "codec=int4",
        "int4, CHOCO": "codec=int4,mixer=choco",
        "sign, CHOCO": "codec=scaled_sign,mixer=choco",
        "PowerGossip, rank 1": "topology=base_k,mixer=power_gossip,rank=1",
        "PowerGossip, rank 2": "topology=base_k,mixer=power_gossip,rank=2",
    },
    REDUCE: {
        "PowerSGD, rank 4": "method=allreduce,reducer=powersgd,rank=4",
        "PowerSGD, rank 1": "method=allreduce,reducer=powersgd,rank=1",
        "DeMo": "method=allreduce,reducer=demo",
        "block top-k 1 %": "method=allreduce,reducer=codec,codec=block_topk",
        "1-bit Adam": "method=allreduce,reducer=onebit_adam",
    },
}
SHORTHANDS = {f"{family}, {name}": text for family, rows in COMPRESSED.items() for name, text in rows.items()}


def rows(batch_size: int) -> list[systems.Row]:
    """All rows, each system's behind one another."""
    ours = [
        systems.decjax(name, text, systems.WHOLE if name == SYNC else systems.BUCKET, batch_size=batch_size)
        for name, text in EXACT.items()
    ]
    # 1-bit Adam averages plainly at first: its state and its messages are then another method's.
    late: dict[str, Any] = {"reducer.start": 1}
    ours += [
        systems.decjax(name, text, batch_size=batch_size, **(late if "onebit" in text else {})) for name, text in SHORTHANDS.items()
    ]
    return ours + [
        systems.torch(TORCH_ALONE, "alone", batch_size=batch_size),
        systems.torch(DDP, "ddp", batch_size=batch_size),
        systems.torch(f"{HOOK}, one bucket", "power_sgd", batch_size=batch_size, rank=4, bucket_cap_mb=1000),
        systems.torch(f"{HOOK}, default buckets", "power_sgd", batch_size=batch_size, apart=True, rank=4),
    ]


def predict(profile: costmodel.Cluster, workload: costmodel.Workload) -> dict[str, float]:
    """Seconds per step of every row of decjax, from what was measured beforehand."""
    methods = {
        ALONE: costmodel.no_communication(),
        SYNC: costmodel.all_reduce(HOSTS),
        ONE_PEER: costmodel.gossip(topology.make("one_peer_exponential", HOSTS)),
    }
    named = {text: name for name, text in SHORTHANDS.items()}
    methods |= {named[form.name]: costmodel.compressed(form) for form in workload.compressed}
    return {name: costmodel.predict(profile, workload, method).mean_s for name, method in methods.items()}


def checks(measured: Measured, predicted_s: dict[str, float]) -> list[Check]:
    """What compression should reach, by the fastest row of each family; nan (not met) where no row ran."""
    found = []
    for family, names in COMPRESSED.items():
        best = min(
            (f"{family}, {name}" for name in names), key=lambda row: (math.isnan(measured.time_s(row)), measured.time_s(row))
        )
        step_s = measured.time_s(best)
        found += [
            Check(f"{best} ÷ {ALONE}", measured.rate, step_s / measured.time_s(ALONE), 1.10, True),
            Check(f"speed-up of {best} over {SYNC}", measured.rate, measured.time_s(SYNC) / step_s, 8.0, False),
        ]
    errors = [abs(predicted / measured.time_s(row) - 1) for row, predicted in predicted_s.items()]
    return [*found, Check("the cost model's worst error", measured.rate, max(errors, default=math.nan), 0.10, True)]


def tabulate(measured: Measured, predicted_s: dict[str, float], refused: dict[str, str]) -> rich.table.Table:
    """All rows: time, its ratios, bytes, and what the model said."""
    table = rich.table.Table(box=rich.box.MARKDOWN)
    for column in ("", "ms per step", "÷ no communication", f"speed-up over {SYNC}", "MB out of a host", "predicted", "error"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows(1):
        step_s = measured.time_s(row.name)
        if row.name in refused or math.isnan(step_s):
            table.add_row(row.name, "cannot run" if row.name in refused else "", "", "", "", "", "")
            continue
        alone, sync = (TORCH_ALONE, DDP) if row.peer else (ALONE, SYNC)
        told = predicted_s.get(row.name)
        table.add_row(
            row.name,
            f"{step_s * 1e3:.0f}",
            f"{step_s / measured.time_s(alone):.2f}",
            f"{measured.time_s(sync) / step_s:.2f}",
            f"{measured.sent_bytes[row.name] / 1e6:.2f}",
            *((f"{told * 1e3:.0f}", f"{100 * (told / step_s - 1):+.1f} %") if told else ("", "")),
        )
    return table


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    known = {row.name: row for row in rows(chosen.batch_size)}
    if unknown := set(chosen.row) - set(known):
        command.fail(f"row={sorted(unknown)[0]!r} is unknown; the rows are: {'; '.join(known)}")
    wanted = [row for row in known.values() if not chosen.row or row.name in (ALONE, SYNC, *chosen.row)]
    with cluster.network(hosts=HOSTS, rate=chosen.rate) as network, systems.Box(network, chosen.peers) as box:
        texts = [SHORTHANDS[row.name] for row in wanted if row.name in SHORTHANDS]
        profile, workload = box_runtime.calibrate(network, chosen.rate, chosen.seconds, chosen.batch_size, texts)
        for row in wanted:
            box.prepare(row)
            print(f"{row.name}: {box.refused.get(row.name) or 'ready'}", flush=True)
        measured = speedup.measure(
            box, wanted, chosen.rate, chosen.rounds, steps=lambda row: 1 if row.name in (SYNC, ONE_PEER, DDP) else STEPS
        )
    predicted_s = {name: step_s for name, step_s in predict(profile, workload).items() if name in measured.step_s}
    console, num_bytes = rich.console.Console(width=140, highlight=False), 4 * box.num_parameters
    console.print(tabulate(measured, predicted_s, box.refused))
    console.print(checks_lib.tabulate(checks(measured, predicted_s)))
    console.print(f"{chosen.batch_size} sequences a worker; X = {measured.once_s(num_bytes) * 1e3:.0f} ms")
    for name, why in box.refused.items():
        console.print(f"{name} cannot run: {why}", markup=False)
    if chosen.out:
        pathlib.Path(chosen.out).write_text(
            json.dumps(
                {"num_bytes": num_bytes, "refused": box.refused, "predicted_s": predicted_s, "measured": measured._asdict()},
                indent=2,
            )
            + "\n"
        )


if __name__ == "__main__":
    # Defined here, because tests import several experiments.
    flags.DEFINE_string("rate", "50mbit", "Of every link, both ways.")
    flags.DEFINE_integer("batch_size", 5, "Sequences per worker and step.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Visits of each row.", lower_bound=1)
    flags.DEFINE_float("seconds", 90.0, "About how long to calibrate.", lower_bound=1.0)
    flags.DEFINE_string("peers", None, "A Python with experiments/requirements-peers.txt, for the rows of PyTorch.")
    flags.DEFINE_multi_string("row", [], "A row to measure beside the first two, may be repeated; none: all.")
    flags.DEFINE_string("out", None, "JSON of everything measured.")
    command.run(main, errors=(cluster.ClusterError, Failed, OSError))
