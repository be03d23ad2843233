"""experiments.heterogeneity: its claims are judged by intervals, and it runs from start to end with tiny models."""

import io

import pytest
import rich.console

from experiments import heterogeneity, quality, studies
from tests import commands


def result(*values):
    return quality.Result(0.1, {0.1: 0.5}, list(values))


def test_claims_are_judged_by_intervals():
    claim = heterogeneity.Claim("a", "b", "")
    judged = lambda a, b: heterogeneity.judged(claim, {"a": a, "b": b})
    assert judged(result(0.9, 0.91, 0.92), result(0.8, 0.81, 0.82)) == "+0.1000, yes"
    assert judged(result(0.8, 0.81, 0.82), result(0.9, 0.91, 0.92)) == "-0.1000, NO"
    assert judged(result(0.80, 0.85, 0.90), result(0.79, 0.84, 0.89)) == "+0.0100, undecided"
    assert judged(result(None), result(0.8, 0.9)) == "a diverged"
    assert judged(result(0.9, 0.91), result(0.8, 0.81, None)) == "b diverged"  # the rest may be chance


def test_a_column_for_each_part_and_a_row_for_each_claim():
    rows = {method: result(0.9, 0.91, 0.92) for method in studies.SKEWED}
    found = dict.fromkeys(studies.DIRICHLET, rows)
    out = io.StringIO()
    console = rich.console.Console(width=300, file=out)
    console.print(heterogeneity.joint(found), heterogeneity.order(found), markup=False)
    text = out.getvalue()
    assert all(method in text for method in studies.SKEWED) and "Dirichlet, α = 0.1: accuracy (rate)" in text
    assert text.count("undecided") == len(studies.ALPHAS) * len(heterogeneity.CLAIMS)


def test_the_whole_way_with_tiny_models(tmp_path):
    for _ in range(2):  # the second time from the results log
        done = commands.run("experiments.heterogeneity", f"--out={tmp_path}", "--only=dirichlet_0.1", "--smoke")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "smoke/heterogeneity.png").read_bytes().startswith(b"\x89PNG") and studies.RELAY in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--only=dirichlet",), "--only=dirichlet is unknown; use some of dirichlet_10"),
        (("--only=multi30k_ring",), "multi30k_ring needs --text; give the path"),
        (("--only=multi30k_ring", "--text=nowhere"), "--text=nowhere is no file; give the path"),
        (("--only=dirichlet_1", "--pages=docs"), "--only=dirichlet_1 would write a part of the rows into --pages=docs;"),
        (("--text=README.md",), "--text=README.md has no effect without a part of Multi30k; leave it out"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    done = commands.run("experiments.heterogeneity", f"--out={tmp_path}", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
