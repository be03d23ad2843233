"""Seconds per step of the race's rows on the emulated cluster, at several bandwidths, in one interleaved run.

    python -m experiments.race_steps --task=lm --out=experiments/results/race --peers=.venv-peers/bin/python

Four emulated hosts (launch.cluster: root and iproute2), one process a host. At each rate the rows take turns; a visit is a few steps in
whole periods of the row's schedule. With `--jitter` the lead rows are also measured at the task's own rate with a pause before each
gradient: as long as a step without communication, and an exponential variable whose mean is 0.3 of it, drawn for each worker and
step. The results are added to TASK_steps.json in `--out`; rates that it has already are not measured again.

`--row` chooses rows. 0/1 Adam is left out: it sends ever more rarely, so that a few of its steps are not typical.
"""

import collections
from collections.abc import Iterable
import statistics
from typing import Any

from absl import flags

from decjax import files
from experiments import race_rows, script
from experiments.bench.cluster.systems import BUCKET, ERRORS, WHOLE, Row, Runner, decjax, interleaved, sizes, torch, use_one_thread
from experiments.methods import ALONE, HOSTS, SHORTHANDS
from launch import cluster

FLAGS = flags.FLAGS

JITTER_SHARE = 0.3  # mean of the exponential pause, relative to a step without communication
JITTERED = (race_rows.FP32, "all-reduce int8", "gossip int8", "DiLoCo int4, H = 16", "MuLoCo int4, H = 16")
STEPS, SLOW_STEPS = 16, 4  # of a visit, at least; of rows that send uncompressed parameters or gradients in each step
LEFT_OUT = ("0/1 Adam",)
TIMED = [name for name in race_rows.ROWS if name not in LEFT_OUT]
SWEEP = ("10mbit", "25mbit", "50mbit", "100mbit", "250mbit", "1000mbit")
TORCH_ALONE = "PyTorch, no communication"
PEER_OPTIONS: dict[str, dict[str, Any]] = {
    "power_sgd": dict(rank=4, bucket_cap_mb=1000),
    "decent_dp": dict(topology="one-peer-exp", period=2),
    "diloco": dict(every=16, period=16),
}


def rows(task: race_rows.Task, names: Iterable[str], pauses: bool = False) -> list[Row]:
    """Return rows of a task, first that without communication; with `pauses` they can pause."""
    shorthands = {ALONE: SHORTHANDS[ALONE], **{name: race_rows.ROWS[name].shorthand for name in names}}
    own: dict[str, Any] = {"file": task.config, "model": {}, "batch_size": task.batch_size // HOSTS, **task.fields}
    return [
        decjax(f"{name}, pauses" if pauses else name, text, WHOLE if "allreduce" in text else BUCKET, pauses=pauses, **own)
        for name, text in shorthands.items()
    ]


def peers(task: race_rows.Task) -> list[Row]:
    """Return the rows of PyTorch, for the language model."""
    own: dict[str, Any] = {"model": sizes(task.config), "batch_size": task.batch_size // HOSTS}
    return [
        torch(TORCH_ALONE, "alone", **own),
        *(torch(name, row.shorthand, **own, **PEER_OPTIONS.get(row.shorthand, {})) for name, row in race_rows.PEERS.items()),
    ]


def measure(runner: Runner, chosen: list[Row], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the seconds per step of each visit, and the bytes that a host sends per step, of every row."""
    step_s, sent = collections.defaultdict(list), collections.defaultdict(list)
    slow = lambda row: any(row.name.endswith(text) for text in ("fp32", "fp32, Muon", "stale"))
    for row, visit in interleaved(runner, chosen, rounds, lambda row: SLOW_STEPS if slow(row) else STEPS):
        step_s[row.name].append(visit.step_s)
        sent[row.name].append(visit.sent_bytes)
    return {name: {"step_s": times, "sent_bytes": statistics.median(sent[name])} for name, times in step_s.items()}


def main() -> None:
    use_one_thread()
    script.check_names("row", FLAGS.row, TIMED)
    task = race_rows.TASKS[FLAGS.task]
    path = script.folder() / f"{FLAGS.task}_steps.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    saved: dict[str, Any] = files.read_json(path) if path.exists() else {}
    missing = [rate for rate in FLAGS.rates or [task.rate, *SWEEP] if rate not in saved]
    jitter = FLAGS.jitter and race_rows.JITTER not in saved
    if missing or jitter:
        with cluster.network(hosts=HOSTS, rate=cluster.UNLIMITED) as network, Runner(network, FLAGS.peers) as runner:
            chosen = rows(task, FLAGS.row or TIMED) + (peers(task) if FLAGS.peers and FLAGS.task == "lm" else [])
            runner.prepare_all(chosen if missing else [])
            for rate in missing:
                network.set_rate(rate)
                saved[rate] = measure(runner, chosen, FLAGS.rounds)
                script.save(str(path), **saved)
                print(f"{rate}: measured", flush=True)
            if jitter:
                pausing = rows(task, JITTERED, pauses=True)
                runner.prepare_all(pausing)
                network.set_rate(task.rate)
                alone_s = statistics.median(saved[task.rate][ALONE]["step_s"])
                saved[race_rows.JITTER] = jittered(runner, pausing, alone_s, FLAGS.rounds)
                script.save(str(path), **saved)
            script.show(*runner.refusals)
    for rate, measured in saved.items():
        script.show(tabulate(rate, measured))
    if task.rate in saved:
        script.fill(f"race_{FLAGS.task}_steps", tabulate("", saved[task.rate]))


def jittered(runner: Runner, pausing: list[Row], pause_s: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Return what `measure` returns, of steps with pauses, without and with jitter."""
    found: dict[str, dict[str, Any]] = {}
    for kind, mean_s in (("fixed", 0.0), (race_rows.JITTER, JITTER_SHARE * pause_s)):
        for seed in range(rounds):
            for row in pausing:
                visit = runner.visit(row, 2 * STEPS, pause_s=(pause_s, mean_s), seed=seed)
                found.setdefault(f"{row.name.removesuffix(', pauses')}, {kind}", {"step_s": []})["step_s"].append(visit.step_s)
    return found


def tabulate(rate: str, measured: dict[str, dict[str, Any]]) -> script.Table:
    """Return the median milliseconds per step of all rows at a rate, and their ratio to fp32 all-reduce."""
    first = statistics.median(
        next((numbers["step_s"] for name, numbers in measured.items() if name.startswith(race_rows.FP32)), [0.0])
    )
    table = script.table("", "ms per step", "÷ all-reduce fp32", "kB out of a host", title=rate)
    for name, numbers in measured.items():
        step_s = statistics.median(numbers["step_s"])
        sent = numbers.get("sent_bytes")
        table.add_row(name, script.ms(step_s), f"{step_s / first:.2f}" if first else "", f"{sent / 1e3:.1f}" if sent else "")
    return table


if __name__ == "__main__":
    script.define("out", "row", "peers", "pages")
    flags.DEFINE_enum("task", "lm", list(race_rows.TASKS), "Task whose steps are timed.")
    flags.DEFINE(cluster.Rates(), "rates", None, "Rates of every link, both ways; none: the task's own and those of the sweep.")
    flags.DEFINE_integer("rounds", 5, "Visits of each row at each rate.", lower_bound=1)
    flags.DEFINE_bool("jitter", True, "Whether to measure lead rows with jitter, too.")
    script.run(main, ERRORS)
