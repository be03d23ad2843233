"""Faults of a launcher and its output: closed terminals, readers that exit, kills, exhausted file descriptors."""

import concurrent.futures
import errno
import io
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import types

from absl import flags
import pytest

from launch import command, elastic, processes
from tests.local_test import ROOT, TIMEOUT_S

# Saves after SIGTERM like a run: it prints first and takes its time.
SAVES = """
import pathlib, signal, sys, time
from launch import command

def main(argv):
    caught = []
    signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    pathlib.Path(argv[0], "began").touch()
    while not caught:
        time.sleep(0.02)
    print("saving", flush=True)
    time.sleep(0.5)
    print("saved", file=sys.stderr, flush=True)
    pathlib.Path(argv[0], "saved").touch()
    return 128 + caught[0]

command.run(main)
"""
# Runs that script as a launcher does.
LAUNCHES = """
import sys
from launch import command, processes
command.run(lambda argv: processes.run_together([[sys.executable, "-c", argv[0], argv[1]]], "the same command continues"))
"""


def launched(folder, *before, **options):
    line = [*before, sys.executable, "-c", LAUNCHES, SAVES, str(folder)]
    process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.DEVNULL, **options)
    wait_for((folder / "began").exists)
    return process


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_terminal_that_closes_ends_a_run_which_saves(tmp_path):
    """The shell passes SIGHUP on, and the kernel sends it as well; from then on printing fails."""
    ours, theirs = pty.openpty()
    process = launched(tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)  # pending signals of one kind are merged
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").exists()


def test_a_second_signal_that_is_meant_ends_it_at_once():
    with processes.caught_signals() as caught:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)
    assert caught == [signal.SIGHUP, signal.SIGINT]


def test_nohup_goes_on(tmp_path):
    process = launched(tmp_path, "nohup", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM and (tmp_path / "saved").exists()


def test_a_reader_that_goes_changes_nothing(tmp_path):
    """Like `2>&1 | head`."""
    process = launched(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.close()
    process.terminate()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM and (tmp_path / "saved").exists()


def test_other_errors_of_output_are_errors():
    with open("/dev/full", "w") as full, pytest.raises(OSError) as raised:
        command._Stream(full.fileno(), "w", closefd=False).write(b"x")
    assert raised.value.errno == errno.ENOSPC


def test_a_killed_launcher_leaves_no_folder():
    holds = "import time; from launch import processes\nwith processes.temporary_folder() as folder:\n print(folder, flush=True)\n"
    line = [sys.executable, "-c", f"{holds} time.sleep(600)"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        folder = process.stdout.readline().strip()
        assert os.path.isdir(folder) and os.path.dirname(folder) == tempfile.gettempdir()
        process.kill()
    wait_for(lambda: not os.path.exists(folder))


@pytest.mark.parametrize("option", ["--elastic", "--chaos=kill=1@60s", "--num_processes=3"])
def test_an_option_of_the_launcher_behind_the_dashes_is_named(option):
    """`--elastic` would take the next option as its value."""
    with pytest.raises(command.UserError, match=f"{option.partition('=')[0]} is an option of the launcher.*before --"):
        processes.check("launch.train", ["--config=configs/lm.py", option, "--workdir=runs/lm"])


@pytest.mark.parametrize("count", [0, -1, 1025, 10**9])
def test_more_processes_than_a_machine_holds_are_refused(count):
    values = flags.FlagValues()
    processes.define_count("num_processes", None, "", values)
    with pytest.raises(
        flags.IllegalFlagValueError, match=f"--num_processes={count}: {count} is not an integer in the range .1, 1024"
    ):
        values(["launch.local", f"--num_processes={count}"])


# -- Elastic ----------------------------------------------------------------------------------------------------------


class Ended:
    """A process that ended with its own error."""

    code, index = 1, 0

    def __init__(self):
        self.process = types.SimpleNamespace(poll=lambda: 1, pid=1)
        self.log = io.BytesIO(b"ValueError")

    def lines(self, most=0):
        return ["ValueError"]


@pytest.fixture
def now_s(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    return now


def test_errors_of_one_place_end_a_run_only_within_an_hour(now_s, capsys):
    slot = elastic._Slot(0, lambda index: Ended())
    for _ in range(10):  # weeks apart
        now_s[0] += 10 * 24 * 3600
        assert elastic._ended(slot, stopping=False) is None
    assert elastic._ended(slot, stopping=False) is None
    assert elastic._ended(slot, stopping=False) == 1


def test_a_process_that_cannot_be_started_is_tried_again(now_s, capsys):
    failures = 3

    def start(index):
        nonlocal failures
        failures -= 1
        if 0 <= failures < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return Ended()

    slot = elastic._Slot(0, start)
    first = slot.child
    slot.ended()
    while slot.again_at is not None:
        slot.restart_when_due()
        now_s[0] += 1
    assert slot.child is not first and first.log.closed
    assert "process 0 cannot be started (Too many open files); trying again" in capsys.readouterr().err


def test_a_run_whose_coordinator_fails_ends_with_a_message(capsys):
    failed = concurrent.futures.Future()
    failed.set_exception(RuntimeError("out of luck"))
    slots = [elastic._Slot(0, lambda index: Ended())]
    coordinator = types.SimpleNamespace(view=elastic.View(0, 0, ()), silent=set(), is_over=False)
    assert elastic._watch(slots, coordinator, failed, [], lambda: None, "; again") == 1
    assert "coordinator of this run has failed (RuntimeError('out of luck')); again" in capsys.readouterr().err


def test_an_address_that_is_not_reached_is_told_once(now_s, capsys):
    with elastic.socket.create_server(("127.0.0.1", 0)) as listener:
        address_check = elastic._AddressCheck(elastic.Hosts(), listener.getsockname()[:2])
        now_s[0] = 100.0
        address_check.look()
    assert not capsys.readouterr().err
    for _ in range(3):  # nothing listens there any more
        now_s[0] += 100.0
        address_check.look()
    assert capsys.readouterr().err.count("is unreachable (Connection refused)") == 1
