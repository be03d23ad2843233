"""experiments/race: how a loss is reached, how rows are tuned, and a race of tiny models from start to end."""

import contextlib
import json
import math
import subprocess
import sys
import types

import pytest

from decjax import costmodel
from experiments import race, race_check, race_peers, race_rows, race_steps, script, seeds, step_forecast, trials
from experiments.results_log import ResultsLog
from launch import cluster
from tests import commands


def test_a_target_counts_from_where_the_loss_stays_below_it():
    losses = [(50, 3.0), (100, 2.0), (150, 2.2), (200, 1.0)]
    assert race_rows.steps_to(losses, 2.5) == 75
    assert race_rows.steps_to(losses, 2.1) == pytest.approx(150 + 50 / 12)  # 2.0 did not last
    assert race_rows.steps_to(losses, 3.5) == 50
    assert math.isinf(race_rows.steps_to(losses, 0.5))


def test_a_loss_between_evaluations():
    losses = [(50, 3.0), (100, 2.0)]
    assert [race_rows.loss_at(losses, step) for step in (10, 50, 75, 100, 120)] == [3.0, 3.0, 2.5, 2.0, 2.0]


@pytest.mark.parametrize(("outer", "trials"), [((), 5), (race_rows.OUTER, 7)])
def test_rows_are_tuned_alike(monkeypatch, tmp_path, outer, trials):
    """Three rates, the row's other options at the best of them, then rates √2 below and above."""
    asked = []

    def curve(self, name, setting, seed, steps):
        asked.append(setting)
        assert seed == race_rows.TUNING_SEED and steps == race_rows.TASKS["lm"].tuning_steps
        worse = {"": 0.0, "0.5, 0.5": 0.2, "1.0, 0.0": 0.1, "0.7, 0.9": 0.3}[setting.outer]
        return race_rows.Curve(steps, [(steps, abs(math.log(setting.rate / 0.02)) + worse)], 0.0)

    monkeypatch.setattr(race.Race, "curve", curve)
    monkeypatch.setitem(race_rows.ROWS, "row", race_rows.Row("", race_rows.LOCAL, outer=outer))
    best, tried = race.Race(race_rows.TASKS["lm"], out=tmp_path, log=None).tune("row")
    assert best == race_rows.Setting(0.0226, "1.0, 0.0" if outer else "") and len(tried) == trials == len(set(asked))


def test_the_first_row_sets_the_targets_and_slower_rows_train_longer(monkeypatch, tmp_path):
    def curve(self, name, setting, seed, steps):
        speed = 1.0 if name == race_rows.FP32 else 0.6
        return race_rows.Curve(steps, [(step, 3.0 - speed * step / 1250 + seed / 100) for step in range(50, steps + 1, 50)])

    monkeypatch.setattr(race.Race, "curve", curve)
    monkeypatch.setattr(race.Race, "tune", lambda self, name: (race_rows.Setting(0.01), {race_rows.Setting(0.01): 1.0}))
    runs = race.Race(race_rows.TASKS["lm"], out=tmp_path, log=None)
    targets = runs.targets(runs.result(race_rows.FP32))
    assert targets == pytest.approx((1.1, 1.02))
    result = runs.result("PyTorch DDP fp32", targets[0])
    assert result.steps == 5000 and len(result.curves) == race_rows.SEEDS
    assert race_rows.Result.of(json.loads(json.dumps(result._asdict()))) == result


@pytest.fixture
def results():
    """A row that needs as many steps as the first row, and one that never reaches its final loss."""
    losses = [(step, 3.0 - step / 1250) for step in range(50, 2501, 50)]
    curves = {race_rows.FP32: losses, "gossip int8": losses, "gossip bf16": [(step, loss + 0.5) for step, loss in losses]}
    return {
        name: race_rows.Result(race_rows.Setting(0.01), {"0.01": 1.0}, 2500, [race_rows.Curve(2500, each, 1.0)] * 2)
        for name, each in curves.items()
    }


@pytest.fixture
def times(tmp_path):
    """Steps of 0.1 s, and 0.3 s on the wire at 20 Mbit/s, for gossip a tenth of it."""

    def row(name, rate):
        wire_s = 0.3 * (20 / rate) * (1.0 if name == race_rows.FP32 else 0.1)
        numbers = {"step_s": [wire_s + 0.1, 0.01, wire_s + 0.1], "sent_bytes": wire_s * rate / 8 * 1e6}
        return numbers if name == race_rows.FP32 else numbers | {"step_s": [0.2]}

    measured = {
        f"{rate}mbit": {name: row(name, rate) for name in (race_rows.FP32, "gossip int8", "gossip bf16")} for rate in (20, 100)
    }
    measured["jitter"] = {
        f"{name}, {kind}": {"step_s": [1.0]} for name in (race_rows.FP32, "gossip int8") for kind in ("fixed", "jitter")
    }
    (path := tmp_path / "steps.json").write_text(json.dumps(measured))
    return race.StepTimes.read(str(path))


def test_time_to_target_is_steps_times_seconds(results, times, tmp_path):
    """A row with steps half as long is twice as fast; one that never reaches the target has no speed-up."""
    step_s = times.at("20mbit")
    assert step_s == {race_rows.FP32: 0.4, "gossip int8": 0.2, "gossip bf16": 0.2}
    ends = race.finishes(results, step_s, 2.0)
    assert ends["gossip int8"].times_s == pytest.approx([250, 250]) and ends["gossip int8"].speedups == pytest.approx([2, 2])
    assert ends["gossip bf16"].reached and not race.finishes(results, step_s, 1.0)["gossip bf16"].reached
    text = script.markdown(race.tabulate_times(results, step_s, (1.0, 2.0)))
    assert "never" in text and "2.00 ± 0.00" in text and "500 ± 0" in text
    race.draw(str(tmp_path / "race.png"), "nats/byte", results, times, "20mbit", 2.0)
    race.draw_bandwidths(str(tmp_path / "rates.png"), results, times, [*results], 2.0)
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("race.png", "rates.png"))
    with pytest.raises(trials.Broken, match="has no step times at 5mbit, only at 20mbit"):
        times.at("5mbit")


def test_a_step_is_predicted_from_its_bytes(times):
    assert times.rates == ["20mbit", "100mbit"] and times.with_jitter() == {race_rows.FP32: 1.0, "gossip int8": 1.0}
    assert times.predicted_s(race_rows.FP32, "20mbit") == pytest.approx(0.4)
    assert times.predicted_s("gossip int8", "20mbit") == pytest.approx(0.2)  # 0.03 s on the wire while it computes


def test_rows_are_equally_fast_at_the_crossover(results, times):
    found = race.crossover([10, 100, 1000], [0.25, 0.5, 2.0], 0.1)
    assert found.at == pytest.approx(10**2.5) and found.low < found.at < found.high
    assert math.isnan(race.crossover([10, 100], [0.25, 0.5], 0.1).at)
    text = script.markdown(race.tabulate_crossovers(results, times, [race_rows.FP32, "gossip int8"], 2.0))
    line = text.splitlines()[-1].split("|")
    assert [cell.strip() for cell in line[3:5]] == ["gossip int8", race_rows.FP32] and 20 < float(line[5]) < 100


def test_a_race_of_tiny_models(tmp_path):
    log = tmp_path / "log.jsonl"
    line = ["experiments.race", "--task=lm", f"--out={tmp_path}", "--smoke", "--row=gossip int8"]
    done = commands.run(*line)
    assert done.returncode == 0, done.stderr
    assert "all-reduce fp32" in done.stdout and "gossip int8" in done.stdout and "steps to" in done.stdout
    runs = [json.loads(row) for row in (tmp_path / "smoke" / "lm" / "results.jsonl").read_text().splitlines()]
    assert len(runs) == 4 and all(len(run["numbers"]["losses"]) > 1 for run in runs)
    missing = commands.run(*line, "--step_times=/nowhere/steps.json")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "give a file of experiments.race_steps" in missing.stderr
    refused = commands.run("experiments.race", "--task=translation", f"--out={tmp_path}", f"--results={log}")
    assert refused.returncode and "--multi30k" in refused.stderr


def test_every_row_of_the_race_is_timed_but_those_left_out():
    timed = {row.name for row in race_steps.rows(race_rows.TASKS["lm"], race_steps.TIMED)}
    assert {*race_rows.ROWS} - timed == {*race_steps.LEFT_OUT}
    assert {*race_steps.JITTERED} <= {*race_rows.ROWS}
    peers = {row.name for row in race_steps.peers(race_rows.TASKS["lm"])}
    assert peers == {race_steps.TORCH_ALONE, *race_rows.PEERS}


def test_a_row_of_pytorch_has_the_config_of_its_twin(monkeypatch, tmp_path):
    configs = {}

    def train(network, python, method, config, workdir):
        configs[method] = config
        workdir.mkdir(parents=True)
        (workdir / "data.npz").touch()
        (workdir / "metrics.jsonl").write_text(json.dumps(dict(kind="eval", step=16, loss=1.0)) + "\n")
        return 0

    monkeypatch.setattr(race_peers.twins, "train", train)
    monkeypatch.setattr(race_peers, "FLAGS", types.SimpleNamespace(peers="python"))
    peers = race_peers.Peers(race_rows.TASKS["lm"], network=cluster.Network("", ()), out=tmp_path)
    for name, row in race_rows.PEERS.items():
        outer = row.outer[-1] if row.outer else ""
        assert peers.curve(name, race_rows.Setting(0.01, outer), 0, 16) == race_rows.Curve(16, [(16, 1.0)])
    assert all(config["schedule"]["learning_rate"] == 0.01 and config["steps"] == 16 for config in configs.values())
    assert configs["ddp"]["method"]["name"] == "allreduce" and configs["decent_dp"]["topology"] == "one_peer_exponential"
    period = race_steps.PEER_OPTIONS["diloco"]["every"]
    assert configs["diloco"]["method"] == dict(name="diloco", every=period, outer_learning_rate=0.7, outer_momentum=0.9)


@pytest.mark.parametrize("config", [{"model": {"context": 8}}, {"model": {}, "data": {"length": 8}}], ids=["text", "pairs"])
def test_seconds_of_a_full_run_are_those_of_its_steps(config, tmp_path):
    """Training rows give tokens per second, without compilation and evaluation; the first row does not count."""
    rows = [
        dict(kind="train", step=5, loss=4.0, tokens_per_s=1.0),
        dict(kind="eval", step=5, loss=3.9),
        dict(kind="train", step=10, loss=4.0, tokens_per_s=160.0),
        dict(kind="train", step=15, loss=3.0, tokens_per_s=80.0),
        dict(kind="eval", step=15, loss=2.9),
    ]
    (tmp_path / "config.json").write_text(json.dumps({"batch_size": 4, **config}))
    (tmp_path / "summary.json").write_text(json.dumps({"eval_loss": 2.9, "bytes_per_step_per_worker": 8.0}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = race_check.read(trials.Trial(tmp_path))
    assert run["step_s"] == pytest.approx(0.3) and run["losses"] == [(5, 3.9), (15, 2.9)]
    checked = {race_rows.FP32: run}
    results = {race_rows.FP32: race_rows.Result(race_rows.Setting(0.01), {}, 15, [race_rows.Curve(15, [(5, 3.9), (10, 2.9)])])}
    line = script.markdown(race_check.tabulate(checked, results, {race_rows.FP32: 0.4}, 3.0)).splitlines()[-1].split("|")
    assert [cell.strip() for cell in line[2:9]] == ["400", "300", "10", "14", "4", "4", "-9.5 %"]


def test_a_grid_is_extended_while_its_best_is_at_an_edge():
    """Rates double or halve until the best has a neighbor on both sides; a single rate is accepted as is."""
    best, losses = seeds.best_rate(lambda rate: abs(math.log(rate / 0.016)), (0.002, 0.004, 0.008))
    assert best == 0.016 and sorted(losses) == [0.002, 0.004, 0.008, 0.016, 0.032]
    best, losses = seeds.best_rate(lambda rate: rate, (0.002, 0.004, 0.008))
    assert len(losses) == seeds.MOST_RATES and best == min(losses)
    assert seeds.best_rate(lambda rate: 1.0, (0.008,)) == (0.008, {0.008: 1.0})


@pytest.mark.parametrize("code, fails", [(4, ""), (1, "exit code 1"), (2, "was refused"), (130, "exit code 130")])
def test_only_divergence_counts_as_a_bad_rate(tmp_path, monkeypatch, code, fails):
    """An invalid, interrupted or broken run gives no result: the command ends, and continues with that run when started again."""
    ended = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    monkeypatch.setattr(trials.processes, "start", lambda *command, **how: ended)
    runs = race.Race(race_rows.TASKS["lm"], smoke=True, out=tmp_path, log=ResultsLog(tmp_path / "log.jsonl", trials.Pool()))
    with pytest.raises(trials.Broken, match=fails) if fails else contextlib.nullcontext():
        assert runs.curve(race_rows.FP32, race_rows.Setting(0.01), 0, 10) is None
    with pytest.raises(trials.Broken, match=fails or "all runs of all-reduce fp32 diverged"):
        runs.targets(runs.result(race_rows.FP32))


def test_steps_are_predicted_from_a_calibration(monkeypatch):
    """The rows of the race that the cost model knows; those with a codec by their measured form."""
    forms = [
        costmodel.Compressed(name, 4, "" if "gossip" not in name else "one_peer_exponential", 0.25, 0.0)
        for name in step_forecast.CODED
    ]
    workload = costmodel.Workload(0.01, (0.02,), (4e6,), compressed=tuple(forms))
    measured = costmodel.Cluster("four hosts", 4, 1, inter=costmodel.Link(1e-3, 2.5e6), intra=costmodel.Link(1e-3, 2.5e6))
    monkeypatch.setattr(step_forecast.cluster_runtime, "calibrate", lambda *args, **how: (measured, workload))
    predicted_s = step_forecast.forecast(None, race_rows.TASKS["lm"], 1.0)
    assert list(predicted_s) == [*step_forecast.EXACT, *step_forecast.CODED] and {*predicted_s} <= {*race_rows.ROWS}
    assert predicted_s["all-reduce int8"] == pytest.approx(predicted_s[race_rows.FP32] / 4, rel=0.1)
    table = script.markdown(step_forecast.tabulate([{"measured_s": {"gossip int8": 0.2}, "predicted_s": {"gossip int8": 0.1}}]))
    assert "-50.0 %" in table
