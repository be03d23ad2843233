"""launch/train.py as a user runs it: one line per error, and signals after which a run continues bit for bit."""

import copy
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys

from absl import flags
import pytest

from launch import command, config_file, elastic, join
from tests import commands

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = [
    "--config.model.depth=1",
    "--config.model.width=8",
    "--config.model.heads=1",
    "--config.model.hidden=8",
    "--config.model.context=8",
    "--config.data.sample_bytes=4",
]
EVERY, STEPS = 200, 600  # enough steps that a run is still under way when two signals reach it
LONG = [f"--config.steps={STEPS}", "--config.log_every=4", f"--config.eval.every={EVERY}", f"--config.checkpoint.every={EVERY}"]


class Place:
    """A directory with a text, and `launch.train` started in the repository's root."""

    def __init__(self, folder):
        self.folder = folder
        self.text = folder / "text"
        self.text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
        (folder / "empty").touch()
        # Every program is compiled once for all runs here.
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("DECJAX_TEST_CACHE") or str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def command(self, *args, shorthand="smoke,workers=2", workdir="run"):
        command = [sys.executable, "-m", "launch.train"]
        if shorthand is not None:
            command += [f"--config=configs/lm.py:{shorthand}", *TINY, f"--config.data.path={self.text}"]
        return command + ([f"--workdir={self.folder / workdir}"] if workdir else []) + list(args)

    def run(self, command):
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=commands.TIMEOUT_S, env=self.environment
        )

    def interrupt(self, command, number):
        """Run until the first line with a loss, then send a signal; return the exit code and all lines of stdout."""
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=self.environment
        ) as process:
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if " loss " in line and process.poll() is None and number:
                    process.send_signal(number)
                    number = None
            stderr = process.stderr.read()
        assert stderr == "", stderr
        return process.returncode, lines


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("launch"))


def forked(command, **environment):
    """Run a command of `Place`; faster, for commands that receive no signal."""
    return commands.run(*command[2:], **environment)


def one_error(result, code=2):
    """Return the only line on stderr, without its prefix."""
    assert result.returncode == code, result.stderr + result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


# -- Bad input --------------------------------------------------------------------------------------------------------

# name -> (arguments, shorthand, workdir, the value named in the error, the fix)
MISTAKES = {
    "unknown topology": ([], "smoke,workers=2,topology=moebius", "a", "'moebius'", "one_peer_exponential"),
    "graph of one worker": ([], "smoke,workers=1,topology=ring", "a", "'ring'.*got 1", "method 'local'"),
    "hypercube of twelve": ([], "smoke,workers=12,topology=hypercube", "a", "'hypercube'.*12", "'base_k'"),
    "indivisible batch": (["--config.batch_size=11"], "smoke,workers=2", "a", "batch_size=11.*workers=2", "use 10 or 12"),
    "missing data": (
        ["--config.data.path=/nowhere/text"],
        "smoke,workers=2",
        "a",
        "'/nowhere/text'",
        "give a file or folder of text",
    ),
    "empty data": (
        ["--config.data.path={folder}/empty"],
        "smoke,workers=2",
        "a",
        "{folder}/empty",
        "give a text file or a folder of text files",
    ),
    "odd heads": (["--config.model.heads=3"], "smoke,workers=2", "a", "heads=3: width=8", "a multiple of 6"),
    "few devices": ([], "smoke,workers=6", "a", "workers=6.*4 devices", "workers=4 or simulate"),
    "unknown key": ([], "smoke,colour=3", "a", "'colour'", "topology"),
    "bad number": ([], "smoke,workers=many", "a", "'many'", "whole number"),
    "unknown word": ([], "smoke,optimizer=adamant", "a", "'adamant'", "accum_adamw"),
    "unknown field": (["--config.colour=red"], "smoke,workers=2", "a", "config.colour is unknown", "the config has across_hosts"),
    "no workdir": ([], "smoke,workers=2", None, "--workdir", "--help"),
    "empty workdir": (["--workdir="], "smoke,workers=2", None, "--workdir is empty", "such as runs/lm"),
    "empty resume_from": (["--resume_from="], "smoke,workers=2", "a", "--resume_from is empty", "leave it out"),
    "unwritable workdir": ([], "smoke,workers=2", "text/run", "text/run", "choose another --workdir"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_with_value_and_fix(place, name):
    args, shorthand, workdir, value, fix = MISTAKES[name]
    command = place.command(*(arg.format(folder=place.folder) for arg in args), shorthand=shorthand, workdir=workdir)
    few = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"} if name == "few devices" else {}
    message = one_error(forked(command, **few))
    assert re.search(value.format(folder=re.escape(str(place.folder))), message), message
    assert fix in message, message
    assert not (place.folder / "a").exists(), "a refused run leaves a work directory behind"


@pytest.mark.parametrize(
    "path, reason",
    [
        ("README.md", "does not end in .py"),
        ("configs/nope.py", "No such file"),
        ("", "''"),
        ("configs/lm.py:colour=3", "'colour' is unknown"),
    ],
)
def test_a_config_that_cannot_be_loaded_is_told(path, reason):
    assert reason in config_file.complaint(["launch.train", "--config=configs/lm.py", f"--config={path}", "--x"])
    assert config_file.complaint(["launch.train", "--config", "configs/lm.py:smoke"]) == ""


@pytest.mark.parametrize(
    "shorthand, field, told",
    [
        (
            "",
            "topology.k=3",
            "--config.topology.k: topology is a name with options in parentheses; write --config.topology='base_k(k=3)'",
        ),
        ("topology=base_k(k=2)", "topology.k=3", "write --config.topology='base_k(k=3)'"),
        ("topology=random_matching(seed=1,rounds=4)", "topology.rounds=8", "'random_matching(seed=1,rounds=8)'"),
        ("mixer=choco(codec=int8)", "mixer.codec.block=64", "write --config.mixer.codec='int8(block=64)'"),
        ("", "topology.colour=3", "no topology has colour; python -m launch.parts topology lists them"),
        ("", "eval.every.x=3", "eval.every is a plain value, 50, and has no fields; write --config.eval.every=VALUE"),
        ("", "mixer.gamma=0.5", "config.mixer.gamma is unknown: mixer 'exact' has codec, rounds; gamma belongs to choco, "),
        ("", "reducer.rank=4", "method 'decentralized' has mixer and optimizer, no reducer; methods with reducer: allreduce, "),
        ("method=allreduce", "topology=ring", "method 'allreduce' has reducer and optimizer, no topology; methods with topology: "),
        ("", "eval_every=5", "config.eval_every is unknown; did you mean eval.every?"),
        ("", "learning_rate=1", "config.learning_rate is unknown; did you mean schedule.learning_rate?"),
        ("", "model.depht=3", "model 'resnet' has depth, norm, width; did you mean model.depth?"),
        (
            "",
            "data.sample_bytes=3",
            "task 'images' has augment, dataset, partition, path, smoothing, validation; sample_bytes belongs to lm",
        ),
        ("", "mixer=choco", "mixer is a section with the fields codec, name, rounds; set one of them, or choose"),
    ],
)
def test_a_field_that_the_config_lacks_is_told_with_where_it_belongs(shorthand, field, told):
    found = config_file.complaint(["launch.train", f"--config=configs/digits.py:{shorthand}", f"--config.{field}"])
    assert told in found and "\n" not in found, found


def test_fields_that_the_config_has_are_taken():
    fields = ["--config.mixer.gamma", "0.5", "--config.eval.every=3", "--noconfig.simulate", "--config.topology=base_k(k=3)"]
    assert config_file.complaint(["launch.train", "--config=configs/digits.py:mixer=choco", *fields]) == ""
    assert config_file.complaint(["launch.sweep", "--config=configs/digits.py", "--", "--config.mixer.gamma=1"]) == ""


@pytest.mark.parametrize(
    "given, value, fix",
    [
        (("a:1", 2, 5), "--process_index=5", "from 0 to 1"),
        (("a:1", 0, 0), "--num_processes=0", "at least 1"),
        (("a", 1, 0), "--coordinator=a:", "HOST:PORT"),
        (("a:65536", 1, 0), "--coordinator=a:65536", "PORT ≤ 65535"),  # JAX would wait for it for minutes
        (("no such host:1", 1, 0), "--coordinator=no such host:1", "HOST:PORT"),
        ((None, 2, None), "--num_processes=2", "--coordinator=HOST:PORT"),
        (("a:1", 2, None), "needs", "--process_index"),
    ],
)
def test_coordinator_flags_that_do_not_fit_are_refused(given, value, fix):
    with pytest.raises(command.UserError, match=f"{value}.*{fix}"):
        join.check_flags(*given)
    join.check_flags("a:1", 2, 1)


def test_the_launcher_s_flag_of_elastic_runs_says_whose_it_is(monkeypatch):
    monkeypatch.delenv(elastic.KEYS, raising=False)
    values = flags.FlagValues()
    values["elastic"] = copy.deepcopy(flags.FLAGS["elastic"])
    for argv in (["--elastic", "--workdir=runs/lm"], ["--elastic=127.0.0.1:1"]):
        with pytest.raises(
            command.UserError, match="flag --elastic=.*: only a launcher sets it; write python -m launch.local"
        ) as error:
            command.parsed(["launch.train", *argv], values)
        assert "\n" not in str(error.value)


def test_more_devices_than_any_machine_has_are_refused_before_they_are_made():
    flags.FLAGS.mark_as_parsed()
    for workers, each in ((10**6, 1), (1, 10**5), (0, 10**5)):
        with pytest.raises(command.UserError, match="use fewer"):
            join.set_up_devices(workers, devices_of_worker=each)


def test_an_apostrophe_does_not_cost_the_last_quote():
    for text in ("this mixer's mixing is not linear; use mixer 'exact'", "mixing is not linear; use mixer 'exact'"):
        assert command.one_line(ValueError(text)) == text


def test_outputs_are_tried_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for text, figure, reason in (
        (tmp_path / "none/a.png", True, "No such file"),
        (tmp_path / "a.xyz", True, "'xyz'; use one of"),
        (tmp_path, False, "it is a folder"),
        ("", False, "--out is empty; give the path of a file"),
        (tmp_path / "a", True, "needs a file type, as in plan.png; use one of"),
        ("/proc/none", False, "takes no files"),
    ):
        with pytest.raises(command.UserError, match=reason):
            command.output("out", str(text), figure)
    for text in (tmp_path / "file/run", "", "/proc/run", "/proc/self/run"):
        with pytest.raises(command.UserError, match="choose a(nother)? --workdir"):
            command.folder("workdir", str(text))
    command.output("out", str(tmp_path / "a.png"), figure=True)
    command.folder("workdir", str(tmp_path / "a/b"))
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


# -- A run, and what can go wrong with its directory ------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(place):
    """An uninterrupted run."""
    result = place.run(place.command(*LONG, workdir="finished"))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert f"averaged model after {STEPS} steps" in result.stdout
    units = re.findall(r"nats/\w+", result.stdout)
    assert len(units) > 1 and {*units} == {"nats/byte"}, "progress and summary speak of one unit"
    return place.folder / "finished"


def summary(workdir):
    """Return the final results except times."""
    values = json.loads((workdir / "summary.json").read_text())
    return {key: value for key, value in values.items() if key not in ("time_s", "goodput")}


def evaluations(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {
        row["step"]: {key: value for key, value in row.items() if key not in ("time_s", "tokens_per_s")}
        for row in rows
        if row["kind"] == "eval"
    }


def test_signals_stop_a_run_that_then_continues_bit_for_bit(place, finished):
    workdir = place.folder / "interrupted"
    command = place.command(*LONG, workdir="interrupted")
    stopped_at = 0
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        returncode, lines = place.interrupt(command, number)
        assert returncode == code
        assert (f"continuing from step {stopped_at}" in lines) == bool(stopped_at)
        told = [line for line in lines if line.startswith("interrupted by ")]
        assert len(told) == 1 and number.name in told[0] and str(workdir) in told[0]
        step = int(re.search(r"saved step (\d+)", told[0])[1])
        assert stopped_at < step < STEPS and (workdir / "checkpoints" / str(step)).is_dir()
        assert not (workdir / "summary.json").exists()
        # The last line is the command that continues the run.
        python, *arguments = shlex.split(lines[-1])
        assert python == "python" and arguments == command[1:]
        command, stopped_at = [sys.executable, *arguments], step
    result = place.run(command)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert f"continuing from step {stopped_at}" in result.stdout
    assert summary(workdir) == summary(finished)
    ours, theirs = evaluations(workdir), evaluations(finished)
    assert STEPS in ours and set(ours) <= set(theirs) == {EVERY, 2 * EVERY, STEPS}
    assert all(ours[step] == theirs[step] for step in ours)
    assert summary(finished)["eval_loss"] < 4  # of ln 256 = 5.5: the model had learned something that could be disturbed


def damage(workdir, how):
    """Damage the newest checkpoint's state; the run counts as unfinished.

    All its large files are damaged, because an array may be stored in several files of which one is read. Orbax reads arrays with
    flipped bits without complaint.
    """
    (workdir / "summary.json").unlink()
    files = (workdir / "checkpoints" / str(STEPS) / "state").rglob("*")
    for path in [path for path in files if path.is_file() and path.stat().st_size > 1000]:
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(
            {
                "cut": content[:middle],
                "garbled": b"garbage!" * (len(content) // 8),
                "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            }[how]
        )


def test_unusable_directories_are_refused(place, finished):
    def other_config():
        return place.command(*LONG, "--config.schedule.learning_rate=0.5", workdir="finished")

    def foreign(name, files):
        for path, content in files.items():
            path = place.folder / name / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return place.command(workdir=name)

    before = summary(finished), evaluations(finished)
    cases = {
        "another config": (other_config(), r"schedule.learning_rate: [0-9.]+ there, 0.5 here", "choose another --workdir"),
        "foreign": (foreign("foreign", {"checkpoints/10/model.pt": "x"}), "foreign holds", "choose another --workdir"),
        "foreign config": (
            foreign("foreign2", {"checkpoints/10/model.pt": "x", "config.json": "[1]"}),
            "foreign2",
            "choose another --workdir",
        ),
    }
    for name, (arguments, value, fix) in cases.items():
        message = one_error(forked(arguments))
        assert re.search(value, message) and fix in message, f"{name}: {message}"
    assert (summary(finished), evaluations(finished)) == before
    assert (place.folder / "foreign/checkpoints/10/model.pt").read_text() == "x"
    assert (place.folder / "foreign2/config.json").read_text() == "[1]"


@pytest.mark.parametrize("how", ["cut", "garbled", "flip"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(place, finished, how):
    shutil.copytree(finished, place.folder / how)
    damage(place.folder / how, how)
    result = forked(place.command(*LONG, workdir=how))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    (told,) = [line for line in result.stdout.splitlines() if "damaged" in line]
    assert re.fullmatch(rf"checkpoint .*{how}/checkpoints/{STEPS} is damaged \(.+\); continuing from step {2 * EVERY}", told), told
    assert summary(place.folder / how) == summary(finished) and evaluations(place.folder / how) == evaluations(finished)


@pytest.mark.parametrize("every, what", [(4, "metrics of step"), (EVERY, f"checkpoint of step {EVERY}")])
def test_a_full_disk_is_one_line(place, finished, every, what):
    """A file-size limit below the event file or a checkpoint. The programs are those of `finished`, already cached."""
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    command = place.command(*LONG, f"--config.log_every={every}", workdir=f"full{every}")
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=commands.TIMEOUT_S,
        env=place.environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, room[1])),
    )
    message = one_error(result)
    assert re.search(rf"{what}.* cannot be written in .*full{every}.*make room", message), message


def test_divergence_names_the_step_and_keeps_the_last_good_checkpoint(place):
    """Step 1 moves the parameters by 10⁹, which is finite and saved; two steps later the loss is not."""
    command = place.command(
        "--config.schedule.learning_rate=1e10",
        "--config.clip_norm=0",
        "--config.log_every=100",
        "--config.eval.every=100",
        "--config.checkpoint.every=2",
        shorthand="smoke,workers=2,optimizer=sgdm",
        workdir="diverged",
    )
    message = one_error(forked(command), code=4)
    good = int(re.search(r"the last good checkpoint is of step (\d+)", message)[1])
    assert int(re.search(r"loss is (?:nan|inf|-inf) on worker [01] in step (\d+)", message)[1]) >= good
    assert "Lower schedule.learning_rate" in message
    assert [path.name for path in (place.folder / "diverged/checkpoints").iterdir()] == [str(good)]
    assert not (place.folder / "diverged/summary.json").exists()
