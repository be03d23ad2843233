"""Every method continues bit for bit from its files: from a checkpoint within a round, where it has any."""

import json
import shutil

import pytest

from configs import digits, quadratics
from tests.runs import run_of
from tests.tiny_runs import assert_equal_states

STEPS, SAVED = 9, 4
pytestmark = pytest.mark.usefixtures("quick_compilation")
VECTORS = (
    "order=awc,optimizer=accum_adamw(window=3)",
    "order=atc,optimizer=adamw,topology=one_peer_exponential",
    "mixer=accelerated(rounds=2),topology=ring",
    "mixer=push_sum,order=atc,topology=directed_exponential",
    "mixer=overlap_push_sum,topology=directed_exponential",
    "mixer=relay,optimizer=sgdm,topology=line",
    "mixer=delayed(delay=3),order=atc",
    "mixer=consensus_control,order=atc",
    "mixer=choco,codec=int8",
    "mixer=beer,codec=int8",
    "mixer=dcd,codec=int8",
    "mixer=deepsqueeze,codec=int8",
    "method=tracking,optimizer=adamw,order=atc,topology=one_peer_exponential",
    "method=tracking,order=awc",
    "method=qg_dsgdm",
    "method=qg_dadam",
    "method=decentlam",
    "method=exact_diffusion",
    "method=d2,topology=line",
    "method=gt_nsgdm",
    "method=mc_dsgt,topology=one_peer_ring",
    "method=local",
    "method=diloco,every=3,reducer=codec,codec=int4",
    "method=sparseloco,every=3",
    "method=slowmo,every=3",
    "method=slowmo_gossip,every=3",
    "method=gossip_diloco,every=3,mixer=choco,codec=int4",
    "method=noloco,every=3",
    "method=tma(every=3,pace='3,2,1,2')",
)
MATRICES = (  # Of a network: some need matrices, or enough values for a code to pay.
    "method=zero_one_adam(doubling=2,refresh=1),reducer=codec(codec=int8,start=2)",
    "method=onebit_adam,reducer=codec(codec=int8,start=2)",
    "method=allreduce,optimizer=adamw,reducer=codec(codec=int8)",
    "method=streaming_diloco(every=6,fragments=2,delay=2)",
    "method=diloco,every=3,optimizer=muon",
    "method=allreduce,reducer=dion,rank=2",
    "method=allreduce,reducer=powersgd,rank=2",
    "method=ist,every=3",
    "mixer=power_gossip,rank=1",
)


def configured(argument):
    make = quadratics if argument in VECTORS else digits
    config = make.get_config(f"smoke,simulate,workers=4,steps={STEPS},{argument}")
    config.update_from_flattened_dict({"checkpoint.every": SAVED, "checkpoint.keep": 9, "log_every": 1, "eval.every": STEPS})
    return config


def rows(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "time_s" and not name.endswith("_per_s")} for row in lines]


@pytest.mark.parametrize("argument", [*VECTORS, *MATRICES])
def test_a_run_continues_bit_for_bit(argument, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_of(configured(argument), whole).train()
    shutil.copytree(whole, part)
    (part / "summary.json").unlink()
    for step in (part / "checkpoints").iterdir():
        if step.name.isdigit() and int(step.name) > SAVED:
            shutil.rmtree(step)
    run = run_of(configured(argument), part)
    assert run.start == SAVED and run.train().step == STEPS
    assert_equal_states(whole, part, STEPS)
    assert rows(whole) == rows(part)
    assert (whole / "summary.json").read_text().split('"time_s"')[0] == (part / "summary.json").read_text().split('"time_s"')[0]
