"""Elastic runs with real processes that die, freeze and come back while the others continue."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from decjax.train.workdir import steps_saved
from tests.cluster_test import why_not
from tests.local_test import ROOT, TIMEOUT_S, command_lines, trainers, wait_for

SLOTS, HEARTBEAT_S = 4, 2.0
HEARTBEAT = f"--config.elastic.heartbeat_s={HEARTBEAT_S}"
PACED = "--config.data.wait_s=0.02"


def launch(workdir, *options, steps=1_000_000, shorthand="topology=one_peer_exponential", log=10, save=100):
    """An elastic run of quadratics with slow steps, because a rejoining process needs the cores."""
    config = f"--config=experiments/paced.py:workers={SLOTS},simulate=false,{shorthand},steps={steps}"
    fields = [f"--config.log_every={log}", f"--config.eval.every={steps}", f"--config.checkpoint.every={save}", HEARTBEAT, PACED]
    line = [sys.executable, "-m", "launch.local", f"--num_processes={SLOTS}", "--elastic", *options]
    line += ["--", config, *fields, f"--workdir={workdir}"]
    workdir.parent.mkdir(exist_ok=True)
    with errors_of(workdir).open("w") as errors:  # a pipe that is not read would fill up
        return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)


def errors_of(workdir):
    return workdir.parent / f"{workdir.name}.stderr"


def ended(workdir, run, number=signal.SIGTERM):
    """Stop a run and return its output."""
    run.send_signal(number)
    assert run.wait(TIMEOUT_S) == 128 + number
    return errors_of(workdir).read_text()


def rows(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last(workdir, workers=None):
    """Return the step of the last row, or of the last one with so many workers; 0 if there is none."""
    return max((row["step"] for row in rows(workdir) if workers in (None, row["workers"])), default=0)


def until(workdir, run, workers, times):
    """Wait until the run has continued with so many workers so many times, and has logged a step since; return the seconds."""
    begun, said = time.monotonic(), f"continuing with {workers} workers"
    wait_for(lambda: errors_of(workdir).read_text().count(said) >= times, run)
    before = last(workdir)
    wait_for(lambda: last(workdir) > before, run)
    return time.monotonic() - begun


def spares(workdir):
    """Return the ids of the processes that are or were spares."""
    return {
        process
        for process, line in command_lines().items()
        if "launch.train" in line and str(workdir) in line and "--standby" in line
    }


def lose(workdir, run, signals):
    """Send signals to the processes of slots, one after the other, each when a spare is ready; return for each the seconds until
    the others take steps, and until all do.
    """
    wait_for(lambda: last(workdir, SLOTS) > 50, run)
    process_of, took = trainers(workdir), []
    for times, (slot, number) in enumerate(signals, 1):
        wait_for(lambda: spares(workdir) - {*process_of.values()}, run)
        spare, *_ = spares(workdir) - {*process_of.values()}
        os.kill(process_of[slot], number)
        process_of[slot] = spare
        without_s = until(workdir, run, SLOTS - 1, times)
        took.append((number, without_s, without_s + until(workdir, run, SLOTS, times)))
    return took


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Every process is killed once, including that of slot 0 and the writer; one freezes."""
    workdir = tmp_path_factory.mktemp("elastic") / "run"
    run = launch(workdir)
    took = lose(workdir, run, ((1, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP)))
    return workdir, took, ended(workdir, run)


def test_the_others_go_on_and_whoever_comes_back_takes_part(story):
    _, took, errors = story
    assert all(without_s < again_s for _, without_s, again_s in took), errors  # `experiments.goodput` measures how soon
    assert "Traceback" not in errors
    for slot in (1, 0, 2):
        assert f"process {slot} was killed by SIGKILL; it will be replaced" in errors


def test_each_step_stands_once_in_the_log(story):
    workdir = story[0]
    steps = [row["step"] for row in rows(workdir)]
    assert steps == sorted(set(steps)) and np.diff(steps).max() == np.diff(steps).min() == 10
    times = [row["time_s"] for row in rows(workdir)]
    assert times == sorted(times)
    assert {row["workers"] for row in rows(workdir)} <= {SLOTS - 1, SLOTS}


def test_nothing_stays_behind(story):
    workdir = story[0]
    assert not [line for line in command_lines().values() if str(workdir) in line]


def test_the_same_command_continues(story):
    workdir, *_ = story
    saved = last(workdir)
    run = launch(workdir)
    wait_for(lambda: last(workdir) > saved, run)
    ended(workdir, run)
    assert rows(workdir)[-1]["step"] > saved and len({row["step"] for row in rows(workdir)}) == len(rows(workdir))


def test_a_spare_process_that_ends_is_replaced_and_is_named_for_no_place(tmp_path):
    workdir = tmp_path / "run"
    run = launch(workdir)
    wait_for(lambda: spares(workdir), run)
    (first,) = spares(workdir)
    assert "--process_index" not in command_lines()[first]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: spares(workdir) - {first}, run)  # and no slot becomes free meanwhile
    assert "it will be replaced" not in ended(workdir, run)


@pytest.mark.parametrize("shorthand", ["method=diloco", "topology=ring,mixer=choco,codec=int8"])
def test_every_method_loses_a_worker_and_goes_on_learning(tmp_path, shorthand):
    workdir = tmp_path / "run"
    run = launch(workdir, shorthand=shorthand)
    lose(workdir, run, ((1, signal.SIGKILL), (0, signal.SIGKILL)))
    assert "Traceback" not in ended(workdir, run)
    losses = [row["loss"] for row in rows(workdir)]
    assert np.mean(losses[-5:]) < 0.9 * losses[0]  # it falls fast, and then only its noise remains


def test_views_may_begin_at_a_step_that_is_saved_already(tmp_path):
    """Two die at once and come back one after the other, at a step that both views save."""
    workdir = tmp_path / "run"
    run = launch(workdir, save=1)
    wait_for(lambda: last(workdir, SLOTS) > 20, run)
    process_of = trainers(workdir)
    wait_for(lambda: spares(workdir), run)
    for slot in (1, 2):
        os.kill(process_of[slot], signal.SIGKILL)
    wait_for(lambda: errors_of(workdir).read_text().rstrip().endswith("continuing with 4 workers: 0, 1, 2, 3"), run)
    assert "cannot be written" not in ended(workdir, run)


def test_nothing_is_missing_if_the_writer_dies_at_the_end(tmp_path):
    workdir, steps = tmp_path / "run", 100
    run = launch(workdir, steps=steps)
    wait_for(lambda: last(workdir, SLOTS) > 20, run)
    process_of = trainers(workdir)
    wait_for(lambda: last(workdir) == steps, run)
    os.kill(process_of[0], signal.SIGKILL)
    assert run.wait(TIMEOUT_S) == 0, errors_of(workdir).read_text()
    assert json.loads((workdir / "summary.json").read_text())["steps"] == steps
    assert steps_saved(workdir)[-1] == steps


def test_a_signal_to_one_process_stops_the_run(tmp_path):
    workdir = tmp_path / "run"
    run = launch(workdir)
    wait_for(lambda: last(workdir, SLOTS) > 20, run)
    os.kill(trainers(workdir)[2], signal.SIGTERM)
    assert run.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in errors_of(workdir).read_text() and steps_saved(workdir)[-1] == last(workdir)


def test_a_launcher_that_is_stopped_for_a_while_kills_nobody(tmp_path):
    """Like Ctrl-Z and fg."""
    workdir = tmp_path / "run"
    run = launch(workdir)
    wait_for(lambda: last(workdir, SLOTS) > 20, run)
    run.send_signal(signal.SIGSTOP)
    time.sleep(5 * HEARTBEAT_S)
    run.send_signal(signal.SIGCONT)
    before = last(workdir)
    wait_for(lambda: last(workdir) > before + 50, run)
    said = ended(workdir, run)
    assert "it will be replaced" not in said and "continuing with" not in said


def test_mistakes_are_told_in_one_line(tmp_path):
    run = launch(tmp_path / "run", "--chaos=kill=9@8s")
    assert run.wait(TIMEOUT_S) == 2
    told = errors_of(tmp_path / "run").read_text().splitlines()
    assert told == ["error: --chaos: kill=9: there are 4 processes, from 0 to 3"]


@pytest.mark.skipif(bool(reason := why_not()), reason=reason or "namespaces work")
def test_a_host_that_is_cut_off_comes_back(tmp_path):
    """Silence is the only sign that the link is down."""
    name, workdir = f"cut{os.getpid()}-", tmp_path / "run"
    config = f"--config=experiments/paced.py:workers={SLOTS},simulate=false,topology=one_peer_exponential,steps=1000000"
    line = [sys.executable, "-m", "launch.cluster", "run", f"--hosts={SLOTS}", "--rate=100mbit", f"--name={name}"]
    line += ["--subnet=10.97.0.0/24", "--elastic", "--chaos=cut=0@15s+6s"]
    fields = ["--config.log_every=10", "--config.eval.every=1000000", HEARTBEAT, PACED, f"--workdir={workdir}"]
    with errors_of(workdir).open("w") as errors:
        run = subprocess.Popen([*line, "--", config, *fields], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
    until(workdir, run, SLOTS - 1, 1)
    until(workdir, run, SLOTS, 1)
    assert "chaos: cut 0 for 6 s" in ended(workdir, run)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in left and not [line for line in command_lines().values() if str(workdir) in line]
