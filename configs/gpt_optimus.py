"""The models of Optimus-CC (arXiv 2301.09830) on workers × stages × tensor devices, with compressed messages on every axis.

    python -m launch.train --config=configs/gpt_optimus.py:size=tiny --workdir=runs/optimus          8 devices
    python -m launch.train --config=configs/gpt_optimus.py:size=2.5b --workdir=runs/optimus          128 devices

    size    layers  width  heads  vocabulary  context  layout (workers × stages × tensor)  microbatches     parameters
    2.5b    52      1920   24     51200       1024     4 × 4 × 8                           16 of 8          2.4e9
    8.3b    72      3072   24     51200       1024     4 × 4 × 8                           16 of 8          8.3e9
    tiny    4       64     2      bytes       64       2 × 4 × 1                           16 of 1          2.1e5

The two large sizes have the paper's batch of 512 sequences, 230,000 steps, learning rate 1.5e-4 with 1 % warm-up and a cosine to
1e-5, weight decay 0.01 and clipping at 1; Adam's b1 and b2 are the usual 0.9 and 0.999. The config is one of configs/lm.py with
other values; that file's keys may follow `size`, as in size=2.5b,fused=false,compressed=auto or backward=none. All three techniques
are on:

    FE    pipeline.fused_embedding              the tied embedding is averaged over both stages and all workers at once
    SC    reducer.stages=3 of 4, powersgd       gradients of the first 75 % of stages, rank 128 (tiny: 4)
    CB    backward=low_rank(rank=16)            gradients that stages wait for in the cool-down, with lazy error propagation; each
                                                of 8 devices compresses its own 1024 rows, to factors in half precision: 41.7 or
                                                48 times fewer bytes

At the end of a step the paper keeps the error of CB with its link; here (boundary.error="flush") it is added to the next step's
first gradient, which gives a lower loss (experiments/optimus.py).

Differences from the paper: PowerSGD is applied to the 13 or 18 layers of a stage as one matrix, theirs to one layer's part on one
of eight devices, so messages here are smaller at the same rank; layers have rotary positions, RMS norms and no biases; the data are
bytes, whatever the vocabulary. The two large sizes were not trained: tests check their shapes, and
experiments/bench/optimus_step.py compiles them.
"""

import ml_collections

from configs import lm, shorthand
from decjax.registry import Option

PUBLISHED = "workers=4,stages=4,tensor=8,microbatches=16,rank=128,backward=low_rank(rank=16,values=bfloat16)"
LAYOUTS = {"2.5b": PUBLISHED, "8.3b": PUBLISHED, "tiny": "workers=2,stages=4,microbatches=16,rank=4,backward=low_rank(rank=16)"}
MODELS = {"2.5b": dict(depth=52, width=1920), "8.3b": dict(depth=72, width=3072)}
METHOD = "method=allreduce,tied,remat,fused,reducer=powersgd,compressed=3"
OWN = {"size": Option("2.5b", str, False, tuple(LAYOUTS))}


def get_config(arg: str = "size=2.5b") -> ml_collections.ConfigDict:
    """Return the config of a model size, from a shorthand such as "size=tiny,fused=false" with any further keys of configs/lm.py."""
    given = shorthand.parse(arg, OWN)
    size = given.pop("size", "2.5b")
    layout = LAYOUTS[size]
    if given.get("smoke"):
        layout = layout.replace("rank=16", "rank=4")  # The width is a quarter, too.
    usual = shorthand.parse(METHOD) | shorthand.parse(layout)
    if given.get("reducer", "powersgd") != "powersgd":  # These two keys are for PowerSGD.
        usual = {key: value for key, value in usual.items() if key not in ("rank", "compressed")}
    config = lm.of_keys({key: value for key, value in (usual | given).items() if value != "none"})
    if config.boundary.backward:
        config.boundary.error = "flush"
    config.optimizer.weight_decay, config.clip_norm = 0.01, 1.0
    if size == "tiny":
        config.batch_size = config.workers * config.pipeline.microbatches
        config.model.context = 64
        return config
    config.batch_size = 512
    config.steps = given.get("steps", 230_000)
    config.model.update(MODELS[size], hidden=4 * MODELS[size]["width"], heads=24, vocabulary=51200, context=1024, dtype="bfloat16")
    config.optimizer.update(b1=0.9, b2=0.999)
    config.schedule.update(learning_rate=1.5e-4, final_fraction=1 / 15, warmup_steps=config.steps // 100)
    return config
