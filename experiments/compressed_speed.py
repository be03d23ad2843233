"""What compression gains on slow links: one table, from one interleaved run, with the cost model and PyTorch's PowerSGD.

    python -m experiments.compressed_speed --peers=.venv-peers/bin/python --out=runs/compressed_speed.json

Four emulated hosts (launch.cluster: root and iproute2), the transformer of experiments.speedup with 5.9M parameters, float32, one
process a host and a core for two of them. First launch.calibrate measures a worker's step, the links and what each compressed
method computes, without any message; from that the cost model predicts every row of decjax. Then the rows take turns; a figure
is the median over the rounds of the mean time of a step.

With c the step without communication and X the time in which a link carries the parameters, all-reduce takes c + 1.5 X, so a speed-up
of 8 needs c ≤ 1.5/7 X. Compression costs about 60 ms, which is less than a tenth of c only if c is long enough. At 50 Mbit/s on two
cores five sequences a worker, the default, allow both; four are too few for the latter, and eight, as in experiments.speedup, too many
for the former.
"""

import math
from typing import Any

from absl import flags

from decjax import costmodel
from experiments import cluster_runtime, methods, script, speedup
from experiments.bench.cluster.systems import BUCKET, ERRORS, WHOLE, Row, Runner, decjax, torch
from experiments.methods import ALONE, HOSTS, ONE_PEER, SYNC
from experiments.script import Check
from experiments.speedup import TORCH_ALONE, Measured
from launch import cluster

FLAGS = flags.FLAGS

STEPS = 6  # minimum of a visit, except for slow rows
GOSSIP, REDUCE = "gossip", "all-reduce"
DDP, HOOK = "DDP", "DDP, PowerSGD rank 4"
EXACT = {name: methods.SHORTHANDS[name] for name in (ALONE, SYNC, ONE_PEER)}
# Family -> row -> shorthand of configs/lm.py. PowerGossip needs pairs, as in base_k of four workers or in a hypercube.
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
        "1-bit Adam": "method=onebit_adam",
    },
}
SHORTHANDS = {f"{family}, {name}": text for family, rows in COMPRESSED.items() for name, text in rows.items()}


def rows(batch_size: int) -> list[Row]:
    """Return all rows, first those of decjax, then those of PyTorch."""
    made = [decjax(name, text, WHOLE if name == SYNC else BUCKET, batch_size=batch_size) for name, text in EXACT.items()]
    for name, text in SHORTHANDS.items():
        # 1-bit Adam averages gradients exactly before `reducer.start`; the compressed steps after it are timed.
        late: dict[str, Any] = {"reducer.start": 1} if "onebit" in text else {}
        made.append(decjax(name, text, batch_size=batch_size, **late))
    return [
        *made,
        torch(TORCH_ALONE, "alone", batch_size=batch_size),
        torch(DDP, "ddp", batch_size=batch_size),
        torch(f"{HOOK}, one bucket", "power_sgd", batch_size=batch_size, rank=4, bucket_cap_mb=1000),
        torch(f"{HOOK}, default buckets", "power_sgd", batch_size=batch_size, apart=True, rank=4),
    ]


def predict(profile: costmodel.Cluster, workload: costmodel.Workload) -> dict[str, float]:
    """Return the predicted seconds per step of every row of decjax, from the measured profile."""
    modeled = {name: method for name, method in methods.modeled().items() if name in EXACT}
    named = {text: name for name, text in SHORTHANDS.items()}
    modeled |= {named[form.name]: costmodel.compressed(form) for form in workload.compressed}
    return {name: costmodel.predict(profile, workload, method).mean_s for name, method in modeled.items()}


def checks(measured: Measured, predicted_s: dict[str, float]) -> list[Check]:
    """Return the checks of compression, for the fastest row of each family; nan (not met) if no row ran."""
    time_s, rate, found = measured.time_s, measured.rate, []
    for family, names in COMPRESSED.items():
        best = min((f"{family}, {name}" for name in names), key=lambda row: (math.isnan(time_s(row)), time_s(row)))
        found += [
            Check(f"{best} ÷ {ALONE}", rate, time_s(best) / time_s(ALONE), 1.10, True),
            Check(f"speed-up of {best} over {SYNC}", rate, time_s(SYNC) / time_s(best), 8.0, False),
        ]
    errors = [abs(predicted / time_s(row) - 1) for row, predicted in predicted_s.items()]
    return [*found, Check("the cost model's worst error", rate, max(errors, default=math.nan), 0.10, True)]


def tabulate(measured: Measured, predicted_s: dict[str, float], refused: dict[str, str]) -> script.Table:
    """Return time, ratios, bytes and predicted time of all rows."""
    columns = ("", "ms per step", "÷ no communication", f"speed-up over {SYNC}", "MB per host", "predicted", "error")
    table, time_s = script.table(*columns), measured.time_s
    for row in rows(1):
        step_s, forecast_s = time_s(row.name), predicted_s.get(row.name)
        if row.name in refused or math.isnan(step_s):
            table.add_row(row.name, "cannot run" if row.name in refused else "", *[""] * 5)
            continue
        alone, sync = (TORCH_ALONE, DDP) if row.peer else (ALONE, SYNC)
        table.add_row(
            row.name,
            script.ms(step_s),
            f"{step_s / time_s(alone):.2f}",
            f"{time_s(sync) / step_s:.2f}",
            f"{measured.sent_bytes[row.name] / 1e6:.2f}",
            *((script.ms(forecast_s), script.difference(forecast_s, step_s)) if forecast_s else ("", "")),
        )
    return table


def main() -> None:
    wanted = script.choose(rows(FLAGS.batch_size), FLAGS.row, ALONE, SYNC)
    with cluster.network(hosts=HOSTS, rate=FLAGS.rate) as network, Runner(network, FLAGS.peers) as runner:
        texts = [SHORTHANDS[row.name] for row in wanted if row.name in SHORTHANDS]
        profile, workload = cluster_runtime.calibrate(network, FLAGS.rate, FLAGS.seconds, FLAGS.batch_size, texts)
        runner.prepare_all(wanted)
        slow = (SYNC, ONE_PEER, DDP)
        measured = speedup.measure(runner, wanted, FLAGS.rate, FLAGS.rounds, lambda row: 1 if row.name in slow else STEPS)
    predicted_s = {name: step_s for name, step_s in predict(profile, workload).items() if name in measured.step_s}
    num_bytes = 4 * runner.num_parameters
    script.show(tabulate(measured, predicted_s, runner.refused), script.tabulate(checks(measured, predicted_s)))
    script.show(f"{FLAGS.batch_size} sequences a worker; X = {script.ms(measured.once_s(num_bytes))} ms")
    script.show(*runner.refusals)
    script.save(FLAGS.out, num_bytes=num_bytes, refused=runner.refused, predicted_s=predicted_s, measured=measured._asdict())


if __name__ == "__main__":
    script.define("json", "row", "peers")
    flags.DEFINE_string("rate", "50mbit", "Rate of every link, both ways.")
    flags.DEFINE_integer("batch_size", 5, "Sequences per worker and step.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Visits of each row.", lower_bound=1)
    flags.DEFINE_float("seconds", 90.0, "Approximate duration of the calibration.", lower_bound=1.0)
    script.run(main, ERRORS)
