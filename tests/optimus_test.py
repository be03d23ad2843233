"""The rows of experiments/optimus.py, and its tables and figure from fixed numbers; nothing is trained."""

import copy
import io
import json

import numpy as np
import pytest
import rich.console

from configs import gpt_optimus
from experiments import optimus, trials
from experiments import rows as rows_lib
from tests.runs import trainer_of


def built(row, text, steps=20):
    """Build the parts of a row's run, with its fields set as flags set them."""
    config = gpt_optimus.get_config(f"{row.shorthand},steps={steps}")
    for name, value in (field.split("=", 1) for field in row.fields):
        known = config
        for part in name.split("."):
            known = known[part]
        config.update_from_flattened_dict({name: value == "true" if isinstance(known, bool) else type(known)(value)})
    config.data.path = str(text)
    return trainer_of(config)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(97, 123)) * 200)
    return path


@pytest.mark.parametrize("row", optimus.ROWS, ids=[row.name for row in optimus.ROWS])
def test_every_row_can_be_trained(row, text):
    trainer = built(row, text)
    assert (trainer.workers.num_workers, trainer.workers.stages, trainer.spec.method.name) == (2, 4, "allreduce")


def test_rows_differ_from_the_baseline_in_what_they_are_called_for(text):
    def config(name):
        spec = built(next(row for row in optimus.ROWS if row.name == name), text).spec
        coded = {key: getattr(spec.boundary, key) for key in ("when", "error", "backward")} if spec.boundary else {}
        return {"fused": spec.pipeline.fused_embedding, "reducer": spec.reducer.name, **coded}

    dense = dict(fused=False, reducer="mean")
    coded = dense | dict(when="epilogue", error="flush", backward="low_rank(rank=16)")
    assert config("baseline") == dense
    assert config("CB") == coded
    assert config("CB, error carried") == coded | dict(error="carry")
    assert config("CB+FE+SC") == coded | dict(fused=True, reducer="powersgd")
    assert config("not remembered") == coded | dict(backward="low_rank(rank=1)", when="always", error="none")


SUMMARIES = {
    row.name: dict(eval_loss=2.0 + i / 100, bytes_between_stages_per_step_per_worker=1e6 - 1e4 * i, bytes_per_step_per_worker=5e5)
    for i, row in enumerate(optimus.ROWS)
}


def lines(table):
    """Return {name: cells} of a Markdown table."""
    screen = io.StringIO()
    rich.console.Console(file=screen, width=140).print(table)
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in screen.getvalue().splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


def test_the_tables():
    of = copy.deepcopy(SUMMARIES)
    of["activations, top-k 10 %"]["eval_loss_coded"] = 1.9
    of["EF21"] = None
    found = lines(optimus.techniques(of, markdown=True))
    assert found["baseline"] == ["1000.0", "500.0", "2.0000", "", ""]
    assert found["CB"][:4] == ["980.0", "500.0", "2.0200", "+1.00 %"] and float(found["CB"][4]) > 1
    assert float(found["CB+FE+SC"][4].split(" ")[0]) > float(found["CB+FE"][4]) > float(found["CB"][4])
    assert lines(optimus.memories(of, markdown=True))["EF21"] == ["", "diverged", ""]
    found = lines(optimus.findings(of, markdown=True))
    assert found["activations, top-k 10 %"][3:] == ["1.9000", "-5.00 %"] and found["gradients, top-k 10 %"][3:] == ["", ""]


def test_the_figure(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(dict(step=10 * k, kind=kind, loss=float(k))) + "\n" for k in range(1, 8) for kind in ("train", "eval"))
    )
    step_K, loss_K = optimus.training_loss(trials.Trial(tmp_path, "no such config"))
    np.testing.assert_allclose(step_K, [50, 60, 70])
    np.testing.assert_allclose(loss_K, [3, 4, 5])
    out = tmp_path / "figure.png"
    optimus.draw({"baseline": (step_K, loss_K)}, dict(step=[5, 10], cosines={"1": [[0.1, float("nan")], [0.2, 0.3]]}), str(out))
    assert out.read_bytes().startswith(b"\x89PNG")


def test_rows_are_trained_once(tmp_path):
    """A finished row is read; an unknown one is refused."""
    row = optimus.BASELINE
    directory = rows_lib.trial(row, "no such config", tmp_path, 1, []).workdir
    directory.mkdir()
    (directory / "summary.json").write_text(json.dumps(SUMMARIES[row.name]))
    assert rows_lib.train([row], "no such config", tmp_path, 1, []) == {row.name: SUMMARIES[row.name]}
    assert rows_lib.choose(optimus.ROWS, ["CB"]) == [optimus.BASELINE, optimus.TECHNIQUES[2]]
    with pytest.raises(SystemExit):
        rows_lib.choose(optimus.ROWS, ["nothing"])
