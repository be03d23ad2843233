"""How well the cost model predicts the time of a step, for the jobs and methods of experiments.time_to_loss.

    python -m experiments.step_forecast --out=runs/step_forecast
    python -m experiments.step_forecast --out=runs/step_forecast_translation --multi30k=data/multi30k

Four emulated hosts (launch.cluster: root and iproute2), links of 100 Mbit/s. In each round launch.calibrate measures them; then every
method trains for a few steps. The first half of them is not counted. The table has the seconds of a step and the prediction from that
round's calibration alone. Finished runs in `--out` are not repeated.
"""

import os
import pathlib

from absl import flags

from experiments import curves, script, time_to_loss, trials
from experiments.bench.cluster import systems, twins
from experiments.bench.cluster.group import done
from experiments.methods import HOSTS
from experiments.time_to_loss import GRID, SMOKE_TUNING, TEXT, TRAINED, TRANSLATION, Setup, Tuned
from launch import cluster

FLAGS = flags.FLAGS


def short(out: pathlib.Path) -> Setup:
    """Return the job of `time_to_loss` with as many steps as are timed."""
    if FLAGS.multi30k:
        job, data = TRANSLATION, pathlib.Path(os.path.expanduser(FLAGS.multi30k))
    else:
        job, data = TEXT, twins.write_text(out / "text.txt", TEXT.model["context"])
    job = job._replace(model=job.small if FLAGS.smoke else job.model, steps=FLAGS.steps, every=FLAGS.steps // 2, score="")
    return Setup(job, data, trials.Pool(), SMOKE_TUNING[0] if FLAGS.smoke else tuple(TRAINED), GRID, (1.0,))


def train(network: cluster.Network, method: str, setup: Setup, workdir: pathlib.Path, seed: int) -> float:
    """Return the seconds of a step in the second half of a run, which is trained unless that is done."""
    run = time_to_loss.trial(method, setup, Tuned(GRID[0], setup.job.steps), workdir, seed, simulate=False)
    if not run.finished:
        run = run._replace(fields=(*run.fields, ("eval.num_windows", 1)))
        done(method, network.run("launch.train", run.arguments))
    half, *_, end = curves.read(workdir)
    return (end.time_s - half.time_s) / (end.step - half.step)


def tabulate(measured_s: dict[str, list[float]], predicted_s: dict[str, list[float]]) -> script.Table:
    """Return every method's measured and predicted milliseconds of a step, round by round."""
    table = script.table("", "ms per step", "predicted", "error")
    for name, steps_s in measured_s.items():
        errors = map(script.difference, predicted_s[name], steps_s)
        table.add_row(name, *(", ".join(cells) for cells in (map(script.ms, steps_s), map(script.ms, predicted_s[name]), errors)))
    return table


def main() -> None:
    systems.use_one_thread()
    out = script.folder()
    if FLAGS.multi30k is not None:
        script.check_path("multi30k", FLAGS.multi30k)
    script.check_tables(f"steps_{TRANSLATION.name if FLAGS.multi30k else TEXT.name}")
    out.mkdir(parents=True, exist_ok=True)
    setup = short(out)
    data = f"checksum {trials.data_checksum(str(setup.path), setup.job.config)}"
    script.claim(out, rate=FLAGS.rate, data=data, steps=FLAGS.steps, smoke=FLAGS.smoke)
    measured_s, predicted_s = ({method: [] for method in setup.methods} for _ in range(2))
    with cluster.network(hosts=HOSTS, rate=FLAGS.rate) as network:
        for seed in range(FLAGS.rounds):
            time_to_loss.calibrate(network, time_to_loss.profile(out, seed), setup, FLAGS.seconds)
            forecast_s = time_to_loss.predict(time_to_loss.profile(out, seed))
            for method in setup.methods:
                predicted_s[method].append(forecast_s[method])
                measured_s[method].append(train(network, method, setup, time_to_loss.measured(out, method, seed), seed))
    script.report(f"steps_{setup.job.name}", tabulate(measured_s, predicted_s))


if __name__ == "__main__":
    script.define("out", "pages", "smoke")
    flags.DEFINE_string("rate", "100mbit", "Rate of every link.")
    flags.DEFINE_integer("rounds", 1, "Calibrations, each followed by all methods.", lower_bound=1)
    flags.DEFINE_integer("steps", 60, "Steps of a run.", lower_bound=4)
    flags.DEFINE_float("seconds", 60.0, "Approximate duration of a calibration.", lower_bound=1.0)
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files, to learn to translate; none: to learn Python.")
    script.run(main, (*systems.ERRORS, trials.Broken))
