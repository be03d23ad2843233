"""experiments.paper: how rows are judged, and a run from start to end with tiny models."""

import gzip
import importlib
import json
import math
import os
import pathlib
import types

import numpy as np
import pytest

from decjax import config, errors
from experiments import noise_floor, paper, quality, results_log, script, seeds, studies, tiny, trials
from experiments.results_log import ResultsLog
from launch import command
from tests import commands

LOG = pathlib.Path(__file__).parents[1] / "experiments/results/paper.jsonl"  # of the pages


def test_equal_means_overlap_and_less_than_a_sigma():
    """Intervals are ± 2σ of the mean; a single seed has none and is equal to nothing."""
    one = seeds.spread([27.7, 27.8, 27.9])
    assert one.mean == pytest.approx(27.8) and one.sigma == pytest.approx(0.1) and one.error == pytest.approx(0.2 / math.sqrt(3))
    assert one.text(2) == "27.80 ± 0.20" and seeds.spread([27.7]).text(1) == "27.7"
    near, far = seeds.spread([27.72, 27.82, 27.92]), seeds.spread([27.6, 27.66, 27.72])
    assert seeds.equal(one, near) and seeds.equal(near, one)
    assert abs(one.mean - far.mean) > max(one.sigma, far.sigma) and not seeds.equal(one, far)
    rooted = math.sqrt((0.1**2 + 0.3**2) / 2)
    for apart in (0.99, 1.01):
        other = seeds.Spread(27.8 + apart * rooted, 0.3, 3)
        assert seeds.equal(one, other) == (apart < 1)
    assert not seeds.equal(seeds.spread([27.8]), seeds.spread([27.8]))
    assert seeds.equal(seeds.spread([27.8, 27.8]), seeds.spread([27.8, 27.8]))


def test_intervals_that_touch_overlap():
    """Accuracies are counts: the intervals of (2, 3, 4) and (6, 8, 10) of 359 end at the same number, despite rounding."""
    for other in (6, 8, 10), (16, 18, 20):
        one, two = (seeds.spread([k / 359 for k in counts]) for counts in ((2, 3, 4), other))
        touching = seeds.Spread(one.mean + one.error + two.error, two.sigma, 3)
        assert not seeds.apart(one, touching) and not seeds.apart(touching, one)
        assert seeds.apart(one, touching._replace(mean=1.001 * touching.mean))


def test_names_are_folders():
    assert trials.name_of("AccumAdam, one-peer 0.002 3") == "accumadam_one_peer_0_002_3"


def test_other_options_have_other_folders(tmp_path):
    """A smoke run must not pass for a full one."""
    one, other = (
        trials.trial(tmp_path, "ring 0.01 0", f"configs/digits.py:{size}", {"seed": 0}) for size in ("smoke", "steps=300")
    )
    assert one.workdir != other.workdir and one == trials.trial(tmp_path, "ring 0.01 0", one.config, {"seed": 0})


def test_the_exponent_is_that_of_a_power():
    assert noise_floor.exponent({N: 3.0 / N for N in noise_floor.WORKERS}) == pytest.approx(-1)
    found = noise_floor.exponents({N: [3.0 / N, 2.0 / N**1.2] for N in noise_floor.WORKERS})
    assert found.mean == pytest.approx(-1.1) and found.text(1) == "-1.1 ± 0.3"
    assert math.isnan(noise_floor.exponent({4: 1.0, 8: math.nan}))


def test_a_noise_floor_that_diverged_is_shown_as_such(tmp_path):
    floors = {"SGD, an exchange every step": {4: [1.0, math.nan], 8: [0.5, 0.6]}}
    assert cells(noise_floor.tabulate(floors))[0][1].startswith("nan")
    noise_floor.draw(str(tmp_path / "floor.png"), floors)


def result(*values):
    return quality.Result(1e-3, {1e-3: 0.5}, list(values), [0.1, 0.3])


def test_verdicts_need_seeds_on_both_sides():
    first = result(27.7, 27.8, 27.9)
    assert quality.verdict(result(27.75, 27.8, 27.85), first) == "equal"
    assert quality.verdict(result(27.0, 27.1, 27.2), first) == "not equal"
    assert quality.verdict(result(27.6, 27.66, 27.72), first) == "undecided"
    assert quality.verdict(result(27.8), first) == "one seed"
    table = quality.tabulate(
        "translation", {studies.ALL_REDUCE: first, "D-Adam, AER": result(None), "AccumAdam, AER": result(27.0, None, 27.2)}
    )
    rows = cells(table)
    assert rows[1][:2] == ("D-Adam, AER", "1 of 1 diverged")
    assert rows[2][1:4] == ("27.10 ± 0.28, 1 of 3 diverged", "-0.70", "not equal")
    lucky = result(27.7, 27.8, None)
    assert quality.verdict(lucky, first) == quality.verdict(first, lucky) == "not equal"


def cells(table):
    """A tuple for each row."""
    return list(zip(*(list(column.cells) for column in table.columns), strict=True))


def test_rows_are_compared_with_the_row_that_they_name():
    """D-Adam on 8 workers against all-reduce on 8."""
    values = {"all-reduce, N = 4": 1.0, "D-Adam, N = 4": 1.1, "all-reduce, N = 8": 2.0, "D-Adam, N = 8": 2.1}
    rows = cells(quality.tabulate("workers", {name: result(value) for name, value in values.items()}))
    assert [row[2] for row in rows] == ["", "+0.1000 (+10.0 %)", "", "+0.1000 (+5.0 %)"]
    assert [row[4] for row in rows] == ["0.2"] * 4  # Ξ


def test_grids_go_down_where_everything_diverges():
    best, losses = seeds.best_rate(lambda rate: 1 / rate if rate < 3e-3 else math.inf, (8e-3, 1.6e-2, 3.2e-2))
    assert best == 2e-3 and sorted(losses) == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]


def test_the_whole_way_with_tiny_models(tmp_path):
    """With synthetic data. tests/heterogeneity_test.py runs the digits from start to end."""
    line = ("experiments.paper", f"--out={tmp_path}", "--only=noise_floor,translation", "--smoke")
    first = commands.run(*line)
    assert first.returncode == 0, first.stderr
    again = commands.run(*line)
    assert again.stdout == first.stdout
    floors = json.loads((tmp_path / "smoke/noise_floor.json").read_text())
    assert all(np.isfinite(list(found.values())).all() for found in floors.values())
    rows = json.loads((tmp_path / "smoke/translation.json").read_text())
    assert {*rows} == {studies.ALL_REDUCE, "AccumAdam, one-peer"}
    assert np.isfinite([row["values"][0] for row in rows.values()]).all()
    for name in ("noise_floor", "translation"):
        assert (tmp_path / f"smoke/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_exit_code_of_divergence_is_known_to_launchers():
    assert errors.Diverged.exit_code == command.DIVERGED != command.USER_ERROR == errors.ConfigError.exit_code


# -- The results log ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Runs that only write a summary; those with seed 3 diverge. Return the seeds that were trained."""
    seeds = []

    def train(trial):
        seeds.append(seed := dict(trial.fields)["seed"])
        trial.workdir.mkdir(parents=True, exist_ok=True)
        (trial.workdir / "summary.json").write_text(json.dumps({"eval_loss": 2.0 + seed}))
        return seed != 3

    monkeypatch.setattr(trials.Pool, "train", lambda pool, trial: train(trial))
    return seeds


def trial(folder, seed):
    return trials.Trial(folder / str(seed), "configs/lm.py:steps=3", (("seed", seed),))


def test_what_the_book_holds_is_not_trained_again(made, tmp_path):
    path = tmp_path / "results.jsonl"
    log = ResultsLog(path)
    assert [log.result(trial(tmp_path / "a", seed)) for seed in (0, 3, 0)] == [{"eval_loss": 2.0}, None, {"eval_loss": 2.0}]
    again = ResultsLog(path)  # the directories may be gone by then
    assert [again.result(trial(tmp_path / "b", seed)) for seed in (0, 3)] == [{"eval_loss": 2.0}, None] and made == [0, 3]
    assert again.result(trial(tmp_path / "b", 1), lambda run: {"twice": 2 * run.summary()["eval_loss"]}) == {"twice": 6.0}


def test_tables_need_no_data_where_the_book_has_the_trainings(tmp_path):
    """Smoke runs in the log, and runs with other data, change nothing."""
    log = tmp_path / "results.jsonl"
    lines = LOG.read_text().splitlines(keepends=True)
    smoke = {"config": "configs/cifar.py:smoke", "fields": {"data.path": "01234567"}, "numbers": {}}
    log.write_text("".join(lines) + json.dumps(smoke) + "\n")
    line = ("experiments.paper", f"--out={tmp_path}", f"--results={log}")
    done = commands.run(*line, "--only=cifar")
    assert done.returncode == 0 and "AccumAdam, one-peer" in done.stdout, done.stderr
    log.write_text("".join(line for line in lines if '"seed": 2' not in line))
    done = commands.run(*line, "--only=cifar")
    assert done.returncode == 2 and "cifar needs --cifar10" in done.stderr and done.stderr.count("\n") == 1


def test_parts_without_data_are_left_out_where_none_is_asked_for(monkeypatch, tmp_path, capsys):
    text = str(tiny.text(tmp_path / "text"))
    given = Flags(only=[], smoke=False, pages=None, multi30k=None, cifar10=None, shakespeare=text)
    monkeypatch.setattr(paper, "FLAGS", given)
    parts = paper.chosen(tmp_path, ResultsLog(tmp_path / "results.jsonl"))
    left_out = {"translation", "cifar", "gap_translation"}
    assert set(paper.PARTS) - set(parts) == left_out and parts["digits"] == "" and parts["shakespeare"] == text
    assert "cifar is left out: it needs --cifar10" in capsys.readouterr().out
    given.update(only=["digits", "cifar", "shakespeare"], shakespeare=None, smoke=True)
    made_up = {"digits": "", "cifar": str(tmp_path / "data" / "cifar10"), "shakespeare": str(tmp_path / "data" / "shakespeare")}
    assert paper.chosen(tmp_path, ResultsLog(tmp_path / "results.jsonl")) == made_up


def test_looking_for_data_trains_nothing(made, monkeypatch, tmp_path):
    """Also where rates are tuned on data without a flag, such as Shakespeare's plays."""
    given = Flags(only=["shakespeare"], smoke=False, pages=None, shakespeare=None)
    monkeypatch.setattr(paper, "FLAGS", given)
    with pytest.raises(SystemExit):
        paper.chosen(tmp_path, ResultsLog(tmp_path / "results.jsonl"))
    assert not made


class Flags(dict):
    """Flags as attributes, and by name with a value."""

    __getattr__ = dict.__getitem__

    def __getitem__(self, name):
        return types.SimpleNamespace(value=super().__getitem__(name))


def test_a_training_without_its_data_is_refused(tmp_path):
    log = ResultsLog(tmp_path / "results.jsonl")
    with pytest.raises(trials.NoData, match="give the path of its data"):
        log.result(trials.trial(tmp_path, "run", "configs/cifar.py:smoke", {"data.path": "0be870b2"}))


def test_the_book_knows_data_by_their_contents(made, tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(text)
    log = ResultsLog(tmp_path / "results.jsonl")
    for name in "abc":
        log.result(trials.trial(tmp_path, name, "configs/lm.py", {"data.path": str(tmp_path / name), "seed": 0}))
    assert made == [0, 0] and str(tmp_path) not in (tmp_path / "results.jsonl").read_text()


def test_a_line_that_is_cut_short_is_dropped_and_a_damaged_one_refused(made, tmp_path):
    path = tmp_path / "results.jsonl"
    ResultsLog(path).result(trial(tmp_path, 0))
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    ResultsLog(path).result(trial(tmp_path, 1))
    assert made == [0, 1] and len(path.read_text().splitlines()) == 2
    path.write_text(whole[:20] + "\n" + whole)
    with pytest.raises(trials.Broken, match="line 1 is not a line of a results log"):
        ResultsLog(path)
    path.write_text(whole.rstrip())  # an editor removed the final newline
    ResultsLog(path).result(trial(tmp_path, 2))
    assert ResultsLog(path).result(trial(tmp_path, 0)) and made == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        '{"my": "only copy"}',
        "notes",
        "[1]",
        '{"fields": {}, "numbers": {}}\n',
        '{"config": "a", "fields": {}, "numbers": 3}\n',
        "\n",
    ],
)
def test_a_file_that_is_no_book_is_refused_and_stays_as_it_is(content, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(trials.Broken, match="line 1 is not a line of a results log"):
        ResultsLog(path)
    assert path.read_text() == content


def test_a_full_disk_leaves_whole_lines(made, tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    ResultsLog(path).result(trial(tmp_path, 0))
    whole = path.read_text()
    log = ResultsLog(path)
    monkeypatch.setattr(results_log, "open", Short.open, raising=False)
    with pytest.raises(trials.Broken, match="No space left on device"):
        log.result(trial(tmp_path, 1))
    assert path.read_text() == whole


class Short:
    """An unbuffered file that accepts ten bytes."""

    def __init__(self, file):
        self._file = file

    @classmethod
    def open(cls, *arguments, **options):
        return cls(open(*arguments, **options))

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        return self._file.write(data[:10])


def test_a_damaged_summary_is_made_again_and_damaged_metrics_are_told(tmp_path):
    (tmp_path / "summary.json").write_text('{"eval_loss": 1.0}')
    assert trials.Trial(tmp_path).finished
    (tmp_path / "summary.json").write_text('{"eval_')
    assert not trials.Trial(tmp_path).finished
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n{"ki')
    with pytest.raises(trials.Broken, match="the same command trains again"):
        trials.Trial(tmp_path).rows()


def test_what_is_waiting_is_not_made_after_an_error():
    begun = []

    def do(item):
        begun.append(item)
        raise trials.Broken("refused")

    with pytest.raises(trials.Broken):
        trials.Pool(1).map(do, range(100))
    assert len(begun) < 100


def test_a_book_that_cannot_be_used_is_refused_at_once(tmp_path):
    """Devices and pipes are not opened, since reading them may never end. A results log without added runs is absent."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for path in tmp_path, tmp_path / "bytes", tmp_path / "bytes" / "results", tmp_path / "pipe", pathlib.Path("/dev/full"):
        with pytest.raises(trials.Broken, match="(give|choose) another --results"):
            ResultsLog(path)
    ResultsLog.of(tmp_path / "new", None)
    assert {path.name for path in tmp_path.iterdir()} == {"bytes", "pipe"}


def test_files_that_a_task_does_not_read_change_nothing(tmp_path):
    folder, plain = str(tiny.multi30k(tmp_path / "pairs")), tiny.text(tmp_path / "texts" / "a").parent
    before = trials.data_checksum(folder, "configs/translation.py"), trials.data_checksum(str(plain))
    for name in ("README.md", ".listing", "train.fr", "train.de.bak", "train.de.gz", "train.tok.de.gz"):
        (tmp_path / "pairs" / name).write_text("more")
    (plain / ".git").mkdir()
    for name in (".git/HEAD", "b.gz"):
        (plain / name).write_text("more")
    trials.data_checksum.cache_clear()
    assert (trials.data_checksum(folder, "configs/translation.py"), trials.data_checksum(str(plain))) == before


def test_a_damaged_file_of_data_is_one_line(tmp_path):
    whole = gzip.compress(b"eins zwei drei")
    for damaged in (whole[:-6], whole[:9] + b"xxxxxxxxxxxx", b"plain"):
        (tmp_path / "train.de.gz").write_bytes(damaged)
        trials.data_checksum.cache_clear()
        with pytest.raises(OSError, match="train.de.gz cannot be read"):
            trials.data_checksum(str(tmp_path), "configs/translation.py")


def test_other_data_at_the_same_path_are_another_run(tmp_path):
    """The same data under another name, or gzipped, count as the same."""
    text = tmp_path / "text"
    folders = []
    for content in "old", "new":
        text.write_text(content)
        trials.data_checksum.cache_clear()
        folders.append(trials.trial(tmp_path, "run", "configs/lm.py", {"data.path": str(text)}).workdir)
    assert folders[0] != folders[1]
    for folder, name, content in (("a", "train.de", b"ein"), ("b", "train.de.gz", gzip.compress(b"ein"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    assert len({trials.data_checksum(str(tmp_path / folder), "configs/translation.py") for folder in "ab"}) == 1
    (tmp_path / "renamed").write_text("new")
    assert trials.data_checksum(str(text)) == trials.data_checksum(str(tmp_path / "renamed"))


def test_a_training_that_diverged_is_not_made_again(tmp_path, monkeypatch):
    run, codes = trials.Trial(tmp_path, "configs/lm.py"), [command.DIVERGED]
    monkeypatch.setattr(trials, "start", lambda trial, cores, count: type("Ended", (), {"wait": lambda self: codes.pop()})())
    pool = trials.Pool()
    assert not pool.train(run) and not pool.train(run) and not codes


@pytest.mark.parametrize(("trainings", "each"), [(2, [{0, 2, 4}, {1, 3}]), (3, [{0, 3}, {1, 4}, {2}]), (6, [set()] * 6)])
def test_trainings_share_the_cores(trainings, each, monkeypatch):
    monkeypatch.setattr(trials.os, "sched_getaffinity", lambda pid: {4, 3, 2, 1, 0}, raising=False)
    pool = trials.Pool(trainings)
    assert [pool._shares.get_nowait() for _ in range(trainings)] == each


def test_rows_of_different_texts_are_refused():
    quality.check_texts("python", {"a": [{"corpus_order1_entropy": 2.4}, None], "b": [{"corpus_order1_entropy": 2.4}]})
    with pytest.raises(trials.Broken, match="different texts"):
        quality.check_texts("python", {"a": [{"corpus_order1_entropy": 2.4}], "b": [{"corpus_order1_entropy": 2.5}]})


# -- Studies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_row_of_a_study_is_a_run(name, tmp_path):
    """Its shorthand and fields are applied together, with the study's steps and workers."""
    trainings = quality.Runs(tmp_path, ResultsLog(tmp_path / "results.jsonl"), name, "", smoke=False)
    for method, row in trainings.study.rows.items():
        made = trainings.trial(method, 1e-3, seed=0)
        spec = config.read(config_of(made))
        assert spec.steps == round(row.longer * trainings.study.steps) and spec.simulate
        assert spec.schedule.options["learning_rate"] == 1e-3 and not spec.eval.local


def config_of(made):
    path, _, shorthand = made.config.partition(":")
    found = importlib.import_module(path.removesuffix(".py").replace("/", ".")).get_config(shorthand)
    found.update_from_flattened_dict(dict(made.fields))
    return found


def test_tokens_are_equal_however_many_workers(tmp_path):
    trainings = quality.Runs(tmp_path, ResultsLog(tmp_path / "results.jsonl"), "workers", "", smoke=False)
    of = {method: config_of(trainings.trial(method, 1e-3, 0)) for method in trainings.study.rows}
    assert len({made.steps * made.batch_size for made in of.values()}) == 1
    batches = quality.Runs(tmp_path, trainings.log, "batch", "", smoke=False)
    assert {config_of(batches.trial(method, 1e-3, 0)).batch_size for method in batches.study.rows} == {studies.GLOBAL_BATCH}


def test_rates_are_tuned_in_shorter_runs_with_a_seed_of_their_own(made, monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "read", lambda run: run.summary() | {"consensus_distance": 0.5})
    trainings = quality.Runs(tmp_path, ResultsLog(tmp_path / "results.jsonl"), "python", "", smoke=False)
    assert trainings.trial(studies.ALL_REDUCE, 1e-3, quality.TUNING_SEED).config.endswith("steps=1000")
    best, tried = trainings.tune(studies.ALL_REDUCE)
    assert set(made) == {quality.TUNING_SEED} and best in tried
    assert [own["eval_loss"] for own in trainings.made({studies.ALL_REDUCE: best})[studies.ALL_REDUCE]] == [2.0, 3.0, 4.0]


def test_rates_of_another_study_are_tuned_on_its_data(monkeypatch, tmp_path):
    """Rows of gap_shakespeare on the text of gap_both; then each row trains on the plays."""
    trained = []

    def train(pool, trial):
        trained.append(trial)
        trial.workdir.mkdir(parents=True)
        (trial.workdir / "summary.json").write_text(json.dumps({"eval_loss": dict(trial.fields)["schedule.learning_rate"]}))
        (trial.workdir / "metrics.jsonl").write_text(json.dumps({"kind": "train", "consensus_distance": 0.5}) + "\n")
        return True

    monkeypatch.setattr(trials.Pool, "train", train)
    text = str(tiny.text(tmp_path / "text"))
    trainings = quality.Runs(tmp_path, ResultsLog(tmp_path / "results.jsonl"), "gap_shakespeare", text, smoke=True)
    found = quality.run(trainings)
    assert [*found] == trainings.rows == [studies.ALL_REDUCE, studies.ACCUM_2]
    assert {result.rate for result in found.values()} == {studies.GAP.grid[0]} and all(len(r.values) == 1 for r in found.values())
    of = {seed: [trial for trial in trained if dict(trial.fields)["seed"] == seed] for seed in (quality.TUNING_SEED, 0)}
    assert len(of[0]) == len(of[quality.TUNING_SEED]) == 2 and len(trained) == 4
    assert {dict(trial.fields).get("data.path") for trial in of[0]} == {text}
    assert {dict(trial.fields).get("data.path") for trial in of[quality.TUNING_SEED]} == {None}
    assert {trial.workdir.parent.name for trial in of[0]} == {"gap_shakespeare"}


@pytest.mark.parametrize("old", ["", "old\n"])
def test_tables_are_written_into_pages(tmp_path, monkeypatch, old):
    page = tmp_path / "results" / "a.md"
    page.parent.mkdir()
    page.write_text(f"Before.\n\n<!-- table one -->\n{old}<!-- end -->\n\n<!-- table two -->\nkept\n<!-- end -->\n")
    monkeypatch.setattr(script.flags, "FLAGS", types.SimpleNamespace(pages=str(tmp_path)))
    table = script.table("", "loss")
    table.add_row("gossip", "1.5")
    for _ in range(2):  # the second time it replaces its own
        script.fill("one", table)
    assert page.read_text() == (
        "Before.\n\n<!-- table one -->\n|        | loss |\n|--------|------|\n| gossip |  1.5 |\n<!-- end -->\n\n"
        "<!-- table two -->\nkept\n<!-- end -->\n"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--only=noise",), "--only=noise is unknown; use some of noise_floor, stability, translation"),
        (
            ("--only=digits,translation",),
            "--only=translation needs --multi30k=PATH, its data; give it, or take translation out of --only",
        ),
        (
            ("--only=digits,python", "--cifar10=/nowhere"),
            "--cifar10=/nowhere has no effect with --only=digits,python; leave it out, or add cifar",
        ),
        (("--only=cifar", "--cifar10=/nowhere"), "--cifar10=/nowhere does not exist; give the path of the data"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    done = commands.run("experiments.paper", f"--out={tmp_path}", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
