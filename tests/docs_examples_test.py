"""The code of docs/guides/own_loop.md runs as shown."""

import re

import jax
import numpy as np
import pytest

from tests import commands

DOCS = commands.ROOT / "docs"
pytestmark = pytest.mark.usefixtures("quick_compilation")


def blocks(heading):
    """The code of a section of docs/guides/own_loop.md, one string per block."""
    _, _, section = (DOCS / "guides" / "own_loop.md").read_text().partition(f"\n{heading}\n")
    found = re.findall(r"```python\n(.*?)```", re.split(r"\n##* ", section)[0], re.DOTALL)
    assert found
    return found


def test_the_trainer_of_the_page_trains():
    scope = {}
    (code,) = blocks("## The trainer")
    assert len(list(filter(str.strip, code.splitlines()))) <= 10
    exec(code, scope)
    assert scope["trainer"].evaluate(scope["state"]).averaged["accuracy"] > 0.9


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "devices"])
def test_the_loop_of_the_page_learns_goes_on_and_is_saved(simulate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    (code,) = blocks("## Your own loss and step")
    code = code if simulate else code.replace("make_workers(8, simulate=True)", "make_workers(jax.device_count())")
    exec(code, scope)
    assert scope["workers"].simulated == simulate
    learned = float(scope["loss_N"].mean())
    assert learned < 0.2
    (traced,) = blocks("### Phases")
    exec(traced, scope)
    assert scope["loss_N"].mean() < 1.5 * learned
    (saving,) = blocks("## Averages, distances, checkpoints")
    exec(saving, scope)
    jax.tree.map(np.testing.assert_array_equal, scope["saved"], {"params": scope["params"], "state": scope["state"]})
    up_NxDxH = np.asarray(scope["params"]["up"])
    np.testing.assert_allclose(scope["average"]["up"], up_NxDxH.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert 0 < scope["distance"] < 1 and scope["newest"] == scope["number"] and scope["counters"]
    *models, with_statistics = blocks("## Flax")
    for model in models:
        exec(model, scope)
        exec(code[code.index("params = workers.stack") :].replace("range(300)", "range(30)"), scope)
        assert scope["loss_N"].mean() < 0.5
    exec(with_statistics, scope)
    assert scope["loss_N"].mean() < 0.5 and any(np.ptp(x, axis=0).any() for x in jax.tree.leaves(scope["statistics"]))
