"""decjax/files.py: a file is written as a whole, and a failure leaves nothing behind; what else reads names of files."""

import os
import pathlib

import pytest

from decjax import costmodel, files
from decjax.train import workdir
from launch import command, members


@pytest.fixture
def no_replacing(monkeypatch):
    """As on a disk that fails at the last moment."""

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", fail)


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path, shared):
    for text in ("old", "new"):
        files.write_whole(tmp_path / "file", text, shared)
        assert (tmp_path / "file").read_text() == text and os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, no_replacing):
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_pipe_is_written_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files.write_whole(path, "text")
    assert os.read(reader, 10) == b"text" and path.is_fifo()
    os.close(reader)


def test_profiles_and_sweeps_leave_nothing_behind(tmp_path, no_replacing):
    cluster = costmodel.load("configs/clusters/t4_infiniband.json")[0]
    with pytest.raises(OSError):
        costmodel.save(tmp_path / "profile.json", cluster)
    with pytest.raises(command.UserError, match="cannot be used"):
        members.claim(tmp_path, "configs/lm.py", [])
    assert os.listdir(tmp_path) == []


def test_only_numbers_as_python_writes_them_are_checkpoints(tmp_path):
    for name in ("4", "10", "²", "٣", "007", "tmp", "8.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert workdir.steps_saved(tmp_path) == [4, 10]
