"""launch/local.py with real processes and signals: the trajectory survives both, and nothing is left running."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from decjax.train.workdir import steps_saved
from launch import command, processes

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
STEPS = 160  # checkpoints at every tenth
TRAINED = "--config=experiments/paced.py:simulate=false,topology=one_peer_exponential"
OFTEN = ("--config.log_every=5", "--config.checkpoint.every=10")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compiled programs are shared by the processes of this file: most of a tiny run is compilation."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


def launch(*arguments, environment=None):
    return subprocess.Popen(
        [sys.executable, "-m", "launch.local", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def command_lines():
    """Return process id -> command line of everything running on this machine."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:  # ended meanwhile
                continue
    return found


def trainers(workdir):
    """Return the ids of a run's training processes, by process index."""
    found = {}
    for process_id, line in command_lines().items():
        if "launch.train" in line and str(workdir) in line and "--standby" not in line:
            found[int(line.split("--process_index=")[1].split()[0])] = process_id
    return found


def training_rows(workdir):
    """Return the complete training rows of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "train"]


def wait_for(condition, process):
    """Wait until `condition()` holds; fail if the launcher ends before, or after a long time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def reached(workdir, step):
    return (workdir / "metrics.jsonl").exists() and any(row["step"] >= step for row in training_rows(workdir))


@pytest.fixture(scope="module")
def story(tmp_path_factory, environment):
    """One run of four processes: process 1 is killed, then the launcher is interrupted, then the run completes."""
    workdir = tmp_path_factory.mktemp("local") / "run"
    (slowly := workdir.parent / "slowly").touch()  # while the file exists, a run lasts for half a minute
    paced = (f"--config.data.waits_for={slowly}", "--config.data.wait_s=0.2")
    arguments = ["--num_processes=4", "--", f"{TRAINED},workers=4,steps={STEPS}", *OFTEN, *paced, f"--workdir={workdir}"]
    ends = []

    first = launch(*arguments, environment=environment)
    wait_for(lambda: steps_saved(workdir) and reached(workdir, 15), first)
    os.kill(trainers(workdir)[1], signal.SIGKILL)
    killed_at = time.monotonic()
    told = first.communicate(timeout=TIMEOUT_S)
    ends.append((*told, first.returncode, time.monotonic() - killed_at, trainers(workdir)))

    was_at = training_rows(workdir)[-1]["step"]
    second = launch(*arguments, environment=environment)
    wait_for(lambda: reached(workdir, was_at + 5), second)
    second.send_signal(signal.SIGINT)
    ends.append((*second.communicate(timeout=TIMEOUT_S), second.returncode, training_rows(workdir)[-1]["step"], trainers(workdir)))

    slowly.unlink()
    third = launch(*arguments, environment=environment)
    ends.append((*third.communicate(timeout=TIMEOUT_S), third.returncode, None, trainers(workdir)))
    return workdir, arguments, ends


def test_a_killed_process_ends_the_others_within_a_minute(story):
    _, arguments, ends = story
    _, errors, code, took_s, left = ends[0]
    assert code == 1 and took_s < 60 and not left
    assert "error: process 1 was killed by SIGKILL" in errors
    assert "python -m launch.local " + " ".join(arguments) in errors


def test_an_interrupt_saves_and_stops(story):
    workdir, arguments, ends = story
    output, errors, code, last_step, left = ends[1]
    assert code == 128 + signal.SIGINT and not left
    saved = int(re.search(r"continuing from step (\d+)", output)[1])  # the newest complete one at the kill
    assert saved >= 10 and saved % 10 == 0
    assert f"saved step {last_step}" in output and saved < last_step < STEPS
    assert errors.startswith("interrupted by SIGINT") and "python -m launch.local " + " ".join(arguments) in errors


def test_the_same_command_continues_to_the_end(story):
    workdir, _, ends = story
    output, errors, code, _, left = ends[2]
    assert code == 0, errors
    assert f"continuing from step {ends[1][3]}" in output and not left
    assert json.loads((workdir / "summary.json").read_text())["steps"] == STEPS
    assert "[process" not in output + errors


def test_four_processes_and_four_devices_have_the_same_trajectory(story, tmp_path, environment):
    """Step by step, and in the averaged and local models at the end."""
    workdir, _, _ = story
    single = [f"{TRAINED},workers=4,steps={STEPS}", *OFTEN, f"--workdir={tmp_path}"]
    subprocess.run(
        [sys.executable, "-m", "launch.train", *single],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )
    assert [row["step"] for row in training_rows(workdir)] == list(range(5, STEPS + 1, 5))
    for ours, theirs in zip(training_rows(workdir), training_rows(tmp_path), strict=True):
        for key in ("step", "loss", "loss_min", "loss_max", "consensus_distance", "bytes_sent_per_worker"):
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-4 if key == "consensus_distance" else 1e-5)
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (workdir, tmp_path))
    for key in ("eval_loss", "local_eval_loss_mean", "local_eval_loss_min", "local_eval_loss_max"):
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5)


def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    workdir = tmp_path / "run"
    launcher = launch("--num_processes=2", "--", "--config=configs/lm.py:smoke", f"--workdir={workdir}")
    wait_for(lambda: len(trainers(workdir)) == 2, launcher)
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + TIMEOUT_S
    while trainers(workdir):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not steps_saved(workdir)  # they end at once; if told to stop, they would have saved


def test_a_process_that_freezes_is_named_in_one_line(tmp_path, environment):
    """The coordinator's process, on which all others depend."""
    arguments = ["--num_processes=2", "--", f"{TRAINED},workers=2,steps=100000", *OFTEN, f"--workdir={tmp_path}"]
    launcher = launch(*arguments, environment=environment)
    wait_for(lambda: reached(tmp_path, 15), launcher)
    os.kill(trainers(tmp_path)[0], signal.SIGSTOP)
    frozen_at = time.monotonic()
    _, errors = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 3 and time.monotonic() - frozen_at < 60 and not trainers(tmp_path)
    assert errors.startswith("error: process 0 stopped answering, all processes were ended; the same command continues")
    assert errors.splitlines()[1:] == ["  python -m launch.local " + " ".join(arguments)]


def ended(*programs):
    """Return the exit code and errors of a group of processes that run these programs."""
    starts = [[sys.executable, "-c", f"import os, signal, sys, time\n{program}"] for program in programs]
    text = f"import sys; from launch import processes; sys.exit(processes.run_together({starts!r}))"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stderr


NOISE = "print('F0000 client.h:85] Terminating process because the JAX distributed service detected fatal errors', file=sys.stderr)"


def in_turn(folder):
    """Return one line of each of two programs: the first waits until the second has reached its line."""
    path = str(folder / "is there")
    return f"while not os.path.exists({path!r}): time.sleep(0.01)\n", f"open({path!r}, 'w').close()\n"


def test_what_a_process_says_when_it_loses_contact_is_left_out(tmp_path):
    waits, comes = in_turn(tmp_path)
    aborts, frozen = f"time.sleep(1)\n{NOISE}\nsys.stderr.flush()\nos.abort()", f"{comes}os.kill(os.getpid(), signal.SIGSTOP)"
    assert ended(waits + aborts, frozen, waits + aborts) == (3, "error: process 1 stopped answering, all processes were ended\n")
    assert ended(aborts, aborts) == (3, "error: process 0 lost contact with another, all processes were ended\n")
    code, errors = ended(
        "time.sleep(1)\nprint('free(): invalid pointer', file=sys.stderr, flush=True)\nos.abort()", "time.sleep(60)"
    )
    assert code == 1 and errors.splitlines() == [
        "[process 0] free(): invalid pointer",
        "error: process 0 was killed by SIGABRT, the other processes were ended",
    ]


def test_a_process_that_was_killed_is_named_before_those_that_failed_because_of_it(tmp_path):
    fails, dies = "sys.exit('Connection closed by peer')", "time.sleep({})\nos.kill(os.getpid(), signal.SIGKILL)"
    stays = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    for after_s in (0, 1):
        (folder := tmp_path / str(after_s)).mkdir()
        waits, comes = in_turn(folder)
        assert ended(waits + fails, stays + comes + dies.format(after_s)) == (
            1,
            "error: process 1 was killed by SIGKILL, the other processes were ended\n",
        )


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--num_processes=0", "--", "--config=configs/lm.py", "--workdir=unused"], "--num_processes=0: 0 is not"),
        (["--num_processes=2"], "behind --"),
        (["--num_processes=2", "--module=launch.nothing", "--", "--x"], "module='launch.nothing'"),
        (["--num_processes=2", "configs/lm.py"], "'configs/lm.py'"),
        (["--", "--config=configs/lm.py"], "--num_processes"),
        (["--num_processes=2", "--", "--config=configs/lm.py:smoke"], "--workdir"),
    ],
)
def test_mistakes_are_told_once_in_one_line(arguments, problem, tmp_path):
    process = launch(*(argument.format(tmp=tmp_path) for argument in arguments))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    (line,) = [line for line in errors.splitlines() if not line.startswith("[Gloo]")]
    assert line.startswith("error: ") and problem in line


@pytest.mark.parametrize(
    "arguments, num_processes, problem",
    [
        (["--config=configs/lm.py:workers=3,smoke"], 2, "workers=3 on 2 processes: 3 devices must be divided evenly"),
        (["--config=configs/lm.py:workers=2,smoke"], 3, "workers=2 on 3 processes.*start 2 processes"),
        (["--config=configs/lm.py:stages=2,smoke"], 3, "workers=0 on 3 processes: 2 devices must be"),
        (["--config=configs/lm.py:workers=2,smoke", "--elastic"], 2, "--elastic is an option of the launcher, not of a run"),
        (["--config=configs/lm.py:smoke", "--resume_from=runs/none"], 2, "--resume_from=runs/none has no checkpoint"),
        (["--config=configs/lm.py:smoke", "--config.method.evry=3"], 2, "method 'decentralized' has .*every"),
        (["--config=configs/lm.py:smoke", "--stpes=3"], 2, "Unknown command line flag 'stpes'"),
    ],
)
def test_what_every_process_would_refuse_is_refused_before_any_is_started(arguments, num_processes, problem, tmp_path):
    with pytest.raises(command.UserError, match=problem):
        processes.check(processes.TRAIN, [*arguments, f"--workdir={tmp_path}"], num_processes)


def test_workers_that_processes_can_share_are_taken(tmp_path):
    for shorthand, num_processes in (("workers=4", 2), ("workers=2,stages=2", 4), ("smoke", 3), ("stages=2", 4)):
        processes.check(processes.TRAIN, [f"--config=configs/lm.py:{shorthand}", f"--workdir={tmp_path}"], num_processes)
