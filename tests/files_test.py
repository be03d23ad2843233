"""decjax/files.py: a file is written completely or not at all; and other readers of file names."""

import json
import os
import pathlib

import pytest

from decjax import costmodel, errors, files
from decjax.contrib import placement
from decjax.contrib.images.task import DATASETS
from decjax.contrib.translation import parallel
from decjax.errors import CheckpointError
from decjax.tasks import sources
from decjax.train import metrics, summary, workdir
from experiments import compare, crashes, trials
from experiments.results_log import ResultsLog
from experiments.trials import Broken
from launch import command, config_file, members, sweep


@pytest.fixture
def no_replacing(monkeypatch):
    """Like a disk that fails at the last moment."""

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
    assert crashes.saving(tmp_path)
    (tmp_path / "checkpoints/10/extra").mkdir()
    (tmp_path / "checkpoints/10/extra/metadata").write_text('{"checksums": [1, 2]}')
    assert crashes.last_state(tmp_path) == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", ".lock"])
def test_a_folder_where_a_run_has_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises((CheckpointError, OSError)) as error:  # launch.train reports both on one line
        workdir.claim(tmp_path, {"workers": 1})
    line = command.one_line(error.value)
    assert f"{name}': Is a directory; a file must be there; move the folder away" in line and "\n" not in line


def test_a_file_where_a_run_has_a_folder_is_named(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(OSError) as error:
        metrics.TensorBoard(tmp_path, 0)
    told = str(errors.not_written("the run", tmp_path, error.value))
    assert f"(File exists); move {tmp_path}/tensorboard away, and the same command continues" in told


def test_odd_values_in_the_files_of_a_run_do_not_count(tmp_path):
    """Files that someone may have edited by hand."""
    (tmp_path / ".lock").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "config.json").write_text('{"workers": 1, "checkpoint": {"every": 0}}')
    rows = '{"step": 4, "kind": "train", "loss": "x"}\n{"step": 9, "kind": ["train"]}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "summary.json").write_text(json.dumps(dict.fromkeys((*members.TABULATED, *summary.REPORTED), "x")))
    member = members.Member({}, tmp_path, [])
    assert member.summary() is None and member.progress() is None and summary.read(tmp_path) is None
    lines = metrics.JsonLines(tmp_path, 9, 20)
    lines.close()
    assert lines.recorded == {"train": 4}
    (tmp_path / "summary.json").unlink()
    with workdir.claim(tmp_path, {"workers": 1}):
        assert not (tmp_path / "metrics.jsonl").exists()


# -- Reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def nested(depth):
    return "{" + '"a": {' * depth + "}" * depth + "}"


@pytest.mark.parametrize(
    "text, problem",
    [
        (nested(100_000), "it is nested more than 64 levels deep"),
        (nested(300), "it is nested more than 64 levels deep"),  # below the limit of Python's own reader
        ('{"a": ' + "[" * 65 + "1" + "]" * 65 + "}", "it is nested more than 64 levels deep"),
        ("[1]", "it holds a list instead of a JSON object"),
        ("{", "Expecting property name"),
    ],
)
def test_a_damaged_document_is_refused_with_one_reason(tmp_path, text, problem):
    path = tmp_path / "config.json"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(ValueError, match=problem) as error:
        files.read_json(path)
    assert "\n" not in str(error.value)


def test_a_document_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1 << 20)
    (tmp_path / "config.json").write_text('{"a": "' + "b" * (1 << 20) + '"}')
    with pytest.raises(ValueError, match="it is larger than 1 MB"):
        files.read_json(tmp_path / "config.json")


def test_a_document_may_be_nested(tmp_path):
    (tmp_path / "config.json").write_text(nested(63))
    assert list(files.read_json(tmp_path / "config.json")) == ["a"]


def test_documents_of_runs_and_sweeps_that_are_nested_too_deeply(tmp_path):
    for name in ("config.json", "summary.json", "sweep.json", "options.json"):
        (tmp_path / name).write_text(nested(100_000))
    member = members.Member({}, tmp_path, [])
    assert member.summary() is None and member.progress() is None and not trials.Trial(tmp_path).finished
    with pytest.raises(command.UserError, match="cannot be used: it is nested more than 64 levels"):
        members.claim(tmp_path, "configs/lm.py", [])
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"config.json cannot be read .it is nested more than 64 levels"):
        workdir.claim(tmp_path, {})


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "folder"])
def test_only_regular_files_are_read(tmp_path, pipe, name):
    """Opening a pipe without a writer would block forever."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory" if name == "folder" else "a pipe or a device"):
        files.open_regular(tmp_path / name)


def test_pipes_as_input_of_any_kind_are_refused(tmp_path, pipe):
    os.symlink(pipe, tmp_path / "train.de")
    os.symlink(pipe, tmp_path / "data_batch_1.bin")
    (tmp_path / "test_batch.bin").touch()
    for read in (
        lambda: costmodel.load(pipe),
        lambda: placement.load(pipe),
        lambda: placement.load_device_order(pipe),
        lambda: files.read_json(pipe),
        lambda: parallel.read(str(tmp_path), "train", ("de", "en")),
        lambda: DATASETS["cifar10"].read(str(tmp_path)),
        lambda: config_file.load_module(str(pipe)),
        lambda: ResultsLog(pipe),
        lambda: ResultsLog(pathlib.Path("/dev/full")),
    ):
        with pytest.raises((ValueError, config_file.ConfigFileError, Broken), match="a pipe or a device"):
            read()
    with pytest.raises(ValueError, match="holds no text"):
        sources.read(str(pipe))


def test_pipes_where_a_run_has_files_are_refused(tmp_path, pipe):
    for name in ("config.json", "metrics.jsonl", ".member", "train.log", ".writer"):
        os.symlink(pipe, tmp_path / name)
    (tmp_path / "other").mkdir()
    os.symlink(pipe, tmp_path / "other" / ".lock")
    member = members.Member({}, tmp_path, [])
    for read in (
        lambda: metrics.read(tmp_path),
        lambda: workdir.claim(tmp_path, {"workers": 1}),
        lambda: trials.Trial(tmp_path).rows(),
        lambda: compare.load(tmp_path),
        lambda: compare.read_metrics(tmp_path / "metrics.jsonl"),
        lambda: members.last_line(tmp_path / "metrics.jsonl"),
        lambda: workdir.claim(tmp_path / "other", {"workers": 1}),
        lambda: workdir.writing(tmp_path).__enter__(),
        member.lock,
        lambda: sweep.start(member, tmp_path.open, 1),
    ):
        with pytest.raises((OSError, Broken, compare.RunError, CheckpointError), match="a pipe or a device"):
            read()
