"""The Python code in docs/tutorials/ runs as shown, page by page; tests/docs_commands_test.py checks the commands."""

import re

import jax
import numpy as np
import pytest

import decjax
from tests import commands

TUTORIALS = commands.ROOT / "docs/tutorials"
TESTED = {"from_ddp", "powersgd", "preemption", "two_sites"}
pytestmark = pytest.mark.usefixtures("quick_compilation")


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (TUTORIALS / f"{name}.md").read_text(), re.DOTALL)


def test_all_pages_with_code_are_tested():
    assert {path.stem for path in TUTORIALS.glob("*.md") if blocks(path.stem)} == TESTED


def test_moved_from_pmap_the_losses_are_the_same():
    on_pmap, on_decjax, gossip, average = blocks("from_ddp")
    scope = {}
    exec(on_pmap, scope)
    before = np.asarray(scope["losses"])
    exec(on_decjax, scope)
    np.testing.assert_allclose(scope["losses"], before, rtol=1e-3, atol=1e-4)
    assert before.mean() < 0.3
    exec(gossip, scope)
    assert scope["mixer"].num_workers == jax.device_count()
    exec(average, scope)
    assert scope["average"]["up"].shape == (4, 32)


def test_powersgd_in_shard_map_learns():
    step, training, mapped = blocks("powersgd")
    scope = {}
    exec(step, scope)
    exec(training.replace("range(100)", "range(1)"), scope)
    first = float(scope["loss"])
    exec(training, scope)
    assert scope["loss"] < 0.5 * first
    sent = scope["reducer"].num_bytes(scope["params"], jax.device_count())
    assert (sent < 0.5 * decjax.reduce.mean().num_bytes(scope["params"], jax.device_count())).all()
    exec(mapped, scope)
    assert isinstance(scope["reducer"], decjax.reduce.powersgd)


def test_a_loop_continues_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    (loop,) = blocks("preemption")
    results = {}
    for name, counts in {"whole": (200,), "in two parts": (120, 200)}.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for count in counts:
            scope = {}
            exec(loop.replace("range(first, 200)", f"range(first, {count})"), scope)
        results[name] = np.asarray(scope["params"])
    assert capsys.readouterr().out == "continuing after step 100\n"
    np.testing.assert_array_equal(results["whole"], results["in two parts"])


def test_diloco_sends_in_every_sixteenth_step():
    diloco, coded = blocks("two_sites")
    params, scope = {"w": jax.numpy.zeros((64, 64))}, {}
    exec(diloco, scope)
    plain = scope["reducer"]
    assert [step for step in range(32) if plain.num_bytes(params, 2, plain.phase(step)).any()] == [15, 31]
    exec(coded, scope)
    few = scope["reducer"].num_bytes(params, 2, plain.phase(15))
    assert (few < plain.num_bytes(params, 2, plain.phase(15)) / 6).all()
