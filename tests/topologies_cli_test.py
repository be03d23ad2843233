"""launch/topologies.py as a user runs it: the table, the reasons, the figure, and one-line errors."""

import pytest

from decjax import topology as tp
from launch import topologies as cli
from tests import commands


def run(*args, columns=120):
    return commands.run("launch.topologies", *args, COLUMNS=str(columns), MPLBACKEND="Agg")


def cells(output, name):
    (line,) = [line for line in output.splitlines() if line.strip().startswith(name + " ")]
    return line.split()[1:]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_table_has_every_topology_and_fits(columns):
    result = run("--workers=12", columns=columns)
    assert result.returncode == 0 and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= min(columns, cli.WIDTH)
    assert "…" not in result.stdout  # nothing is truncated
    for name in tp.names():
        assert cells(result.stdout, name)
    # Period, degree, messages 2(n−1)/n, both gaps, exact after one round.
    assert cells(result.stdout, "complete") == ["1", "11", "1.83", "1", "1", "1"]
    reason = " ".join(result.stdout.split("not possible")[1].split())
    assert "hypercube needs a power of two workers, got 12; 'base_k' works for any number" in reason


def test_options_reach_the_topologies_that_have_them():
    topologies, refused = cli.build(16, {"local_size": 4, "k": 3, "rounds": 5})
    built = {topology.name: topology for topology in topologies}
    assert refused == {}
    assert built["alternating_exponential_ring"].rounds[0].group_size == 4
    assert built["hierarchical"].rounds[0].group_size == 4
    assert built["base_k"] == tp.make("base_k", 16, k=3) != tp.make("base_k", 16)
    assert built["random_matching"].period == built["equitopo_od"].period == 5
    assert built["ring"] == tp.make("ring", 16)


@pytest.mark.parametrize(
    "option, value, refused",
    [
        ("k", 0, {"base_k"}),
        ("p", 2.0, {"erdos_renyi", "erdos_renyi_digraph"}),
        ("local_size", 5, {"alternating_exponential_ring", "hierarchical", "inner_outer_ring", "inner_outer_exponential"}),
        ("shape", ("a", "b"), {"torus", "one_peer_torus", "grid"}),
        ("outer", "moebius", {"hierarchical"}),
        ("degree", 100, None),
        ("seed", -1, None),
        ("rounds", 10**5, None),
        ("eta", 3.0, None),
    ],
)
def test_an_option_that_a_topology_cannot_take_leaves_out_that_one_with_the_reason(option, value, refused):
    """None: all that have the option."""
    having = {name for name in tp.names() if option in tp.options(name)}
    impossible = set(cli.build(12, {})[1])
    topologies, reasons = cli.build(12, {option: value})
    assert set(reasons) - impossible == (having if refused is None else refused) - impossible
    assert len(topologies) + len(reasons) == len(tp.names())
    for name in set(reasons) - impossible:
        assert "\n" not in reasons[name] and (option in reasons[name] or str(value) in reasons[name])


def test_what_is_left_out_stands_below_the_table():
    result = run("--workers=4", "--k=0", "--outer=ri\nng", columns=100)
    assert result.returncode == 0 and result.stderr == "" and cells(result.stdout, "ring")
    below = " ".join(result.stdout.split("not possible")[1].split())
    assert "k=0 must be at least 1" in below and "'ri\\nng' must read like" in below


def test_plot_writes_a_picture(tmp_path):
    path = tmp_path / "topologies.png"
    result = run("--workers=4", "--shape=2,2", "--plot", f"--out={path}")
    assert result.returncode == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG") and path.name in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    "args, problem",
    [
        ((), "--workers"),
        (("--workers=0",), "--workers=0: 0 is not an integer in the range [1, 4096]"),
        (("--workers=1000000",), "[1, 4096]"),
        (("--workers=many",), "--workers=many must be a whole number"),
        (("--workers=4", "--out=a.png"), "add --plot"),
        (("--workers=4", "--plot", "--out=a.xyz"), "'xyz'; use one of"),
        (("--workers=4", "--colour=red"), "colour"),
        (("--workers=4", "ring"), "'ring'"),
        (("--workers=4", "--seed=1e30"), "--seed=1e30 must be a whole number"),
        (("--workers=4", "--plot=a.png"), "--plot=a.png must be true or false; write --plot or --noplot"),
        (("--workers=2", "--plot", "--out=/nonexistent/a.png"), "/nonexistent"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(args, problem):
    result = run(*args)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if "font_manager" not in line]  # its first-run notice
    assert len(errors) == 1 and errors[0].startswith("error: ") and problem in errors[0]
