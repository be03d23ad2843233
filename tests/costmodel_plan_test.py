"""Ranking, verdicts, regions, and launch/plan.py as a user runs it."""

import dataclasses
import io
import json
import pathlib
import re
import time

import numpy as np
import pytest
import rich.console

from decjax import costmodel
from decjax import topology as tp
from decjax.contrib import layouts
from decjax.costmodel import Cluster, Jitter, Link, Workload, all_reduce, gossip, plan, predict
from launch import plan_model, plan_report
from tests import commands

ROOT = pathlib.Path(__file__).parents[1]
PROFILES = sorted((ROOT / "configs" / "clusters").glob("*.json"))
SLOW = Cluster("slow", 4, 2, Link(1e-6, 1e10), Link(1e-5, 1e8))
FAST = dataclasses.replace(SLOW, name="fast", inter=Link(1e-6, 1e11))
LOAD = Workload(0.1, (0.05,) * 4, (1e7,) * 4)


def ranked(cluster, workload=LOAD, **options):
    methods, _ = plan.candidates(cluster, **options)
    return plan.rank(cluster, workload, methods)


def test_ranking_is_by_time_and_speedups_fit():
    rows = ranked(SLOW)
    assert rows[0].method.topology is None
    times_s = [r.prediction.mean_s for r in rows]
    assert all(later >= earlier * (1 - 2e-3) for earlier, later in zip(times_s, times_s[1:]))
    sync = next(r for r in rows if r.method.name == "all-reduce")
    assert sync.speedup == pytest.approx(1) and all(
        r.speedup == pytest.approx(sync.prediction.mean_s / r.prediction.mean_s) for r in rows
    )
    exp = next(r for r in rows if r.method.name == "one_peer_exponential awc")
    assert (exp.gap, exp.period) == (pytest.approx(1), 3)


def test_graphs_that_are_the_same_are_listed_once():
    methods, refused = plan.candidates(
        Cluster("four", 4, 1, SLOW.intra, SLOW.inter), ("ring", "one_peer_exponential", "hierarchical")
    )
    assert [m.name for m in methods if m.message == "parameters" and m.topology] == [
        f"{name} {order}" for name in ("ring", "one_peer_exponential") for order in ("awc", "atc")
    ]
    _, refused = plan.candidates(SLOW.resize(6), ("hypercube",))
    assert "power of two" in refused["hypercube"]


def test_verdicts():
    pays = plan.verdict(SLOW, LOAD, ranked(SLOW))
    assert pays.startswith("Decentralization pays on 'slow'") and "no longer pays above" in pays
    assert "1.1 to 1.5 times as many steps as all-reduce" in pays  # a faster step is not sufficient
    useless = plan.verdict(FAST, LOAD, ranked(FAST))
    assert useless.startswith("Decentralization does not pay on 'fast'") and "would pay below about" in useless
    # The threshold is where the gain just counts as worthwhile.
    bits = (
        float(pays.split("above about ")[1].split()[0]) * {"Gbit/s": 1e9, "Mbit/s": 1e6}[pays.split("above about ")[1].split()[1]]
    )
    there = ranked(dataclasses.replace(SLOW, inter=Link(1e-5, bits / 8)))
    sync = min(r.prediction.mean_s for r in there if r.method.message == "gradients" and not r.method.overlap)
    assert sync / min(r.prediction.mean_s for r in there if r.is_gossip) == pytest.approx(plan.PAYS, abs=0.02)
    with pytest.raises(ValueError, match="needs an all-reduce and a gossip method"):
        plan.verdict(SLOW, LOAD, [r for r in ranked(SLOW) if not r.is_gossip])


@pytest.mark.parametrize(
    "bandwidth_Bps, variation, options, pays, expected",
    [
        (1e8, 0.0, {}, True, ", and {gossip:.2f}× faster than one of one-step-stale all-reduce. In short"),
        (3e8, 0.0, {}, True, ". But one-step-stale all-reduce is as fast, and averages over all workers. In short"),
        (1e11, 0.2, dict(orders=("atc",)), True, ". But one-step-stale all-reduce is {stale:.2f}× faster than this gossip"),
        (1e8, 0.0, dict(topologies=("torus",)), False, ". One-step-stale all-reduce would make it {reduced:.2f}× faster."),
        (1e11, 0.0, {}, False, "only 1.01× faster. Against synchronous"),
    ],
)
def test_the_verdict_tells_of_stale_all_reduce(bandwidth_Bps, variation, options, pays, expected):
    cluster = dataclasses.replace(SLOW, inter=Link(1e-5, bandwidth_Bps))
    load = dataclasses.replace(LOAD, jitter=Jitter("lognormal", variation * LOAD.compute_s))
    rows = ranked(cluster, load, **options)
    text = plan.verdict(cluster, load, rows)
    time_s = {r.method.name: r.prediction.mean_s for r in rows}
    stale_s, mixed_s = time_s["all-reduce, one step stale"], time_s[re.search(r"\w+ (awc|atc)", text)[0]]
    told = expected.format(gossip=stale_s / mixed_s, stale=mixed_s / stale_s, reduced=time_s["all-reduce, bucketed"] / stale_s)
    assert told in text and ("does not pay" not in text) == pays, text


def test_regions_agree_with_predictions():
    methods, _ = plan.candidates(SLOW, ("ring", "one_peer_exponential", "alternating_exponential_ring"))
    regions = plan.regions(SLOW, LOAD, methods, [1e7, 1e8, 1e11], [0.0, 0.3])
    assert regions.time_s.shape == (len(methods) - 1, 2, 3) and (np.diff(regions.time_s, axis=2) <= 1e-12).all()
    for m, method in enumerate(regions.methods):
        exact_s = predict(SLOW, LOAD, method).mean_s
        assert regions.time_s[m, 0, 1] == pytest.approx(exact_s, rel=0.01)
    assert regions.methods[regions.winner[0, 0]].message == "parameters"  # slow links
    assert regions.methods[regions.winner[0, 2]].name == "all-reduce"  # links so fast that plain all-reduce suffices


def test_the_decision_table_says_what_the_regions_say():
    methods, _ = plan.candidates(SLOW, ("one_peer_exponential",), bucketed=False)
    terminal = rich.console.Console(width=100, record=True, file=io.StringIO())
    terminal.print(plan_report.decide(SLOW, LOAD, methods))
    text = terminal.export_text()
    assert max(map(len, text.splitlines())) <= 100
    rows = [line for line in text.splitlines() if "bit/s" in line]
    assert len(rows) == len(plan_report.SHARES)
    regions = plan.regions(SLOW, LOAD, methods, [LOAD.total_bytes / (30 * LOAD.compute_s)], [0.0])
    best_s, (sync_s,) = regions.time_s.min(), [regions.time_s[m] for m, x in enumerate(regions.methods) if x.name == "all-reduce"]
    assert f"{float(sync_s[0, 0] / best_s):.1f} × one peer" in "".join(text.splitlines()[-4:])  # a cell may span two lines


def test_timeline_is_in_order():
    workload = dataclasses.replace(LOAD, jitter=Jitter("lognormal", 0.05))
    for method in (all_reduce(8), all_reduce(8, overlap=True), gossip(tp.make("one_peer_exponential", 8))):
        line = plan.timeline(SLOW, workload, method)
        assert line.start_N.min() == 0 and (line.start_N <= line.computed_N).all() and (line.computed_N <= line.end_N + 1e-12).all()
        assert (line.launched_N < line.arrived_N).all() and (line.arrived_N <= line.end_N + 1e-12).all()


# -- Three dimensions -------------------------------------------------------------------------------------------------

GPT = layouts.Transformer(8, 256, 8, 4096, 128, batch_size=64, tied=True)
SIXTEEN = dataclasses.replace(SLOW.resize(16), flops=1e12)


def test_all_divisions_are_found_or_refused():
    found, refused = layouts.layouts(GPT, 16, microbatch_size=2)
    assert len(found) + len(refused) == 15  # ordered triples of powers of two with product 16
    assert all(layout.num_devices == 16 and layout.microbatches * layout.workers == 32 for layout in found)
    assert {name: reason.split(";")[0] for name, reason in refused.items()} == {
        "1×1×16": "heads=8 does not divide into tensor=16",
        "1×16×1": "depth=8 does not divide into stages=16 × chunks=1",
    }
    assert layouts.layouts(GPT, 16, microbatch_size=8)[1]["16×1×1"].startswith("batch_size=64 does not divide into workers=16")
    interleaved, _ = layouts.layouts(GPT, 16, schedule="interleaved", chunks=2)
    assert {layout.schedule for layout in interleaved if layout.stages > 1} == {"interleaved"}


def test_layouts_are_ranked_and_what_they_send_is_named():
    found, _ = layouts.layouts(GPT, 16, microbatch_size=2)
    rows, refused = layouts.rank_layouts(SIXTEEN, GPT, found, boundary_rank=4, workers_rank=4)
    assert not refused and [r.prediction.time_s for r in rows] == sorted(r.prediction.time_s for r in rows)
    plain = min(r.prediction.time_s for r in rows if r.name == "all-reduce")
    assert all(r.speedup == pytest.approx(plain / r.prediction.time_s) for r in rows)
    names = {name: {r.name.rstrip("01234") for r in rows if r.layout.name == name} for name in ("4×4×1", "16×1×1", "1×8×2")}
    gossip_names = {"one_peer_exponential awc", "one_peer_exponential awc CB"}
    assert names["4×4×1"] == {"all-reduce", "all-reduce CB", "all-reduce CB FE", "all-reduce CB FE SC "} | gossip_names
    assert names["16×1×1"] == {"all-reduce", "all-reduce PowerSGD", "one_peer_exponential awc"}
    assert names["1×8×2"] == {"all-reduce", "all-reduce CB", "all-reduce CB FE"}
    for layout in found:  # Running one part after the other costs no time when codecs are free.
        times_s = [
            r.prediction.time_s
            for name in ("all-reduce", "all-reduce CB", "all-reduce CB FE", "all-reduce CB FE SC ")
            for r in rows
            if r.layout == layout and r.name.rstrip("01234") == name
        ]
        assert times_s == sorted(times_s, reverse=True)


def test_what_does_not_fit_is_refused():
    found, _ = layouts.layouts(GPT, 16, microbatch_size=2)
    held = {layout.name: layouts.memory(GPT, layout, layouts.Traffic(costmodel.no_communication())).total for layout in found}
    limit = sorted(held.values())[len(held) // 2]
    rows, refused = layouts.rank_layouts(dataclasses.replace(SIXTEEN, memory_bytes=limit), GPT, found)
    assert {name for name in refused if " " not in name} == {name for name, num_bytes in held.items() if num_bytes > limit}
    assert rows and all(r.memory.total <= limit for r in rows)
    assert any(" with one_peer_exponential awc" in name for name in refused)  # received values need memory
    assert all(f"and has {limit / 1e9:.3g}; use more stages" in reason and "\n" not in reason for reason in refused.values())
    with pytest.raises(ValueError, match="the cluster's flops=None must be a number"):
        layouts.rank_layouts(SLOW, GPT, found)


# -- The command -------------------------------------------------------------------------------------------------------


def run(*args, columns=120, module="launch.plan"):
    return commands.run(module, *args, COLUMNS=str(columns), MPLBACKEND="Agg")


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_shipped_profiles_are_valid(path):
    cluster, workload = costmodel.load(path)
    assert predict(cluster, workload or LOAD, all_reduce(cluster.num_workers), num_steps=20, num_replicas=1).mean_s > 0


@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits(columns):
    result = run("--cluster=configs/clusters/box_200mbit.json", columns=columns)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert max(map(len, result.stdout.splitlines())) <= columns and "…" not in result.stdout
    assert "Decentralization pays" in result.stdout and "all-reduce, one step stale" in result.stdout


def test_the_figure_is_written(tmp_path):
    cluster, workload = costmodel.load(ROOT / "configs" / "clusters" / "box_200mbit.json")
    path = tmp_path / "plan.png"
    plan_report.plot(str(path), cluster, workload, ranked(cluster, workload, topologies=("one_peer_exponential", "ring")))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_config_gives_parameters_and_workers():
    result = run(
        "--cluster=configs/clusters/box_200mbit.json",
        "--model=configs/lm.py:workers=8,smoke",
        "--compute_s=0.05",
        "--topologies=ring",
    )
    assert result.returncode == 0, result.stderr
    assert "8 × 1 workers" in result.stdout and "computes for 50 ms" in result.stdout


def test_workers_of_several_devices():
    cluster, model = "--cluster=configs/clusters/a40_ethernet.json", "--model=params=65e6,tokens=1600"
    result = run(cluster, model, "--fsdp=2", "--workers=8", "--topologies=ring", "--orders=awc")
    assert result.returncode == 0, result.stderr
    row = next(line for line in result.stdout.splitlines() if "ring awc" in line)
    assert (
        "workers of 2 devices" in result.stdout and "device" in result.stdout and " 260 " in row
    )  # two neighbors, half of 260 MB each
    from_config = run(cluster, "--model=configs/lm.py:workers=8,fsdp=2", "--topologies=ring")
    assert "× 2 workers of 2 devices" in from_config.stdout and ",fsdp=2,order=awc" in from_config.stdout, from_config.stderr
    assert "\nMemory per device: " in from_config.stdout and "too little" not in from_config.stdout


SIZES = "depth=4,width=64,heads=4,vocabulary=256,context=64,batch=32"
T4 = "--cluster=configs/clusters/t4_infiniband.json"
LAYOUTS = "launch.plan_layouts"


@pytest.mark.parametrize("columns", [80, 120])
def test_layouts_fit_the_terminal(columns):
    result = run(T4, "--devices=8", f"--model={SIZES},tied=1", "--topologies=one_peer_exponential", columns=columns, module=LAYOUTS)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    rows, left_out = (part.splitlines() for part in result.stdout.split("left out:", 1))
    assert max(map(len, rows)) <= columns and "…" not in result.stdout
    assert (
        "2×4×1" in result.stdout and "all-reduce CB FE" in result.stdout and "heads=4 does not divide into tensor=8" in left_out[0]
    )


def test_a_config_is_a_model_of_layouts():
    result = run(
        "--cluster=configs/clusters/box_200mbit.json",
        "--devices=4",
        "--model=configs/lm.py:workers=8",
        "--flops=1e10",
        module=LAYOUTS,
    )
    assert result.returncode == 0, result.stderr
    assert "16 sequences of 128" in result.stdout and "2×2×1" in result.stdout


@pytest.mark.parametrize(
    "args, problem",
    [
        ((T4, "--model=params=1e6,tokens=10", "--orders="), "flag --orders=[]: give awc, atc or both"),
        ((), "--cluster"),
        (("--cluster=nowhere.json",), "nowhere.json"),
        (("--cluster=configs/clusters/a40_ethernet.json",), "has no workload"),
        (("--cluster=configs/clusters/box_200mbit.json", "--model=nowhere.py"), "config file 'nowhere.py' cannot be loaded"),
        (
            ("--cluster=configs/clusters/box_200mbit.json", "--model={tmp}/broken.py:x"),
            "broken.py' cannot be loaded (no such thing)",
        ),
        (("--cluster=configs/clusters/box_200mbit.json", "--model=configs/lm.py:colour=3"), "'colour' is unknown"),
        (("--cluster=configs/clusters/box_200mbit.json", "--model=configs/lm.py:workers=-1"), "workers=-1 must be at least 0"),
        (("--cluster=configs/clusters/box_200mbit.json", "--compute_s=0.1"), "has its own times"),
        (("--cluster=configs/clusters/box_200mbit.json", "--model={tmp}/load.json", "--compute_s=0.1"), "has its own times"),
        (("--cluster=configs/clusters/box_200mbit.json", "--codec=int8", "--ratio=0.5"), "At most one of (codec, ratio)"),
        (("--cluster=configs/clusters/box_200mbit.json", "--codec=zip"), "codec 'zip' is unknown"),
        (
            ("--cluster=configs/clusters/a40_ethernet.json", "--model=params=1e6,tokens=10", "--workers=6"),
            "--workers=6 do not fill",
        ),
        (
            ("--cluster=configs/clusters/a40_ethernet.json", "--model=params=1e6,tokens=10", "--workers=99999999999"),
            "--workers=99999999999 must be at most 4096; use --workers=4096, or fewer",
        ),
        (("--cluster=configs/clusters/box_200mbit.json", "--topologies=rings"), "topology 'rings' is unknown"),
        (("--cluster=configs/clusters/box_200mbit.json", "--fsdp=2"), "fsdp=2 does not divide the 1 devices of a node"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(args, problem, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such thing')")
    result = run(*(arg.format(tmp=tmp_path) for arg in args))
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if "font_manager" not in line]
    assert len(errors) == 1 and errors[0].startswith("error: ") and problem in errors[0]


@pytest.mark.parametrize(
    "args, problem",
    [
        ((T4, "--model=depth=4,width=64"), "heads is missing; write it as in depth=52"),
        ((T4, f"--model={SIZES},colour=1"), "'colour' is unknown"),
        ((T4, f"--model={SIZES}", "--devices=12"), "--devices=12 do not fill nodes of 8 devices; use 8 or 16"),
        ((T4, "--devices=8", "--model=configs/digits.py"), "model 'resnet' is no transformer"),
        (
            (T4, "--devices=8", "--model=layers=96,width=12288,heads=96,vocabulary=51200,context=2048,batch=512"),
            "and has 16; use more stages",
        ),
        (
            ("--cluster=configs/clusters/box_200mbit.json", f"--model={SIZES}"),
            "has no flops, which determine compute times; give --flops=1e13",
        ),
        ((T4, f"--model={SIZES}", "--chunks=2"), "--chunks needs --schedule=interleaved; leave it out"),
        ((T4, f"--model={SIZES},bytes=0"), "--model: bytes=0 must be at least 1e-18"),
        (("--cluster=nowhere.json", f"--model={SIZES}"), "nowhere.json"),
        ((T4,), "--model is missing"),
    ],
)
def test_mistakes_in_layouts_are_one_line(args, problem):
    result = run(*args, module=LAYOUTS)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert problem in result.stderr


@pytest.mark.parametrize(
    "text, problem",
    [
        ("params=1e6,colour=1", "'colour' is unknown"),
        ("params=many", "must be a number"),
        ("tokens=10", "params is missing; write it as in params=65e6"),
        ("params=1e6", "the compute time of a step is missing"),
        ("params=1e6,forward_s=1,backward_s=2,buckets=0", "at least 1 and at most 256"),
        ("params=1e6,forward_s=-1,backward_s=2", "forward_s=-1"),
        ("params=1e6,forward_s=1", "the compute time of a step is missing"),
        ("params=-1", "params=-1 must be at least 1"),
        ("params=1e6,forward_s=-1", "forward_s=-1 must be at least 0"),
    ],
)
def test_bad_models_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        plan_model.parse(text, plan_model.Numbers).workload(SLOW, None)


@pytest.mark.parametrize("value", ["-1", "0", "4.5", "nan", "inf", "deep"])
@pytest.mark.parametrize("key", ["depth", "batch"])
def test_counts_of_a_model_are_whole(key, value):
    with pytest.raises(ValueError, match=f"--model: {key}='?{value}'? must be (a whole number|at least 1 and at most .*)$"):
        plan_model.parse(re.sub(f"{key}=[0-9]+", f"{key}={value}", SIZES), plan_model.Sizes)


def test_a_time_is_told_once():
    with pytest.raises(ValueError, match=r"--compute_s=0.3 and --model: forward_s, backward_s both set the time"):
        plan_model.parse("params=1e6,forward_s=1,backward_s=2", plan_model.Numbers).workload(SLOW, 0.3)


def test_flops_give_the_time_of_a_step():
    cluster = dataclasses.replace(SLOW, flops=1e12)
    workload = plan_model.parse("params=1e6,tokens=1000,buckets=2", plan_model.Numbers).workload(cluster, None)
    assert (workload.compute_s, workload.forward_s, workload.total_bytes) == pytest.approx((6e-3, 2e-3, 4e6))
    assert len(workload.num_bytes) == 2


DATA = "--model=params=1e6,forward_s=.1,backward_s=.2"


def profile_with(**fields):
    return json.dumps(json.loads((ROOT / "configs/clusters/t4_infiniband.json").read_text()) | fields)


def workload_with(**fields):
    return profile_with(workload=dict(forward_s=1, backward_s=[1], num_bytes=[1]) | fields)


@pytest.mark.parametrize(
    "content, args, problem",
    [
        ("[" * 100_000, (), "cannot be read as JSON: it is nested more than 64 levels deep"),
        ('{"a":' * 100_000, (), "cannot be read as JSON: it is nested more than 64 levels deep"),
        (profile_with(flops=10**400), ("--model=params=1e6,tokens=10",), "must be at least 1e-18 and at most 1e+18"),
        (profile_with(num_nodes=10**9), (DATA,), "workers=8000000000 must be at most 4096"),
        (profile_with(num_nodes=10**9), (f"--model={SIZES}",), "use --devices=4096"),
        (
            profile_with(inter=dict(latency_s=1e300, bandwidth_Bps=1e9)),
            (DATA,),
            "latency_s=1e+300 must be at least 0 and at most 1e+18",
        ),
        (profile_with(inter=dict(latency_s=0, bandwidth_Bps=1e-300)), (DATA,), "bandwidth_Bps=1e-300 must be at least 1e-18"),
        (profile_with(name=["x"]), (DATA,), "name, a list, must be a word"),
        (workload_with(forward_s=1e300), (), "forward_s=1e+300 must be at least 0 and at most"),
        (workload_with(compressed=5), (), "compressed=5 must be a list"),
        (
            workload_with(compressed=[dict(name="x", num_workers=8, topology=5, ratio=1, coding_s=0)]),
            (),
            "compressed: Compressed: topology=5 must be a word",
        ),
        (
            workload_with(num_bytes=[1] * 300, backward_s=[1] * 300),
            (),
            "num_bytes 300; give both one number for each of 1 to 256 buckets",
        ),
        ("/dev/full", (DATA,), "it is a pipe or a device"),
        ('{"name": "a", "name": "b"}', (DATA,), "'name' is given twice; leave one out"),
        (None, ("--model=params=1e300,forward_s=.1,backward_s=.2",), "params=1e+300 must be at least 1 and at most"),
        (None, ("--model=params=1e6,params=1e7,forward_s=.1,backward_s=.2",), "params is given twice"),
        (None, (f"{DATA},buckets=1e9",), "buckets=1000000000 must be at least 1 and at most 256"),
        (None, (f"{DATA},buckets=100000",), "buckets=100000 must be at least 1 and at most 256"),
        (None, (DATA, "--every=1000000000"), "every=1000000000 must be at least 1 and at most 1000"),
        (None, (DATA, "--variation=1e300"), "must be at least 0 and at most"),
        (None, (DATA, "--variation=nan"), "--variation=nan must be a finite number; give one"),
        (None, (DATA, "--ratio=1e-300"), "ratio=1e-300 must be at least 1e-18"),
        (None, (f"--model={SIZES}", "--flops=1e-300"), "flops=1e-300 must be at least 1e-18"),
        (None, (f"--model={SIZES}", "--flops=nan"), "--flops=nan must be a finite number; give one"),
        (None, (f"--model={SIZES.replace('batch=32', 'batch=1e9')}",), "stages × chunks × microbatches="),
        (None, (f"--model={SIZES.replace('depth=4', 'depth=1e17')}",), "depth=100000000000000000 must be at least 1 and at most"),
        (None, (f"--model={SIZES}", "--schedule=interleaved", f"--chunks={10**12}", "--devices=1", "--top=0"), "--top"),
    ],
)
def test_hostile_numbers_end_in_one_line(content, args, problem, tmp_path):
    path = (
        "configs/clusters/t4_infiniband.json" if content is None else content if content.startswith("/dev") else tmp_path / "p.json"
    )
    if path == tmp_path / "p.json":
        path.write_text(content)
    start = time.monotonic()
    module = LAYOUTS if any("depth=" in arg for arg in args) else "launch.plan"
    result = run(f"--cluster={path}", *args, module=module)
    assert result.returncode == 2 and not result.stdout
    assert time.monotonic() - start < 60, "two seconds on a machine with nothing else to do"
    (error,) = result.stderr.splitlines()
    assert error.startswith("error: ") and problem in error and len(error) < 300
