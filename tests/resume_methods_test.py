"""Every method continues from its files: bit for bit, including from within a round; and with another number of workers."""

import json

import jax
import numpy as np
import pytest

from configs import digits, quadratics
from decjax import train
from tests.runs import run_of
from tests.tiny_runs import assert_equal_states, forget_after

STEPS, SAVED, WORKERS = 9, 4, 8
pytestmark = pytest.mark.usefixtures("quick_compilation")
VECTORS = (
    "order=awc,optimizer=accum_adamw(window=3)",
    "order=atc,optimizer=adamw,topology=one_peer_exponential",
    "mixer=accelerated(rounds=2),topology=ring",
    "mixer=push_sum,order=atc,topology=directed_exponential",
    "mixer=overlap_push_sum,topology=directed_exponential",
    "mixer=relay,optimizer=sgdm,topology=line",
    "mixer=delayed(delay=3),order=atc",
    "mixer=delayed(delay=0),order=atc",
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
    "method=slowmo,every=3",
    "method=slowmo_gossip,every=3",
    "method=gossip_diloco,every=3,mixer=choco,codec=int4",
    "method=noloco,every=3",
    "method=tma(every=3,pace='3,2,1,2')",
    "order=atc,optimizer=adamw,param_dtype=bfloat16",
)
MATRICES = (  # needs a network: some methods need matrices, or enough values for a code to pay
    "method=sparseloco,every=3",
    "method=diloco,every=3,reducer=codec,codec=int4",
    "method=diloco,every=3,param_dtype=bfloat16",
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

# One for each kind of memory.
RESIZED = (
    "order=awc,optimizer=accum_adamw(window=3)",
    "mixer=overlap_push_sum,topology=directed_exponential",
    "mixer=delayed(delay=3),order=atc",
    "mixer=consensus_control,order=atc",
    "mixer=choco,codec=int8",
    "mixer=beer,codec=int8",
    "method=tracking,order=awc",
    "method=exact_diffusion",
    "method=slowmo_gossip,every=3",
    "method=tma(every=3,pace='3,2,1,2')",
    "method=sparseloco,every=3",
    "method=zero_one_adam(doubling=2,refresh=1),reducer=codec(codec=int8,start=2)",
    "method=streaming_diloco(every=6,fragments=2,delay=2)",
    "method=allreduce,reducer=powersgd,rank=2",
    "method=ist,every=3",
    "mixer=power_gossip,rank=1",
)


def configured(argument, workers=WORKERS, steps=STEPS):
    make, rate = (quadratics, 1e-2) if argument in VECTORS else (digits, 1e-3)
    config = make.get_config(f"smoke,simulate,workers={workers},steps={steps},{argument}")
    fields = {"checkpoint.every": SAVED, "checkpoint.keep": 9, "log_every": 1, "eval.every": steps}
    config.update_from_flattened_dict(fields | {"schedule.learning_rate": rate})
    return config


def rows(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "time_s" and not name.endswith("_per_s")} for row in lines]


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """Return (the method, its trainer with compiled programs, the directory of a complete run); pytest groups tests by method."""
    run = run_of(configured(request.param), tmp_path_factory.mktemp("whole") / "run")
    run.train()
    return request.param, run.trainer, run.workdir


@pytest.mark.parametrize("whole", [*VECTORS, *MATRICES], indirect=True)
def test_a_run_continues_bit_for_bit(whole, tmp_path):
    _, trainer, whole = whole
    part = forget_after(whole, SAVED, tmp_path / "part")
    run = train.Run(trainer, part)
    assert run.start == SAVED and run.train().step == STEPS
    assert_equal_states(whole, part, STEPS)
    assert rows(whole) == rows(part)
    assert (whole / "summary.json").read_text().split('"time_s"')[0] == (part / "summary.json").read_text().split('"time_s"')[0]


@pytest.mark.parametrize("whole", RESIZED, indirect=True)
def test_fewer_workers_go_on_from_the_average_of_all(whole, tmp_path):
    argument, trainer, whole = whole
    before = train.Run(trainer, whole)
    run = run_of(configured(argument, WORKERS // 2, 2 * STEPS), tmp_path / "run", whole)
    assert run.start == STEPS
    then, now = (jax.tree.map(np.asarray, each.trainer.average(each.state)[0]) for each in (before, run))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5), then, now)
    assert run.train().step == 2 * STEPS and np.isfinite([row["loss"] for row in rows(run.workdir)]).all()
