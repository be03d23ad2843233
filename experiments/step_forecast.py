"""How well the cost model predicts the time of a step, for rows of the race that it knows.

    python -m experiments.step_forecast --task=translation --out=experiments/results/race

Four emulated hosts (launch.cluster: root and iproute2), links of the task's rate. In each round launch.calibrate measures them, then the
rows take turns for a few steps. The table has the seconds of a step, and the prediction from that round's calibration alone. The
results are added to TASK_forecast.json in `--out`; rounds that it has already are not repeated.
"""

from typing import Any

from absl import flags

from decjax import costmodel, files
from experiments import cluster_runtime, methods, race_rows, race_steps, script
from experiments.bench.cluster.systems import ERRORS, Runner, use_one_thread
from experiments.methods import HOSTS
from launch import cluster

FLAGS = flags.FLAGS

EXACT = {race_rows.FP32: methods.SYNC, "all-reduce, one step stale": methods.STALE, "gossip fp32": methods.ONE_PEER}
CODED = ("all-reduce int8", "PowerSGD, rank 4", "gossip bf16", "gossip int8")  # whose codecs are calibrated


def forecast(network: cluster.Network, task: race_rows.Task, seconds: float) -> dict[str, float]:
    """Return the seconds per step that the cost model predicts from a calibration, by row."""
    coded = [race_rows.ROWS[name].shorthand for name in CODED]
    measured, workload = cluster_runtime.calibrate(
        network, task.rate, seconds, task.batch_size // HOSTS, coded, model={}, config=task.config, fields=task.fields
    )
    known = methods.modeled(HOSTS)
    modeled = {name: known[method] for name, method in EXACT.items()}
    modeled |= {name: costmodel.compressed(form) for name, form in zip(CODED, workload.compressed, strict=True)}
    return {name: costmodel.predict(measured, workload, method).mean_s for name, method in modeled.items()}


def tabulate(rounds: list[dict[str, dict[str, float]]]) -> script.Table:
    """Return every row's measured and predicted milliseconds of a step, round by round."""
    table = script.table("", "ms per step", "predicted", "error")
    for name in rounds[0]["measured_s"]:
        measured_s, predicted_s = ([each[kind][name] for each in rounds] for kind in ("measured_s", "predicted_s"))
        errors = map(script.difference, predicted_s, measured_s)
        table.add_row(name, *(", ".join(cells) for cells in (map(script.ms, measured_s), map(script.ms, predicted_s), errors)))
    return table


def main() -> None:
    use_one_thread()
    task = race_rows.TASKS[FLAGS.task]
    path = script.folder() / f"{FLAGS.task}_forecast.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, Any]] = files.read_json(path)["rounds"] if path.exists() else []
    if len(rounds) < FLAGS.rounds:
        with cluster.network(hosts=HOSTS, rate=task.rate) as network, Runner(network) as runner:
            rows = race_steps.rows(task, (*EXACT, *CODED))[1:]  # The first sends nothing.
            runner.prepare_all(rows, needed=True)
            while len(rounds) < FLAGS.rounds:
                predicted_s = forecast(network, task, FLAGS.seconds)
                measured = race_steps.measure(runner, rows, rounds=1)
                measured_s = {name: numbers["step_s"][0] for name, numbers in measured.items()}
                rounds.append({"measured_s": measured_s, "predicted_s": predicted_s})
                script.save(str(path), rounds=rounds)
    script.report(f"forecast_{FLAGS.task}", tabulate(rounds))


if __name__ == "__main__":
    script.define("out", "pages")
    flags.DEFINE_enum("task", "translation", list(race_rows.TASKS), "Task whose steps are predicted.")
    flags.DEFINE_integer("rounds", 3, "Calibrations, each followed by all rows.", lower_bound=1)
    flags.DEFINE_float("seconds", 60.0, "Approximate duration of a calibration.", lower_bound=1.0)
    script.run(main, ERRORS)
