"""Rows of the race trained in full by real processes on the emulated cluster: is time to target the product of steps and step time?

    python -m experiments.race_check --task=lm --results=experiments/results/race/lm.jsonl --out=experiments/results/race

Four emulated hosts (launch.cluster: root and iproute2) with links of the task's rate. Each row trains with its tuned setting and steps,
as recorded in `--results`, and one seed. The seconds of its steps are added to TASK_steps.json in `--out` for rows that
`experiments.race_steps` leaves out, and the losses to TASK_check.json. Rows that the latter has already are not repeated.
"""

from typing import Any

from absl import flags

from decjax import files
from experiments import race, race_rows, race_steps, script, trials
from experiments.bench.cluster import systems
from experiments.bench.cluster.group import done
from experiments.methods import HOSTS
from experiments.race_rows import FP32, ROWS, steps_to
from experiments.results_log import ResultsLog
from launch import cluster, command

FLAGS = flags.FLAGS

CHECKED = (FP32, "all-reduce int8", "gossip int8", "MuLoCo int4, H = 16", *race_steps.LEFT_OUT)
SEED = 0


def read(run: trials.Trial) -> dict[str, Any]:
    """Return the losses of a run and the mean seconds of its steps, without compilation, evaluation and the first logged interval."""
    config, rows = files.read_json(run.workdir / "config.json"), run.rows("train")
    items = config["batch_size"] * (config["model"].get("context") or config["data"]["length"])
    last = [0, *(row["step"] for row in rows)]
    seconds = [(row["step"] - step) * items / row["tokens_per_s"] for step, row in zip(last, rows)]
    return race.read(run) | {"step_s": sum(seconds[1:]) / (last[-1] - last[1])}


def tabulate(
    checked: dict[str, dict[str, Any]], results: dict[str, race_rows.Result], step_s: dict[str, float], target: float
) -> script.Table:
    """Return each row's seconds to the target, by the product and in full."""
    columns = ("ms per step", "in full", "steps", "in full", "s to target", "in full", "difference")
    table = script.table("", *columns, title=f"target {target:.3f}, seed {SEED}")
    for name, numbers in checked.items():
        steps = [steps_to(losses, target) for losses in (results[name].ended[SEED].losses, numbers["losses"])]
        times_s = [step_s[name], numbers["step_s"]]
        product_s, full_s = (count * time_s for count, time_s in zip(steps, times_s))
        cells = (*map(script.ms, times_s), *(f"{count:.0f}" for count in steps), f"{product_s:.0f}", f"{full_s:.0f}")
        table.add_row(name, *cells, script.difference(product_s, full_s))
    return table


def main() -> None:
    systems.use_one_thread()
    if not FLAGS.results:
        command.fail("--results is missing; give the results log of experiments.race")
    script.check_names("row", FLAGS.row, ROWS)
    task, out = race_rows.TASKS[FLAGS.task], script.folder()
    path, times = out / f"{FLAGS.task}_check.json", out / f"{FLAGS.task}_steps.json"
    log = ResultsLog.of(out, FLAGS.results).recorded()
    runs = race.Race(task, out=out / "check", log=log, data=FLAGS.multi30k or "")
    names = FLAGS.row or CHECKED
    results = runs.results(names)
    checked: dict[str, Any] = race.measured(str(path), "experiments.race_check") if path.exists() else {}
    saved = race.measured(str(times), "experiments.race_steps")
    with cluster.network(hosts=HOSTS, rate=task.rate) as network:
        for name in names:
            if name not in checked:
                run = runs.trial(name, results[name].setting, SEED, results[name].steps, simulate=False)
                done(name, network.run("launch.train", run.arguments))
                checked[name] = read(run)
                script.save(str(path), **checked)
    saved[task.rate] |= {name: {"step_s": [checked[name]["step_s"]]} for name in race_steps.LEFT_OUT if name in checked}
    script.save(str(times), **saved)
    step_s = race.StepTimes.read(str(times)).at(task.rate)
    script.report(f"race_{FLAGS.task}_check", tabulate(checked, results, step_s, runs.targets(results[FP32])[0]))


if __name__ == "__main__":
    script.define("out", "row", "results", "pages")
    flags.DEFINE_enum("task", "lm", list(race_rows.TASKS), "Task to learn.")
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files, for --task=translation.")
    script.run(main, (*systems.ERRORS, trials.Broken))
