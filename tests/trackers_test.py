"""Trackers: a custom one, and Weights & Biases, replaced by a stand-in with its interface."""

import json
import sys
import types

import pytest

from configs import lm
from decjax import train
from decjax.train import metrics
from tests.runs import run_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS = 6


@pytest.fixture(scope="module")
def prepare(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)

    def prepare(workdir):
        config = lm.get_config("smoke,workers=2,simulate")
        config.model.update(depth=1, width=8, hidden=8, heads=1, context=8)
        config.data.update(path=str(text), sample_bytes=0)
        config.update(steps=STEPS, log_every=2)
        config.eval.update(every=4, num_windows=2)
        config.checkpoint.every = 4
        return run_of(config, workdir)

    return prepare


class Kept(train.Tracker):
    """Stores what it receives; ends the run after a step, like a crash."""

    def __init__(self, run, crash_after=None):
        self.start, self.rows, self.steps, self.closed, self._crash_after = run.start, [], [], False, crash_after

    def log(self, step, kind, values):
        self.rows.append({"step": step, "kind": kind} | values)
        if step == self._crash_after:
            raise KeyboardInterrupt

    def step(self, step):
        self.steps.append(step)

    def close(self):
        self.closed = True


def test_a_tracker_is_told_of_every_row_and_step(prepare, tmp_path):
    made = []

    def kept(run):
        made.append(Kept(run))
        return made[-1]

    prepare(tmp_path / "run").train([kept, kept])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in lines] == [("train", 2), ("train", 4), ("eval", 4), ("train", 6), ("eval", 6)]
    for tracker in made:
        assert tracker.rows == lines and tracker.steps == [*range(1, STEPS + 1)] and tracker.closed
    # A finished run takes no steps, and creates no trackers.
    assert prepare(tmp_path / "run").train([kept]).already_finished and len(made) == 2


def test_trackers_are_closed_when_another_cannot_begin(prepare, tmp_path):
    kept = []

    def fails(run):
        kept.append(run._trackers[-1])
        raise train.TrainingError("no")

    with pytest.raises(train.TrainingError):
        prepare(tmp_path / "run").train([Kept, fails])
    assert kept[0].closed


# -- Weights & Biases -------------------------------------------------------------------------------------------------


class Service:
    """A stand-in for `wandb` that records its calls."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        run = types.SimpleNamespace(options=options, rows=[], finished=0, offline=True, dir=f"{options['dir']}/wandb/offline/files")
        run.log = lambda values, step: run.rows.append((step, values))
        run.finish = lambda: setattr(run, "finished", run.finished + 1)
        self.runs.append(run)
        return run

    def module(self):
        module = types.ModuleType("wandb")
        module.init, module.Settings, module.Error = self.init, dict, ConnectionRefusedError
        return module


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service.module())
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return service


def test_a_continued_run_goes_on_in_the_same_run_of_wandb(service, prepare, tmp_path):
    workdir, places = tmp_path / "run", []

    def on_wandb(run):
        tracker = metrics.WandB(run.workdir, run.start, run.spec.document)
        places.append(tracker.place)
        return tracker

    with pytest.raises(KeyboardInterrupt):
        prepare(workdir).train([on_wandb, lambda run: Kept(run, crash_after=6)])
    config = (workdir / "config.json").read_bytes()
    resumed = prepare(workdir)
    assert resumed.start == 4
    resumed.train([on_wandb])
    first, second = service.runs
    assert first.options["id"] == second.options["id"] == (workdir / "wandb_id").read_text()
    for run in service.runs:
        assert run.options["resume"] == "allow" and run.options["dir"] == str(workdir) and run.finished == 1
        assert run.options["project"] == "decjax" and run.options["name"] == "run"
        assert run.options["config"]["workers"] == 2
    assert places == 2 * [str(workdir / "wandb/offline")]
    assert [step for step, _ in first.rows] == [2, 4, 4, 6] and [step for step, _ in second.rows] == [6, 6]
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    told = [(row.pop("step"), {f"{row['kind']}/{name}": row[name] for name in row if name != "kind"}) for row in lines]
    assert first.rows[:3] + second.rows == told
    assert (workdir / "config.json").read_bytes() == config  # a run's config does not depend on its trackers


def test_another_run_and_one_that_starts_again_have_an_id_of_their_own(service, tmp_path):
    for name in "aba":
        (tmp_path / name).mkdir(exist_ok=True)
        metrics.WandB(tmp_path / name, 0, {})
    assert len({run.options["id"] for run in service.runs}) == 3


def test_without_a_login_it_is_one_line_with_the_fix(service, monkeypatch, tmp_path):
    def init(**options):
        raise ConnectionRefusedError("api_key not configured.\nUse wandb login")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(train.TrainingError, match=r"\(api_key not configured. Use wandb login\); run `wandb login`") as error:
        metrics.WandB(tmp_path, 0, {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("left", [None, types.ModuleType("wandb")])
def test_without_wandb_it_is_one_line_with_the_command(left, monkeypatch):
    """Also where it only appears to be installed: a directory ./wandb can be imported, and is what its runs leave behind."""
    monkeypatch.setitem(sys.modules, "wandb", left)
    with pytest.raises(train.TrainingError, match="pip install wandb"):
        metrics.wandb()
