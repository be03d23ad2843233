"""The published models as shapes only; the tiny one for a few steps."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from configs import gpt_optimus
from decjax import registry
from decjax.contrib.layouts.transformer import low_rank_ratio
from tests.runs import run_of, spec_of

ROOT = pathlib.Path(__file__).resolve().parent.parent

SHAPES = """
import json, re, sys
import jax
jax.config.update("jax_num_cpu_devices", 128)
import numpy as np
from configs import gpt_optimus
from decjax import config as parts
from decjax.train import engine
from tests.runs import trainer_of

found = {}
for size in ("2.5b", "8.3b"):
    config = gpt_optimus.get_config("size=" + size)
    config.data.path = sys.argv[1]
    trainer = trainer_of(config)
    workers, state = trainer.workers, trainer.abstract
    tokens = trainer.setup.task.examples(trainer.spec.batch_per_worker).shape
    batch = jax.ShapeDtypeStruct((workers.num_workers, workers.stages, *tokens), np.int32, sharding=workers.stacked)
    step = engine.whole_step(trainer.step_parts, trainer.method.phase(0))
    traced = step.trace(state, batch, np.int32(0))
    after, loss = traced.out_info
    same = jax.tree.all(jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), state, after))
    shard_bytes = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    sent = set(re.findall(r":(\\w+\\[[\\d,]*\\])[^\\n]* = ppermute", str(traced.jaxpr)))
    found[size] = dict(sent=sorted(sent), params=parts.size(config).params, same=same, loss=loss.shape, devices=workers.mesh.size,
                       shard_bytes=float(shard_bytes), microbatch=tokens[0] // config.pipeline.microbatches)
print(json.dumps(found))
"""


def test_the_published_models_in_shapes(tmp_path):
    """The whole train state and a whole step of 128 devices; nothing is computed or allocated."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(97, 123)) * 200)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SHAPES, str(text)], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for size, billions, width in (("2.5b", 2.5, 1920), ("8.3b", 8.3, 3072)):
        of = found[size]
        assert abs(of["params"] / (billions * 1e9) - 1) < 0.05
        assert of["same"] and of["loss"] == [4, 4] and of["devices"] == 128 and of["microbatch"] == 8
        # A stage's quarter of the layers and its table: parameters and two moments in float32, divided by 8 devices. PowerSGD's
        # errors are whole on each of them; of a message between stages, 8 sequences of 1024, each has its own. Factors and norms
        # are added.
        table, layers = 51200 * width, (of["params"] - 51200 * width) / 4
        held = 12 / 8 * (layers + table) + 4 * layers + 4 * 1024 * width
        assert held < of["shard_bytes"] < 1.02 * held
        # What a device sends to another stage: its eighth of 8192 rows, uncompressed or as factors; and half of a table's columns.
        dense, p, q = f"u16[1,1024,{width}]", "u16[1024,16]", f"u16[16,{width}]"
        assert of["sent"] == sorted([dense, p, q, f"f32[51200,{width // 2}]"])
        ratio = 1024 * width / (16 * (1024 + width))
        assert ratio == low_rank_ratio(1024, width, 16) == pytest.approx({1920: 41.7, 3072: 48.0}[width], abs=0.05)
        codec = registry.make("codec", gpt_optimus.get_config("size=" + size).boundary.backward)
        assert 2 * 1024 * width / codec.num_bytes((1024, width), "float32") == ratio


def test_the_tiny_one_trains(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 101, 4000, dtype=np.uint8).tobytes())
    config = gpt_optimus.get_config("size=tiny,steps=12,microbatches=4,backward=low_rank(rank=2)")
    config.update_from_flattened_dict(
        {
            "data.path": str(text),
            "model.width": 16,
            "model.hidden": 16,
            "model.context": 8,
            "reducer.rank": 2,
            "log_every": 2,
            "eval.every": 12,
            "eval.num_windows": 2,
            "checkpoint.every": 12,
            "data.sample_bytes": 1,
        }
    )
    outcome = run_of(config, tmp_path / "run").train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert outcome.step == 12 and losses[-1] < 0.8 * losses[0]


def test_keys_of_the_language_model_follow_the_size():
    config = gpt_optimus.get_config("size=8.3b,fused=false,compressed=auto,steps=50")
    assert (config.model.width, config.pipeline.fused_embedding, config.reducer.stages, config.steps) == (3072, False, "auto", 50)
    schedule = gpt_optimus.get_config().schedule
    assert schedule.learning_rate * schedule.final_fraction == pytest.approx(1e-5)
    with pytest.raises(ValueError, match="size='huge' is unknown; use one of 2.5b, 8.3b, tiny"):
        gpt_optimus.get_config("size=huge")


def test_a_smoke_run_of_the_tiny_one_compresses_what_its_narrower_stages_send():
    spec = spec_of(gpt_optimus.get_config("size=tiny,smoke"))
    assert spec.boundary.backward == "low_rank(rank=4)" and spec.model.options["width"] == 16
