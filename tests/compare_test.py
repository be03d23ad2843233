"""experiments/compare.py on run directories with known numbers."""

import importlib
import json

import numpy as np
import pytest

from decjax import config as parts
from experiments import compare
from tests import commands


def write_run(directory, *, losses=(4.0, 3.0, 2.0), finished=True, distance=0.5, items="tokens", members=(), **config):
    """A run with 10 steps between rows; `members` is the number of workers per row of an elastic run; `config` overrides fields."""
    directory.mkdir(parents=True)
    base = {
        "method": "decentralized",
        "topology": {"name": "ring", "options": ""},
        "optimizer": {"name": "adamw"},
        "workers": 4,
        "batch_size": 8,
        "steps": 30,
        "log_every": 10,
        "seed": 0,
    }
    (directory / "config.json").write_text(json.dumps(base | config))
    with (directory / "metrics.jsonl").open("w") as file:
        for i, loss in enumerate(losses, start=1):
            row = {
                "step": 10 * i,
                "time_s": 2.0 * i,
                "loss": loss,
                "loss_min": loss - 0.1,
                "loss_max": loss + 0.1,
                "consensus_distance": distance / i,
                f"{items}_per_s": 100.0 * i**2,
                "bytes_sent_per_worker": 5e7 * i,
            }
            row |= {"workers": members[i - 1]} if members else {}
            file.write(json.dumps(row | {"kind": "train"}) + "\n")
            file.write(json.dumps(row | {"kind": "eval", f"{items}_per_s": 1.0}) + "\n")
    if finished:
        (directory / "summary.json").write_text(
            json.dumps(
                {
                    "eval_loss": losses[-1] + 0.5,
                    "local_eval_loss_min": 2.25,
                    "local_eval_loss_max": 2.75,
                    "time_s": 7.0,
                    "bytes_per_step_per_worker": row["bytes_sent_per_worker"] / row["step"],
                }
            )
        )
    return directory


def launch(*arguments):
    return commands.run("experiments.compare", *map(str, arguments))


def test_the_table_and_the_figure(tmp_path):
    first = write_run(tmp_path / "a", method="allreduce", distance=0.0)
    second = write_run(tmp_path / "b", losses=(4.0, 2.75), finished=False)
    result = launch(first, second, f"--out={tmp_path / 'runs.png'}")
    assert result.returncode == 0, result.stderr
    header, rule, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines() if line.startswith("|")
    ]
    assert header == ["run", "steps", "eval loss", "to first", "workers' loss", "consensus", "time, s", "tokens/s", "MB/step"]
    assert set("".join(rule)) == set(":-")
    assert rows[0] == ["allreduce", "30", "2.5000", "first", "2.250 to 2.750", "0", "7", "400", "5"]
    # Unfinished run: the last periodic evaluation; the median of 100 and 400 tokens/s; +10 % of 2.5.
    assert rows[1] == ["decentralized ring", "20 of 30", "2.7500*", "+10.00 %", "2.650 to 2.850", "2.5e-01", "4", "250", "5"]
    assert "* unfinished" in result.stdout
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_files_beside_the_runs_are_skipped(tmp_path):
    """Arguments as a shell expands sweeps/graphs/*; a single file or a directory without a run is an error."""
    runs = [write_run(tmp_path / f"topology={name}", topology=name) for name in ("ring", "torus")]
    (tmp_path / "sweep.json").write_text("{}")
    result = launch(*sorted(tmp_path.iterdir()))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines()[2:]] == ["ring", "torus"]
    assert "sweep.json is not a directory" in launch(tmp_path / "sweep.json").stderr
    (tmp_path / "figures").mkdir()
    assert "figures/config.json cannot be read" in launch(*runs, tmp_path / "figures").stderr


def test_runs_of_different_tasks_are_not_compared(tmp_path):
    text, images = write_run(tmp_path / "a"), write_run(tmp_path / "b", items="images", task="images")
    runs = [compare.load(text), compare.load(images)]
    header, rows = compare.cells(runs, ["a", "b"])
    assert header[-2] == "items/s" and compare.loss_unit(runs) == ""
    assert [row[3] for row in rows] == ["first", "–"]
    header, rows = compare.cells(runs[1:], ["b"])
    assert header[-2] == "images/s" and rows[0][-2] == "400"


@pytest.mark.parametrize("name", ["lm", "gpt", "digits", "quadratics", "translation"])
def test_the_unit_of_a_loss_is_that_of_the_task(name, tmp_path):
    spec = parts.resolve(importlib.import_module(f"configs.{name}").get_config(""))
    unit = spec.setup.task.metrics["loss"]
    assert compare.loss_unit([compare.Record(tmp_path, compare.flatten(spec.document), [], [], None)]) == unit


def test_losses_per_byte_and_per_token_are_not_compared(tmp_path):
    of_bytes, of_tokens = write_run(tmp_path / "a"), write_run(tmp_path / "b", data={"tokenizer": "bpe"})
    runs = [compare.load(of_bytes), compare.load(of_tokens)]
    assert compare.loss_unit(runs) == "" and [row[3] for row in compare.cells(runs, ["a", "b"])[1]] == ["first", "–"]


def test_the_figure_shows_the_numbers(tmp_path, monkeypatch):
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **options: drawn.append(self))
    runs = [
        compare.load(write_run(tmp_path / "a", distance=0.0)),
        compare.load(write_run(tmp_path / "b", losses=(4.0, 2.75), finished=False)),
    ]
    compare.plot(runs, ["one", "two"], "unused.png")
    by_step, by_time, distance = drawn[0].axes
    train, evaluation = by_step.lines[2:]
    np.testing.assert_array_equal(evaluation.get_xydata(), [[10, 4.0], [20, 2.75]])
    np.testing.assert_array_equal(train.get_xydata(), [[10, 4.0], [20, 2.75]])
    np.testing.assert_array_equal(by_time.lines[3].get_xdata(), [2.0, 4.0])
    np.testing.assert_array_equal(distance.lines[1].get_ydata(), [0.5, 0.25])
    assert distance.get_yscale() == "log" and not len(distance.lines[0].get_xdata())
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["one", "two (unfinished)"]
    assert "zero throughout: one" in distance.get_xlabel() and by_step.get_ylabel() == "loss, nats/byte"  # as in older runs


@pytest.mark.parametrize("members, panels", [((), 3), ((4, 4, 4), 3), ((4, 3, 4), 4)])
def test_workers_that_left_and_came_back_are_drawn(tmp_path, monkeypatch, members, panels):
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **options: drawn.append(self))
    runs = [compare.load(write_run(tmp_path / "a")), compare.load(write_run(tmp_path / "b", members=members))]
    compare.plot(runs, ["one", "two"], "unused.png")
    axes = drawn[0].axes
    assert len(axes) == panels
    if panels == 4:
        (line,) = axes[3].lines
        np.testing.assert_array_equal(line.get_xydata(), [[2, 4], [4, 3], [6, 4]])


@pytest.mark.parametrize(
    "configs, expected",
    [
        # Gossip fields do not apply to all-reduce; the logging interval applies to neither.
        ([{"method": "allreduce", "topology": {"name": "torus"}}, {"log_every": 5}], ["allreduce", "decentralized ring"]),
        ([{"method": "allreduce"}, {"method": "allreduce", "optimizer": {"name": "sgdm"}}], ["adamw", "sgdm"]),
        ([{"workers": 8, "batch_size": 16, "seed": 1}, {}], ["seed=1 workers=8", "seed=0 workers=4"]),
        ([{}, {}], ["run0", "run1"]),
        ([{"seed": 1}, {"seed": 1}, {}], ["seed=1 (run0)", "seed=1 (run1)", "seed=0"]),
        ([{}], ["run0"]),
        ([{"seed": seed, "a_field_whose_name_is_rather_long": seed} for seed in (1, 2)], ["run0", "run1"]),
    ],
)
def test_labels_name_what_differs(configs, expected, tmp_path):
    runs = [compare.load(write_run(tmp_path / f"run{i}", **config)) for i, config in enumerate(configs)]
    assert compare.labels(runs) == expected


def test_smoothing_is_a_mean_over_a_twentieth():
    values = np.random.default_rng(0).normal(size=100)
    smoothed = compare.smooth(values)
    dense = [values[max(0, i - 2) : i + 3].mean() for i in range(100)]
    np.testing.assert_allclose(smoothed, dense, atol=1e-12)
    np.testing.assert_allclose(compare.smooth(values[:30]), values[:30], atol=1e-12)  # too few to need it


def test_a_truncated_last_line_is_tolerated_and_a_damaged_one_is_not(tmp_path):
    run = write_run(tmp_path / "a")
    path = run / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-30])
    assert len(compare.load(run).evaluations) == 2
    path.write_text(whole.replace('"step": 20', '"step: 20', 1))
    with pytest.raises(compare.RunError, match="line 3 is damaged"):
        compare.load(run)


@pytest.mark.parametrize(
    "damage, problem",
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "no complete line"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n'), "line 1 is damaged"),
        (lambda run: (run / "config.json").unlink(), "config.json cannot be read"),
        (
            lambda run: (run / "summary.json").write_text("{}"),
            "summary.json cannot be read .eval_loss is no number.; remove it and run the same training command again",
        ),
        (lambda run: (run / "config.json").write_text("{"), "config.json cannot be read .*; restore it from a copy"),
    ],
)
def test_what_is_no_run_is_refused(damage, problem, tmp_path):
    run = write_run(tmp_path / "a")
    damage(run)
    with pytest.raises(compare.RunError, match=problem):
        compare.load(run)


def test_evaluations_of_the_averaged_model_alone_can_be_read(tmp_path):
    run = write_run(tmp_path / "a", finished=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in compare.OPTIONAL} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = compare.load(run)
    assert found.losses == (kept[-1]["loss"], None, None)
    assert "–" in compare.cells([found], ["a"])[1][0]


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, None, True, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("field", [*compare.NUMBERS_OF_ROW, "loss_min", *compare.NUMBERS_OF_SUMMARY[:3], "kind"])
def test_a_number_that_is_none_is_refused(field, value, tmp_path):
    run = write_run(tmp_path / "a", losses=(4.0,))
    path = run / ("summary.json" if field in compare.NUMBERS_OF_SUMMARY[:3] else "metrics.jsonl")
    lines = [json.dumps(json.loads(line) | {field: value}) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(compare.RunError, match="is no number|a kind, train or eval") as error:
        compare.load(run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("content", ["[]", "5", '"text"', "null", "{", "[" * 100_000, "\x00", '{"step": 0}'])
def test_what_is_no_json_object_is_refused(name, content, tmp_path):
    run = write_run(tmp_path / "a")
    (run / name).write_text(content + "\n")
    if (name, content) != ("config.json", '{"step": 0}'):
        with pytest.raises(compare.RunError, match=name) as error:
            compare.load(run)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["text", [1], None, 10**400, -1, 0.5])
@pytest.mark.parametrize("field", ["workers", "batch_size", "steps", "method", "topology", "optimizer"])
def test_any_value_of_a_config_can_be_told(field, value, tmp_path):
    runs = [compare.load(write_run(tmp_path / "a", finished=False, **{field: value})), compare.load(write_run(tmp_path / "b"))]
    compare.cells(runs, compare.labels(runs))


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ([], "no runs"),
        (["{tmp}/none"], "none is not a directory"),
        (["{tmp}/a", "--out={tmp}/a.xyz"], "xyz"),
        (["{tmp}/a", "--out={tmp}/none/a.png"], "none"),
    ],
)
def test_mistakes_are_one_line(arguments, problem, tmp_path):
    write_run(tmp_path / "a")
    result = launch(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if "font_manager" not in line]
    assert line.startswith("error: ") and problem in line
