"""decjax.config: a config and its file describe the same run, sections hold exactly their parts' options, and no device is needed."""

import copy
import json
import os
import pathlib
import subprocess
import sys

import ml_collections
import pytest

from configs import gpt_optimus, lm
from decjax import config as parts
from decjax import registry, topology
from decjax.config import setup

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHORTHANDS = [
    "workers=8",
    "topology=base_k(k=2)",
    "optimizer=accum_adamw,order=atc,every=2",
    "optimizer=lion(b1=0.95)",
    "mixer=choco(gamma=0.5),codec=topk(fraction=0.1,values=int4)",
    "mixer=beer(gamma=0.5),codec=int8",
    "mixer=power_gossip,rank=2",
    "mixer=accelerated(rounds=2),topology=ring",
    "mixer=push_sum(gamma=0.5),codec=int8,topology=random_digraph(degree=2)",
    "method=local,simulate",
    "mixer=relay",
    "mixer=overlap_push_sum,topology=random_digraph",
    "method=qg_dsgdm(nesterov=True),mixer=choco(gamma=0.5),codec=int8",
    "method=exact_diffusion,optimizer=sgdm",
    "method=mc_dsgt,topology=sun,microbatches=4",
    "method=allreduce,stale",
    "method=allreduce,reducer=powersgd(rank=1,wire_dtype=bfloat16)",
    "method=allreduce,reducer=demo",
    "method=allreduce,reducer=gravac",
    "method=onebit_adam",
    "method=diloco,every=3,reducer=codec(form=shards),codec=int8",
    "method=sparseloco",
    "stages=2,tensor=2,workers=2,microbatches=4,schedule=interleaved,remat,tied",
    "method=allreduce,stages=2,microbatches=2,reducer=powersgd,rank=1,compressed=1,backward=low_rank(rank=1),forward=int8",
]
SECTIONS = ("model", "schedule", "optimizer", "method", "mixer", "reducer")


def spec_of(shorthand):
    return parts.resolve(lm.get_config(f"smoke,steps=30,{shorthand}"), 8)


@pytest.mark.parametrize("shorthand", SHORTHANDS)
def test_a_config_and_its_file_are_the_same_run(shorthand):
    spec = spec_of(shorthand)
    again = parts.resolve(json.loads(json.dumps(spec.document)), 4)
    assert again == spec and again.document == spec.document
    assert spec.workers * spec.devices_of_worker == spec.devices == 8 or spec.simulate
    around = {"name", "start", "stages", "cluster"}
    for kind in SECTIONS:
        if section := spec.document.get(kind):
            own = registry.part(kind, section["name"]).options.keys()
            assert own <= section.keys() <= own | (around if kind == "reducer" else {"name"})


def test_no_device_is_needed():
    """There is no platform. Only a mixer without `gamma` computes anything: its codec's loss."""
    program = "from tests import config_test\nfor text in config_test.SHORTHANDS: config_test.spec_of(text)"
    environment = os.environ | {"JAX_PLATFORMS": "none", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_workers_that_are_filled_in_carry_the_batch_along():
    config = lm.get_config("smoke,stages=2,microbatches=3,method=local")
    before = copy.deepcopy(config)
    for devices, workers in ((8, 4), (2, 1), (None, 4)):
        spec = parts.resolve(config, devices)
        assert (spec.workers, spec.batch_per_worker, spec.simulate) == (workers, 2 * 3, False)
    spec = parts.resolve(config, 1, "gpu")
    assert (spec.workers, spec.batch_per_worker, spec.simulate) == (parts.SIMULATED_WORKERS, 2 * 3, True)
    assert config == before, "the config is the caller's"
    assert parts.read(config).workers == 0


def document(shorthand="workers=8"):
    return copy.deepcopy(spec_of(shorthand).document)


def changed(shorthand, path, value):
    """A document with one value set, or removed if it is `...`."""
    found = document(shorthand)
    *sections, field = path.split(".")
    section = found
    for name in sections:
        section = section.setdefault(name, {})
    if value is ...:
        del section[field]
    else:
        section[field] = value
    return found


@pytest.mark.parametrize(
    "shorthand, path, value, complaint",
    [
        # options of parts that were not chosen
        ("workers=8", "optimizer.window", 3, "optimizer 'adamw' has no option 'window'; use "),
        ("workers=8", "mixer.gamma", 0.5, "mixer 'exact' has no option 'gamma'; use "),
        ("workers=8", "method.stale", True, "method 'decentralized' has no option 'stale'"),
        ("workers=8", "reducer.name", "mean", "config.reducer has no effect with method 'decentralized' and task 'lm'"),
        ("method=local", "mixer.name", "exact", "config.mixer has no effect with method 'local'"),
        ("method=local", "topology", "ring", "config.topology has no effect with method 'local'"),
        ("method=onebit_adam", "optimizer.name", "adamw", "config.optimizer has no effect with method 'onebit_adam'"),
        ("method=allreduce", "reducer.rank", 2, "reducer 'mean' has no option 'rank'"),
        ("method=allreduce", "reducer.start", 2, "reducer 'mean' has no option 'start'"),
        ("method=allreduce,reducer=powersgd", "reducer.stages", "1", "reducer.stages='1' has no effect with pipeline.stages=1"),
        ("method=allreduce,stages=2,reducer=gravac", "reducer.stages", "1", "reducer 'gravac' has no option 'stages'"),
        ("workers=8", "pipeline.remat", True, "pipeline.remat=True has no effect with pipeline.stages=1; leave it out"),
        ("workers=8", "boundary.backward", "int8", "boundary.backward='int8' has no effect with pipeline.stages=1; leave it out"),
        ("stages=2", "boundary", "int8", "config.boundary='int8' must be a section of fields"),
        ("stages=2", "boundary.error", "flush", "boundary.error='flush' has no effect with boundary.backward=''"),
        ("stages=2,backward=int8", "boundary.slots", 8, "boundary.slots=8 has no effect with boundary.forward=''"),
        ("stages=2,forward=int8", "boundary.when", "always", "boundary.when='always' has no effect with boundary.backward=''"),
        # unknown fields
        ("workers=8", "colour", "red", "config.colour has no effect"),
        ("workers=8", "eval.colour", 1, "eval.colour is unknown; use every, num_windows, batch_size"),
        ("workers=8", "data.colour", 1, "task 'lm' has no option 'colour'"),
        ("workers=8", "pipeline.colour", 1, "pipeline.colour is unknown"),
        ("workers=8", "task", "chess", "task 'chess' is unknown; use one of"),
        ("workers=8", "mixer.name", "sum", "mixer 'sum' is unknown; use one of"),
        (
            "workers=8",
            "model",
            {"name": "mlp"},
            "'mlp' is not a model of task 'lm'; use one of decoder, gpt2, llama, lstm, or give",
        ),
        ("workers=8", "engine", "warp", "engine='warp' is unknown; use one of auto, fused, split"),
        # missing fields
        ("workers=8", "steps", ..., "config lacks steps; add it, as configs/lm.py does"),
        ("workers=8", "mixer", ..., "config lacks mixer"),
        ("workers=8", "method.name", ..., "config lacks method.name; add it, as configs/lm.py does"),
        # values of another type
        ("workers=8", "steps", "many", "steps='many' must be a whole number"),
        ("workers=8", "steps", 1.5, "steps=1.5 must be a whole number"),
        ("workers=8", "seed", None, "seed=None must be a value"),
        ("workers=8", "simulate", "yes", "simulate='yes' must be True or False"),
        ("workers=8", "optimizer.b1", "high", "optimizer 'adamw': b1='high' must be a number"),
        ("workers=8", "optimizer.mu_dtype", " ", "optimizer.mu_dtype=' ' must be a floating-point type, such as"),
        ("workers=8", "optimizer.mu_dtype", "int8", "optimizer.mu_dtype='int8' must be a floating-point type"),
        ("workers=8", "topology", 3, "topology=3 must be a name"),
        ("workers=8", "mixer.codec", ["int8"], "mixer 'exact': codec=\\['int8'\\] must be a word"),
        ("workers=8", "mixer.codec", {"name": "int8"}, "mixer 'exact': codec={'name': 'int8'} must be a word"),
        ("workers=8", "data.path", [], "task 'lm': path=\\[\\] must be a word$"),
        ("method=allreduce,reducer=gravac", "reducer.ladder", [5], "ladder=\\[5\\] must be a word; the default is 'bfloat16; int8"),
        ("workers=8", "optimizer", "adamw", "config.optimizer='adamw' must be a section of fields"),
        ("workers=8", "eval", 10, "config.eval=10 must be a section of fields"),
        ("workers=8", "pipeline.stages", "2", "pipeline.stages='2' must be a whole number"),
        ("workers=8", "workers", 10**9, "workers=1000000000 must be .*at most 65536"),
        ("workers=8", "model.width", 10**30, "must be at most"),
    ],
)
def test_what_a_config_may_not_hold_is_refused_in_one_line(shorthand, path, value, complaint):
    with pytest.raises(parts.ConfigError, match=complaint) as error:
        parts.resolve(changed(shorthand, path, value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [[1], "lm", 3, None, {}, {"steps": object()}, ml_collections.ConfigDict({"steps": 3})])
def test_what_is_no_config_is_refused_in_one_line(given):
    with pytest.raises(parts.ConfigError) as error:
        parts.read(given)
    assert "\n" not in str(error.value)


def test_an_option_that_a_file_lacks_has_its_default():
    """When a part gains an option, older files keep their meaning."""
    for option in ("mixer.rounds", "eval.local"):
        assert parts.resolve(changed("workers=8", option, ...)) == spec_of("workers=8")


def test_sections_take_call_forms_and_refuse_other_options():
    assert parts.choose("mixer", "choco(codec=int4)", gamma=0.5, rank=3).to_dict() == dict(
        name="choco", codec="int4", gamma=0.5, rounds=1
    )
    assert "name" not in parts.section("task", "lm", sample_bytes=3)
    with pytest.raises(ValueError, match="mixer 'choco' has no option 'rank'; use codec, rounds, gamma"):
        parts.section("mixer", "choco", rank=3)


def test_the_size_of_a_published_run_is_told_by_shapes():
    size = parts.size(gpt_optimus.get_config("size=2.5b"))
    assert (size.workers, size.tokens) == (4, 128 * 1024) and abs(size.params / 2.5e9 - 1) < 0.05


def test_options_in_brackets_keep_those_of_the_task():
    plain, chosen = (lm.get_config(f"optimizer=accum_adamw{options}").optimizer.to_dict() for options in ("", "(window=2)"))
    assert chosen == plain | {"window": 2} and plain["b1"] == lm.ACCUM_ADAM["b1"]


def test_a_graph_with_nodes_gets_their_size():
    nodes = setup.make_topology("alternating_exponential_ring", 8, 2)
    assert nodes == topology.make("alternating_exponential_ring", 8, local_size=2)
    assert nodes != setup.make_topology("alternating_exponential_ring", 8, 4)
