"""launch/sweep.py: what it runs, how many at a time, what it skips, continues and tabulates; some sweeps with real training."""

import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from absl import flags
import pytest
import rich.console

from launch import command, config_file, members, processes, sweep, sweep_table
from tests import commands

TINY = (
    "--config.model.depth=1",
    "--config.model.width=8",
    "--config.model.hidden=8",
    "--config.model.context=8",
    "--config.data.sample_bytes=1",
    "--config.eval.num_windows=2",
    "--config.eval.every=100",
)


def launch(*arguments, **environment):
    return commands.run("launch.sweep", *arguments, COLUMNS="120", **environment)


# -- With real training -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two texts, one of them missing, with two seeds; then the same command again."""
    workdir = tmp_path_factory.mktemp("sweep")
    command = [
        "--config=configs/lm.py:smoke,workers=1,method=local,steps=4",
        "--sweep=data.path=launch,missing;seed=0,1",
        f"--workdir={workdir}",
        "--",
        *TINY,
    ]
    # Compiled programs are shared by the runs: most of a tiny run is compilation.
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = launch("--parallel=2", *command, **environment)
    finished = workdir / "data.path=launch,seed=0" / "metrics.jsonl"
    before = finished.stat().st_mtime_ns
    (workdir / "data.path=launch,seed=1" / "summary.json").unlink()  # as if it had been interrupted
    second = launch(*command, **environment)
    return workdir, first, second, before == finished.stat().st_mtime_ns


def test_every_combination_is_trained_in_its_own_directory(swept):
    workdir, _, _, _ = swept
    for seed in (0, 1):
        config = json.loads((workdir / f"data.path=launch,seed={seed}" / "config.json").read_text())
        assert (config["steps"], config["seed"], config["model"]["width"], config["method"]["name"]) == (4, seed, 8, "local")


def test_a_failed_run_is_told_and_the_others_go_on(swept):
    workdir, first, _, _ = swept
    assert first.returncode == 1
    assert first.stdout.count("FAILED") == 2 and "data path 'missing' does not exist" in first.stdout
    log = workdir / "data.path=missing,seed=1" / "train.log"
    assert str(log) in first.stdout and "data path 'missing' does not exist" in log.read_text()
    assert first.stdout.count("eval_loss 5.") == 2


def test_again_it_skips_the_finished_and_continues_the_others(swept):
    workdir, _, second, untouched = swept
    assert untouched and "data.path=launch,seed=0: already finished" in second.stdout
    assert "continuing from step 4" in (workdir / "data.path=launch,seed=1" / "train.log").read_text()
    assert (workdir / "data.path=launch,seed=1" / "summary.json").exists() and second.stdout.count("FAILED") == 2


def test_the_table_has_mean_and_spread_over_seeds(swept):
    workdir, _, second, _ = swept
    paths = [workdir / f"data.path=launch,seed={seed}" / "summary.json" for seed in (0, 1)]
    one, two = (json.loads(path.read_text())["eval_loss"] for path in paths)
    row = next(line.split() for line in second.stdout.splitlines() if re.match(r" *launch +2 ", line))
    assert float(row[2]) == pytest.approx((one + two) / 2, abs=1e-4)
    assert float(row[4]) == pytest.approx(abs(one - two) / 2**0.5, abs=1e-4)  # n − 1 = 1 in the denominator
    assert next(line.split()[1] for line in second.stdout.splitlines() if re.match(r" *missing +0/2 ", line)) == "0/2"


def test_the_table_is_there_at_any_time_and_changes_nothing(swept, tmp_path):
    workdir, _, second, _ = swept
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    arguments = ["--config=configs/lm.py:smoke,workers=1,method=local,steps=4", "--sweep=data.path=launch,missing;seed=0,1"]
    result = launch("--table", *arguments, f"--workdir={workdir}", "--", *TINY)
    assert result.returncode == 0 and "running" not in result.stdout
    rows = [
        [line for line in text.splitlines() if re.match(r" *(launch|missing) +[02]", line)]
        for text in (result.stdout, second.stdout)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 2
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    nothing = launch("--table", *arguments, f"--workdir={tmp_path / 'none'}")
    assert nothing.returncode == 2 and "holds no sweep" in nothing.stderr and not (tmp_path / "none").exists()


def test_another_config_is_refused_in_the_same_directory(swept):
    workdir, _, _, _ = swept
    result = launch("--config=configs/lm.py:smoke", "--sweep=seed=0", f"--workdir={workdir}")
    assert result.returncode == 2 and "holds a sweep of another config" in result.stderr


# -- What to run ------------------------------------------------------------------------------------------------------


def test_shorthand_keys_go_into_the_argument_and_fields_into_flags(tmp_path):
    swept = members.parse_sweep("topology=ring,torus; schedule.learning_rate=1e-3")
    found = members.expand("configs/lm.py:smoke", swept, {"topology"}, tmp_path, ["--debug"])
    assert [member.name for member in found] == [
        "topology=ring,schedule.learning_rate=1e-3",
        "topology=torus,schedule.learning_rate=1e-3",
    ]
    assert found[1].arguments == [
        "--config=configs/lm.py:smoke,topology=torus",
        "--config.schedule.learning_rate=1e-3",
        "--debug",
        f"--workdir={found[1].directory}",
    ]
    (bare,) = members.expand("configs/lm.py", {"data.path": ["/a/b"]}, {"topology"}, tmp_path, [])
    assert bare.arguments[0] == "--config=configs/lm.py" and bare.directory.parent == tmp_path


def test_commas_within_brackets_divide_no_values():
    nested = "hierarchical(local_size=4,outer=base_k(k=3))"
    assert members.parse_sweep(f"topology={nested},ring;seed=0,1") == {"topology": [nested, "ring"], "seed": ["0", "1"]}
    config = f"configs/lm.py:topology={nested},codec=topk(fraction=0.1,values=int4)"
    members.check_apart(config, {"outer": ["1"], "values": ["2"]}, [])  # options of a part are not keys
    with pytest.raises(command.UserError, match="topology is set by the sweep, .* 'topology=hierarchical.*k=3..'; leave it out"):
        members.check_apart(config, {"topology": ["ring"]}, [])


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "''"),
        ("seed", "'seed'"),
        ("seed=0;", "''"),
        ("=1", "'=1'"),
        ("seed=", "empty"),
        ("seed=0,,1", "empty"),
        ("seed=0,0", "twice"),
        ("seed=0;seed=1", "twice"),
    ],
)
def test_invalid_sweeps_are_refused(text, problem):
    with pytest.raises(command.UserError, match=problem):
        members.parse_sweep(text)


def test_a_config_file_may_define_its_sweep(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("SWEEP = 'seed=0,1'\n")
    assert members.sweep_of(config_file.load_module(str(path)), str(path), "") == "seed=0,1"
    path = tmp_path / "other.py"  # bytecode is cached by the module's time stamp
    path.write_text("def get_sweep(arg):\n    return 'seed=0' if arg == 'smoke' else 'seed=0,1'\n")
    assert members.sweep_of(config_file.load_module(str(path)), str(path), "smoke") == "seed=0"


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--config=configs/lm.py:smoke"], "no --sweep is given and configs/lm.py defines none"),
        (["--config=configs/lm.py:smoke", "--sweep=method=allreduce,magic"], "magic"),
        (
            ["--config=configs/lm.py:smoke,topology=ring", "--sweep=topology=torus,star"],
            "topology is set by the sweep, 'topology=torus,star', and in --config, 'topology=ring'; leave it out of --config",
        ),
        (
            ["--config=configs/lm.py:smoke", "--sweep=seed=0,1", "--", "--config.seed=3"],
            "seed is set by the sweep, 'seed=0,1', and in the options behind --, '--config.seed=3'; leave it out of the options",
        ),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0,x"], "seed='x' must be a whole number"),
        (["--config=configs/lm.py:smoke", "--sweep=sed=0"], "'sed' is unknown; use some of seed"),
        (["--config=configs/lm.py:smoke", "--sweep=topology.k=0.1"], "topology is a name with options in parentheses"),
        (["--config=configs/lm.py:smoke", "--sweep=mixer.gamma=0.1"], "mixer 'exact' has codec, rounds; gamma belongs to choco"),
        (["--config=configs/lm.py:smoke,workers=2", "--sweep=steps=4,0"], "steps=0 must be at least 1"),
        (["--config=configs/lm.py:smoke,workers=2", "--sweep=topology=ring,torus(rows=3)"], "rows"),
        (
            ["--config=configs/lm.py:smoke,workers=2", "--sweep=scale=linear,sqrt", "--", "--config.schedule.learning_rate=0.1"],
            "scale=linear has no effect with --config.schedule.learning_rate; leave one of them out",
        ),
        (
            ["--config=configs/lm.py:smoke,scale=sqrt", "--sweep=schedule.learning_rate=0.1,0.2"],
            "scale=sqrt has no effect with --config.schedule.learning_rate; leave one of them out",
        ),
        *(
            (
                ["--config=configs/lm.py:smoke,workers=2", f"--sweep={swept}", "--", *extra],
                f"sweep: {swept.partition('=')[0]} is set by the sweep, '{swept}', and in the options behind --, '{told or extra[0]}'",
            )
            for swept, extra, told in (
                ("every=2,4", ["--config.method.every=8"], None),
                ("every=2,4", ["--config.method.every", "8"], "--config.method.every=8"),
                ("every=1", ["--config.method.every=8"], None),
                ("order=awc,atc", ["--config.method.order=atc"], None),
                (
                    "schedule.learning_rate=1e-3,1e-2",
                    ["-config.schedule.learning_rate", "0.1"],
                    "--config.schedule.learning_rate=0.1",
                ),
                ("steps=100,200", ["--config.steps=50"], None),
                ("mixer=choco,deepsqueeze", ["--config.mixer.name=choco"], None),
                ("optimizer=lion(b1=0.95)", ["--config.optimizer.b1=0.5"], None),
            )
        ),
        (
            ["--config=configs/lm.py:smoke", "--sweep=scale=linear,sqrt", "--", "--config.schedule.learning_rate=0.1"],
            "scale=linear has no effect with --config.schedule.learning_rate",
        ),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--workdir=x"], "--workdir behind --"),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--config", "configs/gpt.py"], "--config behind --"),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--stpes=3"], "seed=0: Unknown command line flag 'stpes'"),
        (
            ["--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--num_processes=2"],
            "--num_processes is an option of the launcher",
        ),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--debug", "x"], "unexpected argument 'x'"),
        (
            ["--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--resume_from=runs/none"],
            "--resume_from=runs/none has no checkpoint; give the --workdir of a run",
        ),
        (["--config=configs/lm.py:smoke", "--sweep=seed=1,+1"], "seed=1 and seed=+1 are the same run; leave one out"),
        (["--config=configs/lm.py:smoke", "--sweep=every=2,4;method.every=8"], "are the same run"),
        (
            ["--config=configs/lm.py:smoke,workers=2", "--sweep=seed=0", "--processes=3"],
            "workers=2 on 3 processes: 2 devices must be divided evenly among the processes; start 2 processes",
        ),
        (["--config=configs/none.py", "--sweep=seed=0"], "configs/none.py"),
        (["--sweep=seed=0"], "--config"),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0,1", "--index=2"], "index=2: the sweep has 2 runs; use 0 to 1"),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0,1", "--parallel=0"], "--parallel=0: 0 is not"),
        (["--config=configs/lm.py:smoke", "--sweep=seed=0,1", "--processes=0"], "--processes=0: 0 is not"),
        (
            ["--config=configs/lm.py:smoke", "--sweep=seed=0,1", "--processes=2000"],
            "--processes=2000: 2000 is not an integer in the range [1, 1024]",
        ),
        (
            ["--config=configs/lm.py:smoke", f"--sweep={';'.join(f'f{number}=0,1' for number in range(40))}"],
            f"sweep: its values make {2**40} runs; there may be at most 10000",
        ),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(arguments, problem, tmp_path):
    line = refused(f"--workdir={tmp_path / 'sweep'}", *arguments)
    assert problem in line and "\n" not in line and not (tmp_path / "sweep").exists()


def refused(*arguments):
    """Return what the command says about its arguments, without starting it."""
    values = flags.FlagValues()
    sweep.define(values)
    with pytest.raises((command.UserError, config_file.ConfigFileError)) as error:
        sweep.planned(values, command.parsed(["launch.sweep", *arguments], values)[1:])
    return command.one_line(error.value)


def test_a_mistake_ends_the_command(tmp_path):
    result = launch(f"--workdir={tmp_path / 'sweep'}", "--config=configs/lm.py:smoke", "--sweep=seed=0", "--", "--config.seed", "3")
    assert result.returncode == 2 and not (tmp_path / "sweep").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: sweep: seed is set by the sweep")


def test_options_behind_that_leave_what_is_swept_are_taken(tmp_path):
    """One rate for all methods, and other fields of the same name."""
    values = flags.FlagValues()
    sweep.define(values)
    extra = ["--config.schedule.learning_rate=0.1", "--config.eval.every=100", "--config.optimizer.weight_decay", "0"]
    swept = "method=allreduce,decentralized;optimizer=adamw,sgdm"
    command.parsed(["launch.sweep", "--config=configs/lm.py:smoke", f"--sweep={swept}", f"--workdir={tmp_path}"], values)
    assert len(sweep.planned(values, extra)) == 4


# -- Running, with stand-ins for launch.train -------------------------------------------------------------------------

# Print its directory, and act according to the directory's name.
STAND_IN = """
import json, os, pathlib, signal, sys, time
workdir = pathlib.Path(next(a for a in sys.argv if a.startswith("--workdir=")).partition("=")[2])
say = lambda text: os.write(1, (text + "\\n").encode())
book = workdir.parent / "book"
note = lambda text: book.open("a").write(f"{text} {workdir.name}\\n")
signal.signal(signal.SIGTERM, lambda *_: (say("saved"), note("saved"), sys.exit(143)))
note("begins")
say(f"{os.getpid()} in {workdir.name}")
if "fails" in workdir.name:
    say("error: it fails; do not")
    sys.exit(2)
if "vanishes" in workdir.name:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if "sleeps" in workdir.name else 0.3)
together, deadline = int(os.environ.get("TOGETHER", 1)), time.monotonic() + 60  # It ends only after so many have begun.
while book.read_text().count("begins") < together and time.monotonic() < deadline:
    time.sleep(0.02)
values = dict.fromkeys(("eval_loss", "local_eval_loss_min", "local_eval_loss_max", "time_s", "bytes_per_step_per_worker"), 1.5)
(workdir / "summary.json").write_text(json.dumps(values))
note("ends")
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Sweep members with these values, whose processes are stand-ins, and the lines these printed."""
    monkeypatch.setattr(processes, "python", lambda module, arguments: [sys.executable, "-c", STAND_IN, module, *arguments])
    monkeypatch.setattr(processes, "POLL_S", 0.02)

    def make(*values):
        return members.expand("configs/lm.py", {"v": list(values)}, (), tmp_path, [])

    return make, lambda: (tmp_path / "book").read_text().splitlines() if (tmp_path / "book").exists() else []


def run(all_members, caught=(), parallel=1, chosen=None, num_processes=1, **how):
    """Return (failures, everything displayed)."""
    console = rich.console.Console(file=io.StringIO(), width=100, soft_wrap=True, **how)
    chosen = [*range(len(all_members))] if chosen is None else chosen
    failures = sweep.Sweep(all_members, chosen, parallel, num_processes).run([*caught], console)
    return failures, console.file.getvalue()


@pytest.mark.parametrize("parallel", [1, 2, 9])
def test_so_many_are_under_way_at_a_time(stand_ins, parallel, monkeypatch):
    make, book = stand_ins
    monkeypatch.setenv("TOGETHER", str(min(parallel, 4)))
    assert run(make(*"abcd"), parallel=parallel)[0] == 0
    under_way, most = 0, 0
    for line in book():
        under_way += 1 if line.startswith("begins") else -1
        most = max(most, under_way)
    assert most == min(parallel, 4) and len(book()) == 8


def test_each_says_what_it_says_in_its_own_log_and_failures_do_not_stop_the_others(stand_ins):
    make, book = stand_ins
    found = make("a", "fails", "vanishes", "b")
    failures, shown = run(found, parallel=4)
    assert failures == 2 and {member.log.read_text().split()[2] for member in found} == {
        f"v={v}" for v in ("a", "fails", "vanishes", "b")
    }
    assert "[2/4] v=fails: FAILED, it ended with exit code 2; error: it fails; do not" in shown
    assert "[3/4] v=vanishes: FAILED, it was killed by SIGKILL" in shown and shown.count("eval_loss 1.5000") == 2
    (found[2].directory / "train.log").open("a").write("error: of an earlier try\n")
    failures, shown = run(found)
    assert failures == 2 and shown.count("already finished") == 2 and "earlier" not in shown
    assert book().count("begins v=a") == 1 and book().count("begins v=fails") == 2


def test_an_index_runs_one_member(stand_ins):
    make, book = stand_ins
    found = make(*"abc")
    assert "[2/3] v=b: eval_loss" in run(found, chosen=[1])[1]
    assert book() == ["begins v=b", "ends v=b"]


def test_a_pipe_gets_lines_and_a_terminal_a_table(stand_ins):
    make, _ = stand_ins
    found = make(*"abc")
    found[0].directory.mkdir()
    (found[0].directory / "config.json").write_text('{"steps": 200}')
    (found[0].directory / "metrics.jsonl").write_text('{"step": 40, "kind": "train", "loss": 2.5}\n{"step": 50, "ki')
    _, shown = run(found, parallel=2, force_terminal=True)
    assert re.search(r"v=a +40/200 +2\.5000 +0:00:00", shown) and "0 finished, 0 failed, 1 waiting" in shown
    for member in found:
        (member.directory / "summary.json").unlink()
    _, shown = run(found, parallel=2)
    assert "\x1b" not in shown and "waiting" not in shown and len(shown.splitlines()) == 6
    (found[0].directory / "summary.json").unlink()
    console = rich.console.Console(file=io.StringIO(), width=100)
    console.print(sweep_table.unfinished(found))
    assert re.search(r"v=a +40/200 +2\.5000 +0:00:0\d ago", console.file.getvalue())


def test_several_processes_of_a_member_are_those_of_launch_local(stand_ins, monkeypatch):
    make, _ = stand_ins
    lines = []
    start = processes.start
    monkeypatch.setattr(processes, "start", lambda line, **options: lines.append(line[3:]) or start(line, **options))
    (member,) = make("a")
    assert run([member], num_processes=3)[0] == 0
    assert lines == [["launch.local", "--num_processes=3", "--", *member.arguments]]


def test_an_interrupt_stops_the_children_and_the_sweep(stand_ins, monkeypatch):
    make, book = stand_ins
    found, caught = make("sleeps_1", "sleeps_2", "never"), []

    def interrupt_when_they_listen(seconds):
        time.sleep(seconds)
        if len(book()) == 2 and not caught:
            caught.append(signal.SIGINT)

    monkeypatch.setattr(processes, "time", type("time", (), {"sleep": interrupt_when_they_listen, "monotonic": time.monotonic}))
    console = rich.console.Console(file=io.StringIO(), width=100, soft_wrap=True)
    assert sweep.Sweep(found, [0, 1, 2], 2).run(caught, console) == 0
    assert sorted(book()[2:]) == ["saved v=sleeps_1", "saved v=sleeps_2"] and not found[2].directory.exists()
    assert console.file.getvalue().count(": interrupted") == 2 and "FAILED" not in console.file.getvalue()


def test_a_member_that_another_sweep_runs_is_put_off_and_then_seen_to_be_finished(stand_ins):
    make, book = stand_ins
    found = make("a", "b")
    held = found[0].lock()
    # The directory stays locked while the child lives, whatever happens to the sweep.
    child = sweep.start(found[0], held, 1)
    held.close()
    failures, shown = run(found)
    assert failures == 0 and "[1/2] v=a: another process is running it" in shown and "[1/2] v=a: already finished" in shown
    assert book().count("begins v=a") == 1 and child.process.process.wait() == 0


SWEEP_OF_STAND_INS = """
import pathlib, sys
import rich.console
from launch import members, processes, sweep
stand_in, workdir = sys.argv[1:]
processes.python = lambda module, arguments: [sys.executable, "-c", stand_in, module, *arguments]
found = members.expand("configs/lm.py", {"v": ["sleeps_1", "sleeps_2", "never"]}, (), pathlib.Path(workdir), [])
sweep.Sweep(found, [0, 1, 2], 2).run([], rich.console.Console())
"""


def test_a_killed_sweep_leaves_no_children(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SWEEP_OF_STAND_INS, STAND_IN, str(tmp_path)], cwd=commands.ROOT)
    logs = [tmp_path / f"v=sleeps_{i}" / "train.log" for i in (1, 2)]
    wait_for(lambda: all(log.exists() and " in " in log.read_text() for log in logs))
    process.kill()
    process.wait()
    ids = [int(log.read_text().split()[0]) for log in logs]
    wait_for(lambda: not any(is_alive(number) for number in ids), 10)
    assert [log.read_text().splitlines()[-1] for log in logs] == ["saved", "saved"]


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(number):
    try:
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- Killed, with real training ---------------------------------------------------------------------------------------


def rows(directory):
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_killed_sweep_continues_with_the_same_command(tmp_path):
    """Two runs at a time, of two processes each; the result equals that of an uninterrupted sweep."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    often = ["--config.log_every=5", "--config.checkpoint.every=10", "--config.steps=150"]
    slowly = tmp_path / "slowly"  # while the file exists, a run lasts for half a minute
    often += [f"--config.data.waits_for={slowly}", "--config.data.wait_s=0.2"]

    def line(workdir, *more):
        arguments = [
            "--parallel=2",
            "--processes=2",
            *more,
            "--config=experiments/paced.py:workers=2,simulate=false",
            "--sweep=seed=0,1",
            f"--workdir={workdir}",
            "--",
        ]
        return [sys.executable, "-m", "launch.sweep", *arguments, *often]

    def run_to_the_end(workdir):
        return subprocess.run(
            line(workdir), cwd=commands.ROOT, env=environment, capture_output=True, text=True, timeout=commands.TIMEOUT_S
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_to_the_end(whole).returncode == 0
    slowly.touch()
    process = subprocess.Popen(
        line(killed), cwd=commands.ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: any(row["step"] >= 25 for row in rows(killed / "seed=0")))
    process.kill()
    process.wait()
    table = subprocess.run(line(killed, "--table"), cwd=commands.ROOT, env=environment, capture_output=True, text=True)
    assert table.returncode == 0 and re.search(r"seed=0 +\d+/150", table.stdout), table.stdout + table.stderr
    slowly.unlink()
    result = run_to_the_end(killed)  # at once: its members may still be exiting
    assert result.returncode == 0, result.stdout + result.stderr
    assert "continuing from step" in (killed / "seed=0" / "train.log").read_text()
    for seed in (0, 1):  # a training row is a mean since the last one, so only evaluations have equal steps
        one, other = (
            [(row["step"], row["loss"]) for row in rows(top / f"seed={seed}") if row["kind"] == "eval"] for top in (whole, killed)
        )
        assert one == other and one[-1][0] == 150
