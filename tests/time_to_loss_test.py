"""experiments/time_to_loss: how rates and steps are chosen, how a run directory is read, and a run from start to end with a tiny
model.
"""

import contextlib
import importlib
import itertools
import json
import math
import subprocess
import sys
import types

import pytest

from decjax import config
from experiments import curves, seeds, step_forecast, time_to_loss, tiny, trials
from experiments.bench.cluster import group
from experiments.curves import Point
from experiments.methods import HOSTS
from tests import commands
from tests.cluster_test import needs_namespaces


def test_a_grid_is_extended_while_its_best_is_at_an_edge():
    """Rates double or halve until the best has a neighbor on both sides; a single rate is accepted as is."""
    best, losses = seeds.best_rate(lambda rate: abs(math.log(rate / 0.016)), (0.002, 0.004, 0.008))
    assert best == 0.016 and sorted(losses) == [0.002, 0.004, 0.008, 0.016, 0.032]
    best, losses = seeds.best_rate(lambda rate: rate, (0.002, 0.004, 0.008))
    assert len(losses) == seeds.MOST_RATES and best == min(losses)
    assert seeds.best_rate(lambda rate: 1.0, (0.008,)) == (0.008, {0.008: 1.0})


def test_a_loss_is_reached_between_two_evaluations_and_kept():
    points = [Point(0, 0.0, 5.0), Point(10, 20.0, 3.0), Point(20, 40.0, 3.2), Point(30, 60.0, 2.0)]
    assert curves.reached(points, 4.0) == 10.0
    assert curves.reached(points, 4.0, lambda point: point.step) == 5
    assert curves.reached(points, 2.6) == 50.0
    assert curves.reached(points, 3.1) == pytest.approx(40 + 20 / 12)  # 3.0 did not last
    assert curves.reached(points, 6.0) == 0.0
    assert math.isnan(curves.reached(points, 1.9)) and math.isnan(curves.reached([], 1.0))
    assert math.isnan(curves.reached([*points, Point(40, 80.0, 4.5)], 4.0))


def test_seconds_are_those_of_the_steps(tmp_path):
    """Training rows give tokens per second, without compilation and evaluation."""
    rows = [
        dict(kind="eval", step=0, loss=5.0),
        dict(kind="train", step=10, loss=4.0, tokens_per_s=160.0),
        dict(kind="eval", step=10, loss=3.9),
        dict(kind="train", step=15, loss=3.0, tokens_per_s=80.0),
        dict(kind="eval", step=15, loss=2.9),
    ]
    (tmp_path / "config.json").write_text(json.dumps({"batch_size": 4, "model": {"context": 8}}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves.read(tmp_path) == [Point(0, 0.0, 5.0), Point(10, 2.0, 3.9), Point(15, 4.0, 2.9)]


def test_seconds_of_translation_are_counted_by_its_longest_sentences(tmp_path):
    rows = [dict(kind="train", step=10, loss=4.0, tokens_per_s=160.0), dict(kind="eval", step=10, loss=3.9)]
    (tmp_path / "config.json").write_text(json.dumps({"batch_size": 4, "model": {}, "data": {"length": 16}}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves.read(tmp_path) == [Point(10, 4.0, 3.9)]


@pytest.mark.parametrize(
    "losses, steps", [({1.0: 2.9}, 10), ({1.0: 2.98, 1.5: 2.9}, 15), ({1.0: 3.2, 1.5: 3.0, 2.0: 3.1}, 15)], ids=["1", "1.5", "none"]
)
def test_a_method_gets_the_fewest_steps_that_bring_it_below_the_goal(losses, steps, tmp_path, monkeypatch):
    """The target is 0.05 below all-reduce's loss, 3.0; if no row suffices, the steps with the lowest loss."""

    def simulate(out, setup, method, tuned):
        return 3.0 if method == "all-reduce" else losses[tuned.steps / setup.job.steps]

    monkeypatch.setattr(time_to_loss, "simulate", simulate)
    methods = ("all-reduce", time_to_loss.ONE_PEER)
    job = time_to_loss.TEXT._replace(steps=10)
    setup = time_to_loss.Setup(job, tmp_path, trials.Pool(), methods, (0.008,), time_to_loss.LONGER)
    found = time_to_loss.tune(tmp_path, setup)
    assert found == {"all-reduce": time_to_loss.Tuned(0.008, 10), time_to_loss.ONE_PEER: time_to_loss.Tuned(0.008, steps)}


def test_data_that_are_none_are_refused_before_anything_is_written(tmp_path):
    done = commands.run("experiments.time_to_loss", f"--out={tmp_path / 'out'}", f"--multi30k={tmp_path / 'none'}")
    assert done.returncode == 2 and "has no train.de" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    folder = tiny.multi30k(tmp_path / "pairs")
    (folder / "train.en").rename(folder / "train.en.gz")  # gzipped ones count
    (folder / "val.en").unlink()
    done = commands.run("experiments.time_to_loss", f"--out={tmp_path / 'out'}", f"--multi30k={folder}")
    assert done.returncode == 2 and "has no val.en; give the folder" in done.stderr and done.stderr.count("\n") == 1


def test_other_options_are_refused_where_runs_are(tmp_path):
    (tmp_path / "options.json").write_text(json.dumps(dict(rate="100mbit", steps=100, batch_size=2, every=10, smoke=False)))
    done = commands.run("experiments.time_to_loss", f"--out={tmp_path}", "--steps=50")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "--steps=50" in done.stderr and "--steps=100; give another --out" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["options.json"]


@needs_namespaces
@pytest.mark.parametrize(
    "argument, problem",
    [("--rate=fast", "fast"), ("--peers=/nowhere/python", "--peers=/nowhere/python cannot be used (No such file")],
)
def test_what_the_box_needs_is_asked_for_first(argument, problem, tmp_path):
    """An hour of tuning comes before it."""
    done = commands.run("experiments.time_to_loss", f"--out={tmp_path / 'a'}", argument)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and problem in done.stderr, done.stderr
    assert not (tmp_path / "a").exists()


def test_other_data_are_refused_where_runs_are(tmp_path):
    given = dict(rate="100mbit", multi30k="another", smoke=False, steps=100, batch_size=2, every=10)
    (tmp_path / "options.json").write_text(json.dumps(given))
    done = commands.run("experiments.time_to_loss", f"--out={tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "no --multi30k" in done.stderr and "--multi30k=another; give another --out" in done.stderr


def test_a_run_of_another_rate_is_refused(tmp_path):
    """Tuning has changed since: its seconds would be attributed to the new rate."""
    (tmp_path / "config.json").write_text(json.dumps({"schedule": {"learning_rate": 0.004}, "steps": 600}))
    time_to_loss.same(tmp_path, time_to_loss.Tuned(0.004, 600))
    with pytest.raises(time_to_loss.Failed, match="move it away"):
        time_to_loss.same(tmp_path, time_to_loss.Tuned(0.004, 900))


@needs_namespaces
def test_the_whole_way_with_a_tiny_model_and_again_from_what_is_there(tmp_path):
    """With text. Translation differs only in the runs' configs and how they are read, which the tests below cover."""
    out = tmp_path / "out"
    first, second = (commands.run("experiments.time_to_loss", f"--out={out}", "--smoke", "--rounds=1") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    table = second.stdout.strip()
    assert first.stdout.strip().endswith(table.splitlines()[-1]) and time_to_loss.ACCUM_INT8 in table
    out /= "smoke"
    assert (out / "time_to_loss.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((out / "time_to_loss.json").read_text())
    assert len(document["all-reduce"]["to_loss_s"]) == 1 and document["all-reduce"]["predicted_step_s"][0] > 0
    expected = {"profile.json", "all_reduce", trials.name_of(time_to_loss.ACCUM_INT8)}
    assert {path.name for path in (out / "round0").iterdir()} == expected
    (out / "options.json").write_text((out / "options.json").read_text().replace("checksum ", "checksum of another "))
    changed = commands.run("experiments.time_to_loss", f"--out={tmp_path / 'out'}", "--smoke", "--rounds=1")
    assert changed.returncode == 2 and "text=checksum of another" in changed.stderr and changed.stderr.count("\n") == 1


def run_directory(folder, losses, **summary):
    """Like a translation run that is evaluated every ten steps, each of which takes a second."""
    folder.mkdir(parents=True)
    rows = []
    for k, loss in enumerate(losses):
        rows += [dict(kind="train", step=10 * k, loss=loss, tokens_per_s=64.0)] * (k > 0) + [
            dict(kind="eval", step=10 * k, loss=loss)
        ]
    (folder / "config.json").write_text(json.dumps({"batch_size": 4, "model": {}, "data": {"length": 16}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"eval_loss": losses[-1]} | summary))


@pytest.mark.parametrize("score", ["", "bleu"])
def test_results_are_those_of_the_rounds_beside_their_forecasts(score, tmp_path, monkeypatch):
    """Gossip reaches all-reduce's loss, 3, in half of the steps in the emulated cluster, and in three quarters in simulation."""
    losses = {"all-reduce": ([5.0, 4.0, 3.0], [5.0, 4.0, 3.0]), time_to_loss.INT8: ([5.0, 3.0, 2.0], [5.0, 4.0, 2.0])}
    for method, (own, simulated) in losses.items():
        for seed in range(2):
            run_directory(time_to_loss.measured(tmp_path, method, seed), own, eval_bleu=10.0 + seed)
            run_directory(time_to_loss.simulated_round(tmp_path, method, seed), simulated, eval_bleu=1.0)
    monkeypatch.setattr(time_to_loss, "predict", lambda path: {"all-reduce": 2.0, time_to_loss.INT8: 0.5})
    tuned = dict.fromkeys(losses, time_to_loss.Tuned(0.008, 20))
    found = time_to_loss.results(tmp_path, tuned, 2, score)
    assert list(found) == list(losses)  # PyTorch's rows have not run
    first, gossip = found.values()
    assert first.step_s == gossip.step_s == [1.0, 1.0] and (first.to_loss_s, gossip.to_loss_s) == ([20.0, 20.0], [10.0, 10.0])
    assert gossip.near_s == pytest.approx([9.75] * 2) and first.predicted_step_s == [2.0, 2.0]
    assert (first.predicted_to_loss_s, gossip.predicted_to_loss_s) == ([40.0, 40.0], [7.5, 7.5])
    assert [*gossip.scores] == ([10.0, 11.0] if score else [])


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("job", [time_to_loss.TEXT, time_to_loss.TRANSLATION], ids=lambda job: job.name)
def test_every_run_has_a_config(job, is_small, tmp_path):
    """On the emulated cluster and in simulation, with a model of the tiny sizes and with its own."""
    job = job._replace(model=job.small) if is_small else job
    setup = time_to_loss.Setup(job, tmp_path / "data", trials.Pool(), tuple(time_to_loss.TRAINED), time_to_loss.GRID, (1.0,))
    for method, simulate in itertools.product(time_to_loss.TRAINED, (True, False)):
        made = time_to_loss.trial(method, setup, time_to_loss.Tuned(0.004, job.steps), tmp_path / "run", 1, simulate)
        path, _, shorthand = made.config.partition(":")
        found = importlib.import_module(path.removesuffix(".py").replace("/", ".")).get_config(shorthand)
        found.update_from_flattened_dict(dict(made.fields))
        spec = config.read(found)
        assert (spec.workers, spec.simulate, spec.steps, spec.seed) == (HOSTS, simulate, job.steps, 1)
        assert spec.schedule.options["learning_rate"] == 0.004 and spec.batch_size == HOSTS * job.batch_size


@pytest.mark.parametrize("multi30k", [None, "pairs"])
def test_what_is_forecast_is_what_races(multi30k, tmp_path, monkeypatch):
    """Text or translation, with fewer steps and no score."""
    given = types.SimpleNamespace(multi30k=multi30k and str(tmp_path / multi30k), smoke=True, steps=4)
    monkeypatch.setattr(step_forecast, "FLAGS", given)
    setup = step_forecast.short(tmp_path)
    job = time_to_loss.TRANSLATION if multi30k else time_to_loss.TEXT
    assert setup.job == job._replace(model=job.small, steps=4, every=2, score="") and setup.methods == time_to_loss.SMOKE_TUNING[0]
    assert setup.path == tmp_path / (multi30k or "text.txt") and setup.path.exists() == (multi30k is None)


@needs_namespaces
def test_steps_of_a_tiny_model_are_forecast_and_taken_once(tmp_path):
    few = ["--smoke", "--steps=4", "--seconds=1", f"--out={tmp_path / 'out'}"]
    first, second = (commands.run("experiments.step_forecast", *few) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    table = second.stdout.strip()
    assert first.stdout.strip().endswith(table.splitlines()[-1]) and table.count("%") == 2 and time_to_loss.ACCUM_INT8 in table
    refused = commands.run("experiments.step_forecast", *few, "--multi30k=/nowhere")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "--multi30k=/nowhere does not exist" in refused.stderr


@pytest.mark.parametrize("code, fails", [(4, ""), (1, "exit code 1"), (2, "was refused"), (130, "exit code 130")])
def test_only_divergence_counts_as_a_bad_rate(tmp_path, monkeypatch, code, fails):
    """An invalid, interrupted or broken run gives no result: the command ends, and continues with that run when started again."""
    ended = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    monkeypatch.setattr(trials.processes, "start", lambda *command, **how: ended)
    job = time_to_loss.TEXT._replace(model={}, steps=8, batch_size=1, every=2)
    setup = time_to_loss.Setup(job, tmp_path / "text.txt", trials.Pool(), *time_to_loss.SMOKE_TUNING)
    with pytest.raises(trials.Broken, match=fails) if fails else contextlib.nullcontext():
        assert time_to_loss.simulate(tmp_path, setup, "all-reduce", time_to_loss.Tuned(0.008, 8)) == math.inf
    error, said = (trials.Broken, fails) if fails else (group.Failed, "no simulated run of all-reduce")
    with pytest.raises(error, match=said):
        time_to_loss.tune(tmp_path, setup)
