"""launch/command.py: how all commands start, fail and exit."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from launch import command
from tests import commands


def ended(program, **environment):
    """Run a small command with these variables; return (code, output, errors)."""
    line = [sys.executable, "-c", f"from launch import command\nimport atexit, os, signal, sys\n{program}\ncommand.run(main)"]
    done = subprocess.run(line, cwd=commands.ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


DEVICES = "import jax\ndef main(argv): print(jax.devices())"


@pytest.mark.parametrize(
    "variables, problem",
    [
        ({"JAX_PLATFORMS": "nonsense"}, "JAX_PLATFORMS=nonsense: JAX cannot start its devices (Unable to initialize"),
        ({"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "JAX_PLATFORMS=cuda: JAX cannot start its devices ("),
        ({"JAX_NUM_CPU_DEVICES": "x"}, "correct the variable JAX_NUM_CPU_DEVICES, or unset it"),
        ({"JAX_ENABLE_X64": "maybe"}, "correct the variable JAX_ENABLE_X64, or unset it"),
    ],
)
def test_variables_of_jax_that_do_not_work_are_one_line(variables, problem):
    code, output, errors = ended(DEVICES, **variables)
    (line,) = errors.splitlines()
    assert code == 2 and not output and line.startswith("error: ") and problem in line


def test_an_interrupt_after_the_last_line_is_silent():
    late = "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    assert ended(f"{late}def main(argv): print('done')") == (-signal.SIGINT, "done\n", "")
    fails = f"{late}def main(argv): raise command.UserError('no')"
    assert ended(fails) == (-signal.SIGINT, "", "error: no\n")


def test_errors_of_the_system_are_one_line_in_every_command():
    code, _, errors = ended("def main(argv): open('/nowhere/file')")
    assert (code, errors) == (2, "error: '/nowhere/file': No such file or directory; check the path\n")


@pytest.mark.parametrize("module", ["launch.train", "launch.calibrate", "launch.plan"])
def test_a_flag_file_that_is_missing_is_one_line(module):
    """ml_collections reads the flag while flags are being defined."""
    done = commands.run(module, "--flagfile=/nowhere")
    problem = "Unable to open flagfile: [Errno 2] No such file or directory: '/nowhere'; check --flagfile"
    assert (done.returncode, done.stderr) == (2, f"error: {problem}\n")


@pytest.mark.parametrize("columns", ["0", "²", "wide", "-3"])
def test_columns_that_are_no_width_do_not_count(columns):
    for arguments in ((), ("--help",)):
        done = commands.run("launch.parts", *arguments, COLUMNS=columns)
        assert done.returncode == 0 and len(done.stdout.splitlines()) > 5 and not done.stderr


@pytest.mark.parametrize(
    "number, fix",
    [
        (errno.EISDIR, "Is a directory; a file must be there; move the folder away"),
        (errno.ENOENT, "No such file or directory; check the path"),
        (errno.EROFS, "Read-only file system; make the file system writable"),
        (errno.ENOSPC, "No space left on device; make room there"),
        (errno.ELOOP, "Too many levels of symbolic links; choose another path"),
    ],
)
def test_errors_of_the_system_name_the_file_and_the_fix(number, fix):
    assert command.one_line(OSError(number, os.strerror(number), "runs/metrics.jsonl")).startswith(f"'runs/metrics.jsonl': {fix}")


def test_what_cannot_be_written_says_why(tmp_path, monkeypatch):
    long = str(tmp_path / ("x" * 300))
    for check in (command.folder, command.output):
        for path, why in (("/proc/x", "/proc takes no files"), (long, "File name too long")):
            if not path.startswith("/proc") or pathlib.Path("/proc").is_dir():
                with pytest.raises(command.UserError, match=rf"cannot be written \({why}\); choose another --out"):
                    check("out", path)

        def read_only(dir):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), dir)

        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "TemporaryFile", read_only)
            with pytest.raises(command.UserError, match=r"\(Read-only file system\)"):
                check("out", str(tmp_path / "x"))
