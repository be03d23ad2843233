"""experiments.paper: how rows are judged, and the whole way with tiny models."""

import json
import math

import numpy as np
import pytest

from experiments import noise_floor, quality, trials
from tests import commands


def test_equal_means_overlap_and_less_than_a_sigma():
    """Intervals are ± 2σ of the mean; one seed has none and is equal to nothing."""
    one = trials.spread([27.7, 27.8, 27.9])
    assert one.mean == pytest.approx(27.8) and one.sigma == pytest.approx(0.1) and one.error == pytest.approx(0.2 / math.sqrt(3))
    assert one.text(2) == "27.80 ± 0.20" and trials.spread([27.7]).text(1) == "27.7"
    near, far = trials.spread([27.72, 27.82, 27.92]), trials.spread([27.6, 27.66, 27.72])
    assert trials.equal(one, near) and trials.equal(near, one)
    assert abs(one.mean - far.mean) > max(one.sigma, far.sigma) and not trials.equal(one, far)
    assert not trials.equal(trials.spread([27.8]), trials.spread([27.8]))


def test_names_are_folders():
    assert trials.name_of("AccumAdam, one-peer 0.002 3") == "accumadam_one_peer_0_002_3"


def test_the_exponent_is_that_of_a_power():
    assert noise_floor.exponent({N: 3.0 / N for N in noise_floor.WORKERS}) == pytest.approx(-1)


def result(*values):
    return quality.Result(1e-3, {1e-3: 0.5}, list(values))


def test_verdicts_need_seeds_on_both_sides():
    first = result(27.7, 27.8, 27.9)
    assert quality.verdict(result(27.75, 27.8, 27.85), first) == "equal"
    assert quality.verdict(result(27.0, 27.1, 27.2), first) == "not equal"
    assert quality.verdict(result(27.8), first) == "one seed"
    table = quality.tabulate(
        "translation", {quality.ALL_REDUCE: first, "D-Adam, AER": result(), "AccumAdam, AER": result(27.0, 27.2)}
    )
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert rows[1][:2] == ("D-Adam, AER", "diverged") and rows[2][1:4] == ("27.10 ± 0.28", "-0.70", "not equal")


def test_the_whole_way_with_tiny_models(tmp_path):
    line = ("experiments.paper", f"--out={tmp_path}", "--only=noise_floor,digits", "--smoke")
    first = commands.run(*line)
    assert first.returncode == 0, first.stderr
    again = commands.run(*line)
    assert again.stdout == first.stdout
    floors = json.loads((tmp_path / "noise_floor.json").read_text())
    assert all(np.isfinite(list(found.values())).all() for found in floors.values())
    assert {*json.loads((tmp_path / "digits.json").read_text())} == {quality.ALL_REDUCE, "AccumAdam, AER"}
    for name in ("noise_floor", "digits"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--only=noise",), "--only=noise is unknown; use some of noise_floor, translation"),
        ((), "translation needs --multi30k; give the path of its data, or leave it out"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    done = commands.run("experiments.paper", f"--out={tmp_path}", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
