"""launch/slurm.py: the batch file that it writes, and what it refuses."""

import pathlib
import random
import re
import shlex
import subprocess
import sys

import pytest

from launch import batch_file, command, slurm
from tests import commands

TRAIN = ["--config=configs/quadratics.py:workers=0,simulate=false", "--workdir=runs/q"]


def job(**changed):
    usual = dict(name="q", folder=pathlib.Path("runs/q/slurm"), arguments=TRAIN, typed="python -m launch.slurm …")
    return batch_file.Job(**usual | dict(nodes=4, gpus_per_node=8, time="04:00:00") | changed)


def lines(found, start):
    """Return the lines of a file that begin with a word, with continued lines joined."""
    return [line for line in batch_file.text(found).replace("\\\n", " ").splitlines() if line.startswith(start)]


def options(found):
    return [line.split(maxsplit=1)[1] for line in lines(found, "#SBATCH")]


def written(*arguments, passed=TRAIN, code=0):
    done = commands.run("launch.slurm", "--dry_run", "--time=04:00:00", *arguments, "--", *passed)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


# -- The file ---------------------------------------------------------------------------------------------------------


def test_a_task_a_node_with_all_of_its_gpus():
    assert options(job()) == [
        "--job-name=q",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--time=04:00:00",
        "--signal=TERM@180",
        "--requeue",
        "--open-mode=append",
        "--output=runs/q/slurm/%j.log",
    ]
    (start,) = lines(job(), "srun")
    program = r"\S+/python\S* -m launch\.train +--config=\S+ +--workdir=runs/q$"
    assert re.search(rf"--cpu-bind=none .*--output=runs/q/slurm/%j\.%t\.log +{program}", start)


def test_a_task_a_gpu():
    found = job(tasks_per_node=8, cpus_per_task=12)
    assert {"--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12"} <= set(
        options(found)
    ) and "--exclusive" not in options(found)
    assert "--cpus-per-task=12" in lines(found, "srun")[0]  # Slurm 22.05 no longer takes it from the job


def test_containers_setup_and_more_options():
    pyxis = job(container="--container-image=nvcr.io/jax:1 --container-mounts=/data", setup="module load python")
    assert re.search(
        r"log +--container-image=nvcr.io/jax:1 --container-mounts=/data +python -m launch.train", lines(pyxis, "srun")[0]
    )
    assert lines(pyxis, "module load python")
    assert (
        " apptainer exec --nv decjax.sif python -m launch.train"
        in lines(job(container="apptainer exec --nv decjax.sif"), "srun")[0]
    )
    assert {"--partition=gpu", "--account=me"} <= set(options(job(sbatch="--partition=gpu --account=me")))
    assert "--exclude=n[3-4]" in options(job(exclude="n[3-4]"))


def test_a_sweep_is_a_job_array():
    passed = ["--config=configs/lm.py", "--sweep=seed=0,1,2,3,4,5,6,7", "--workdir=runs/s", "--", "--config.steps=5"]
    found = written("--nodes=1", "--gpus_per_node=1", "--array=0-7%2", passed=passed)
    assert "#SBATCH --array=0-7%2\n" in found and "--output=runs/s/slurm/%A_%a.log" in found
    assert re.search(r'-m launch\.sweep \\\n +--index="\$SLURM_ARRAY_TASK_ID" \\\n', found)
    assert 'sbatch --array="$SLURM_ARRAY_TASK_ID"' in found


def test_the_command_prints_the_file_and_finds_the_size_of_a_node():
    found = written("--nodes=4", "--gpus_per_node=8", "--exclude=n7")
    assert found.startswith("#!/bin/bash\n# Written by: python -m launch.slurm")
    assert "--config.local_size=8\n" in found and "--job-name=q\n" in found and "DECJAX_EXCLUDE:-n7}" in found
    assert not pathlib.Path(commands.ROOT, "runs/q").exists()
    assert "--config.local_size=2\n" in written("--nodes=4", "--tasks_per_node=2")
    for given in (("--nodes=1", "--gpus_per_node=8"), ("--nodes=4", "--gpus_per_node=1")):
        assert "local_size" not in written(*given)


def end(tmp_path, code, tries="", bad=(), alive=True, refused=False, exclude="n9"):
    """Run a file whose tasks end with an exit code; return the file's own exit code, and the Slurm commands it runs."""
    probed = "|".join(f"*nodelist={node}*" for node in bad) or "none"
    for name, text in {
        "srun": f'case "$*" in *--overlap*) case "$*" in {probed}) exit 1;; esac;; *) exit {code};; esac',
        "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "scontrol $*" >>said; fi',
        "squeue": "echo 7" if alive else "true",
        "sbatch": f'echo "TRIES=$DECJAX_TRIES sbatch $*" >>said; exit {int(refused)}',
        "timeout": 'shift; exec "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "said").write_text("")
    (tmp_path / "job.sh").write_text(batch_file.text(job(gpus_per_node=0, exclude=exclude)))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    environment |= {"DECJAX_TRIES": tries} if tries else {}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    return done.returncode, (tmp_path / "said").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2, 4])
def test_a_run_that_is_finished_or_wrong_is_over(tmp_path, code):
    assert end(tmp_path, code) == (code, [])


def test_a_run_that_has_saved_comes_back_unless_it_was_cancelled(tmp_path):
    assert end(tmp_path, 143) == (143, ["scontrol requeue 7"])
    assert end(tmp_path, 143, alive=False) == (143, []) and end(tmp_path, 137, alive=False) == (137, [])


def test_after_a_failure_it_goes_on_without_the_nodes_that_are_not_well(tmp_path):
    again = "TRIES=1 sbatch --exclude=n9 runs/q/slurm/job.sh"
    assert end(tmp_path, 137) == (137, [again])
    assert end(tmp_path, 3, bad=["n2"]) == (3, [again.replace("n9", "n9,n2")])
    assert end(tmp_path, 3, tries="3") == (3, [])
    # Without the node there are too few: the job waits in the queue until they are available.
    assert end(tmp_path, 3, tries="1", refused=True)[1] == [again.replace("=1", "=2"), "scontrol requeue 7"]


# -- What the shell and sbatch make of it ------------------------------------------------------------------------------

ODD = [*"ab.=:,/~;&|`'\"$()[]{}<>*?!#%\\ \t\n", "²", "$HOME", "$(id)", "EOF", "--", "-n", ""]


def odd_words(chance, count):
    return ["".join(chance.choices(ODD, k=chance.randrange(8))) for _ in range(count)]


def run_by_a_shell(folder, job):
    """Return the words that srun gets from a file run by sbatch, and the directory of compiled programs."""
    (folder / "srun").write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$JAX_COMPILATION_CACHE_DIR" >said\n')
    (folder / "srun").chmod(0o755)
    (folder / "job.sh").write_text(batch_file.text(job))
    (folder / "said").unlink(missing_ok=True)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/nowhere", "NODE_DIR": "/local disk", "SLURM_ARRAY_TASK_ID": "3"}
    checked = subprocess.run(["bash", "-n", "job.sh"], cwd=folder, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    *words, compiled = (folder / "said").read_text().removesuffix("\0").split("\0")
    assert sorted(path.name for path in folder.iterdir()) == ["job.sh", "said", "srun"]
    return words, compiled


def test_two_hundred_odd_arguments_come_to_the_tasks_as_they_are(tmp_path):
    chance = random.Random(0)
    for k in range(20):
        given = odd_words(chance, 10)
        name = "".join(word for word in odd_words(chance, 1) if word.isprintable())
        folder = pathlib.Path(f"runs/topk(0.{k})~;&`#[x]")
        container = ["apptainer", *(word for word in odd_words(chance, 4) if "$" not in word)] if k % 2 else []
        found = job(name=name, folder=folder, arguments=given, typed="\n".join(given), container=shlex.join(container))
        words, compiled = run_by_a_shell(tmp_path, found)
        assert compiled == f"{folder}/compiled" and f"--output={folder}/%j.%t.log" in words
        start = words.index("--open-mode=append") + 2
        python = ["python"] if container else [sys.executable]
        assert words[start:] == [*container, *python, "-m", "launch.train", *given]


def test_variables_of_the_node_are_filled_in_and_the_index_comes_first(tmp_path):
    found = job(container="--container-mounts=$NODE_DIR:`/data`", array="0-7", module="launch.sweep", arguments=["a", "--", "b"])
    words, _ = run_by_a_shell(tmp_path, found)
    start = words.index("--open-mode=append") + 2
    assert words[start:] == [
        "--container-mounts=/local disk:`/data`",
        *("python", "-m", "launch.sweep", "--index=3", "a", "--", "b"),
    ]


def of_sbatch(line):
    """Return the words of a line of options, as sbatch reads them (`_get_argument` in its source)."""
    words, word, quote, escaped = [], None, "", False
    for letter in line:
        if escaped:
            word, escaped = word + letter, False
        elif letter == "\\":
            word, escaped = word or "", True
        elif quote:
            word, quote = (word, "") if letter == quote else (word + letter, quote)
        elif letter in "\"'":
            word, quote = word or "", letter
        elif letter == "#":
            break
        elif letter.isspace():
            words, word = [*words, *([] if word is None else [word])], None
        else:
            word = (word or "") + letter
    return [*words, *([] if word is None else [word])]


def test_sbatch_reads_odd_options_as_they_are():
    chance = random.Random(1)
    for _ in range(50):
        name, *further = ("".join(letter for letter in word if letter.isprintable()) for word in odd_words(chance, 3))
        found = job(name=name, sbatch=shlex.join(["--partition", "gpu", *(f"--comment={word}" for word in further)]))
        read = [of_sbatch(line) for line in options(found)]
        assert read[0] == [f"--job-name={name}"] and ["--partition", "gpu"] in read
        assert read[-2:] == [[f"--comment={word}"] for word in further]


def test_nodes_in_brackets_are_not_taken_for_names_of_files(tmp_path):
    (tmp_path / "n3").touch()
    assert end(tmp_path, 3, bad=["n2"], exclude="n[3-4]")[1] == ["TRIES=1 sbatch --exclude=n[3-4],n2 runs/q/slurm/job.sh"]


# -- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--nodes=0"], "--nodes=0: 0 is not a positive integer"),
        (["--nodes=2", "--gpus_per_node=8", "--tasks_per_node=3"], "--tasks_per_node=3: must divide --gpus_per_node=8"),
        (["--nodes=2", "--time=4h"], "--time=4h: must be in Slurm's format"),
        (["--nodes=2", "--time=3"], "--save_s=180: must be more than 0 and a minute less than --time=3"),
        (["--nodes=1", "--array=all"], "--array=all"),
        (["--nodes=2", "--array=0-7"], "--array with 2 tasks: a member of a sweep has one"),
        (["--nodes=2", "--module=launch.sweep"], "--array is missing"),
        (
            ["--nodes=2", "--gpus_per_node=8"],
            "config.workers=4 on 2 nodes × 8 GPUs: all GPUs must belong to workers.*use workers=16",
        ),
    ],
)
def test_mistakes_are_told_before_the_job_waits(arguments, problem):
    told = written(*arguments, passed=["--config=configs/quadratics.py:workers=4,simulate=false", "--workdir=runs/q"], code=2)
    assert re.fullmatch(rf"error: .*{problem}.*\n", told) if "config." in problem else problem in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "changed, problem",
    [
        (dict(time="1-99:99"), "--time=1-99:99: .*minutes and seconds ≤ 59"),
        (dict(time="01:60:00"), "--time=01:60:00"),
        (dict(array="5-2"), "--array=5-2: must be in Slurm's format"),
        (dict(array="0-7:0"), "--array=0-7:0"),
        (dict(array="0-7%0"), "--array=0-7%0"),
        (dict(array="²"), "--array=²"),
        (dict(array="9" * 5000), "must be in Slurm's format"),
        (dict(array=f"0-7%{'9' * 5000}"), "must be in Slurm's format"),
        (dict(time="9" * 5000), "must be in Slurm's format"),
        (dict(name="a\nb"), "--name='a.nb': must be one line"),
        (dict(setup="a\nb"), "--setup='a.nb': must be one line"),
        (dict(setup="echo 'a"), "--setup=.*: invalid shell .*correct it"),
        (dict(setup="cat <<X"), "--setup=.*: invalid shell .*here-document"),  # the rest of the file would be its text
        (dict(sbatch="--account=me --nodes=7"), "--sbatch=--nodes=7: launch.slurm sets --nodes itself; use its own options"),
        (dict(sbatch="-a 0-3"), "--sbatch=-a: launch.slurm sets --array itself"),  # four runs in one directory
        (dict(sbatch="-N7"), "--sbatch=-N7: launch.slurm sets --nodes itself"),
        (dict(setup="module load x \\"), "--setup=.*: must be one line"),
        (dict(container="a\nb"), "--container='a.nb': must be one line"),
        (dict(container="a 'b"), "--container=.*: No closing quotation; close the quote"),
        (dict(sbatch="--comment='a"), "--sbatch=.*: No closing quotation; close the quote"),
        (dict(exclude="n3;n4"), "--exclude=n3;n4: must be names of nodes"),
        (dict(exclude="n3\n"), "must be names of nodes"),
        (dict(folder=pathlib.Path("-x/slurm")), "workdir '-x': Slurm allows no"),
        (dict(folder=pathlib.Path("a\nb/slurm")), "Slurm allows no"),
    ],
)
def test_what_would_fail_in_the_job_is_refused(changed, problem):
    with pytest.raises(command.UserError, match=problem):
        slurm.check(job(gpus_per_node=0, nodes=1)._replace(**changed))


@pytest.mark.parametrize(
    "arguments, passed, problem",
    [
        (["--nodes=1", "--array=0-2"], ["--sweep=seed=0,1"], "--array=0-2: the sweep has 2 runs; use --array=0-1"),
        (["--nodes=1", "--array=0-1"], ["--sweep=seed=0,1", "--", "--config.seed=3"], "seed is set by the sweep"),
        (["--nodes=1", "--array=0-1"], ["--sweep=seed=0,1", "--", "--resume_from=runs/none"], "--resume_from=runs/none has no"),
        (["--nodes=1"], ["--resume_from=runs/none"], "--resume_from=runs/none has no checkpoint"),
        (["--nodes=1"], ["--elastic"], "--elastic is an option of the launcher"),
        (["--nodes=3"], [], "workers=4 on 3 processes"),
    ],
)
def test_what_launch_train_or_launch_sweep_would_refuse_is_refused(arguments, passed, problem):
    usual = ["--config=configs/quadratics.py:workers=4,simulate=false", "--workdir=runs/q"]
    told = written(*arguments, passed=[*usual, *passed], code=2)
    assert told.startswith("error: ") and problem in told and told.count("\n") == 1


def test_without_slurm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(command.UserError, match="sbatch not found.*--dry_run"):
        slurm.submit(job(folder=tmp_path / "slurm"))


@pytest.mark.parametrize(
    "text, expected",
    [("90", 5400), ("90:30", 5430), ("04:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("1-00:00:05", 86405)],
)
def test_times_as_slurm_writes_them(text, expected):
    assert slurm.seconds(text) == expected
