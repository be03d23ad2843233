"""Elastic runs with real processes: they die, freeze and come back, and the others go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cluster_test import why_not
from tests.local_test import ROOT, TIMEOUT_S, command_lines, trainers, wait_for

SLOTS, HEARTBEAT_S = 4, 2.0


def launch(workdir, *options, steps=1_000_000, shorthand="topology=one_peer_exponential", log=200):
    """An elastic run of quadratics, whose steps take milliseconds."""
    config = f"--config=configs/quadratics.py:workers={SLOTS},simulate=false,{shorthand},steps={steps}"
    fields = [f"--config.log_every={log}", f"--config.eval.every={steps}", "--config.checkpoint.every=2000"]
    line = [sys.executable, "-m", "launch.local", f"--num_processes={SLOTS}", "--elastic", f"--heartbeat_s={HEARTBEAT_S}", *options]
    return subprocess.Popen(
        [*line, "--", config, *fields, f"--workdir={workdir}"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def rows(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last(workdir, workers=None):
    """The step of the last row, or of the last one with so many workers; 0: there is none."""
    return max((row["step"] for row in rows(workdir) if workers in (None, row["workers"])), default=0)


def until(workdir, run, workers):
    """Waits for a row with so many workers of a step that is later than all rows so far; gives the seconds that it took."""
    begun, before = time.monotonic(), last(workdir)
    wait_for(lambda: last(workdir, workers) > before, run)
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Every process is killed once, that of slot 0 and the one that writes among them; one freezes."""
    workdir = tmp_path_factory.mktemp("elastic") / "run"
    run, took = launch(workdir), []
    wait_for(lambda: last(workdir, SLOTS) > 0, run)
    for slot, number in ((1, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP)):
        os.kill(trainers(workdir)[slot], number)
        took.append((number, until(workdir, run, SLOTS - 1), until(workdir, run, SLOTS)))
    run.send_signal(signal.SIGTERM)
    output, errors = run.communicate(timeout=TIMEOUT_S)
    return workdir, took, output, errors, run.returncode


def test_the_others_go_on_and_whoever_comes_back_takes_part(story):
    _, took, output, errors, code = story
    for number, without_s, again_s in took:
        assert without_s < (0 if number == signal.SIGKILL else HEARTBEAT_S) + HEARTBEAT_S + 3, errors
        assert again_s < 20, errors
    assert code == 128 + signal.SIGTERM and "Traceback" not in output + errors
    for slot in (1, 0, 2):
        assert f"process {slot} was killed by SIGKILL; it is started again" in errors


def test_each_step_stands_once_in_the_log(story):
    workdir = story[0]
    steps = [row["step"] for row in rows(workdir)]
    assert steps == sorted(set(steps)) and np.diff(steps).max() == np.diff(steps).min() == 200
    times = [row["time_s"] for row in rows(workdir)]
    assert times == sorted(times)
    assert {row["workers"] for row in rows(workdir)} == {SLOTS - 1, SLOTS}


def test_nothing_stays_behind(story):
    workdir = story[0]
    assert not [line for line in command_lines().values() if str(workdir) in line]


def test_the_same_command_continues(story):
    workdir, *_ = story
    saved = last(workdir)
    run = launch(workdir, steps=1_000_000)
    wait_for(lambda: last(workdir) > saved, run)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert f"continuing from step {saved}" in output


@pytest.mark.parametrize("shorthand", ["method=allreduce", "method=diloco", "topology=ring,mixer=choco,codec=int8"])
def test_every_method_loses_a_worker_and_ends(tmp_path, shorthand):
    run = launch(tmp_path / "run", "--chaos=kill=1@8s,kill=0@14s", steps=20_000, shorthand=shorthand, log=500)
    output, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 20_000 and summary["eval_loss"] < 0.05
    assert len(re.findall("going on with 3 workers", errors)) == 2


def test_mistakes_are_told_in_one_line(tmp_path):
    run = launch(tmp_path / "run", "--chaos=kill=9@8s")
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 2 and errors.splitlines() == ["error: --chaos: kill=9: there are 4 processes, from 0 to 3"]


@pytest.mark.skipif(bool(reason := why_not()), reason=reason or "namespaces work")
def test_a_host_that_is_cut_off_comes_back(tmp_path):
    """Nothing says that the link is gone but silence."""
    name, workdir = f"cut{os.getpid()}-", tmp_path / "run"
    config = f"--config=configs/quadratics.py:workers={SLOTS},simulate=false,topology=one_peer_exponential,steps=1000000"
    line = [sys.executable, "-m", "launch.cluster", "run", f"--hosts={SLOTS}", "--rate=100mbit", f"--name={name}"]
    line += ["--subnet=10.97.0.0/24", "--elastic", f"--heartbeat_s={HEARTBEAT_S}", "--chaos=cut=0@15s+6s"]
    fields = ["--config.log_every=50", "--config.eval.every=1000000", f"--workdir={workdir}"]
    run = subprocess.Popen([*line, "--", config, *fields], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: last(workdir, SLOTS - 1) > 0, run)
    lost = last(workdir, SLOTS - 1)
    wait_for(lambda: last(workdir, SLOTS) > lost, run)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 128 + signal.SIGTERM and "chaos: cut 0 for 6 s" in errors
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in left and not [line for line in command_lines().values() if str(workdir) in line]
