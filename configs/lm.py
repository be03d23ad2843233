"""A byte-level decoder-only transformer on real text, trained by 8 workers with decentralized AdamW.

    python -m launch.train --config=configs/lm.py --workdir=runs/lm

Shorthand, comma-separated after a colon, as `--config=configs/lm.py:workers=12,topology=torus,optimizer=accum_adamw`:

    workers=N  local_size=L  simulate  steps=N  smoke  engine=auto|fused|split  fsdp=L
    method=NAME  optimizer=NAME  topology=NAME  mixer=NAME  reducer=NAME       python -m launch.parts lists the names
    model=decoder|lstm                                                         a transformer or a recurrent network
    scale=linear|sqrt                                                          scale the learning rate with the global batch
    order=awc|atc  every=H  stale  codec=NAME  rank=R                          options of the parts that have them
    stages=S  tensor=T  microbatches=M  schedule=gpipe|1f1b|interleaved  chunks=C  remat  tied
    backward=CODEC  forward=CODEC  tensor_codec=CODEC  autoencoder=R  autoencoder_init=random|pca  fused
    compressed=K|auto  delay=D

Each worker has stages × tensor devices that share one model: stages=2,tensor=2,workers=2 are 2 workers of 4 devices each.
Or fsdp devices divide its parameters, optimizer state and batch.
Any field of the config can be set with `--config.SECTION.FIELD=VALUE`; a run's config.json shows them all.

The defaults are for two CPU cores, where the run takes about three minutes; the loss on validation text is 0.96 to 0.97 nats/byte.
"""

from collections.abc import Mapping
from typing import Any

import ml_collections

from configs import base, shorthand
from decjax import config as parts
from decjax.registry import Option

# (learning rate, weight decay) of the byte-level LM, tuned for AdamW and AccumAdamW only. Here gossip's best rate is larger than
# all-reduce's; a likely reason is that the noise of a worker's small batch increases Adam's second moment and so makes its steps
# smaller. AccumAdam squares the mean gradient of a window, so its best rate is between the two. AccumAdamW gets a lower rate in order
# "awc": on a quadratic the largest stable rate is about half of that in order "atc".
TUNED = dict(
    adamw=(2.8e-2, 0.03), accum_adamw=(1.6e-2, 0.1), sgdm=(0.5, 1e-4), sign=(2e-3, 0.1), lion=(2e-3, 0.1), muon=(1e-2, 0.03)
)
TUNED_ATC = TUNED | dict(accum_adamw=(2.4e-2, 0.05))
TUNED_ALLREDUCE = TUNED | dict(adamw=(1.2e-2, 0.03))
AVERAGED = ("allreduce", "onebit_adam", "zero_one_adam")
ADAM = dict(b1=0.9, b2=0.99)
ACCUM_ADAM = dict(b1=0.8, b2=0.98, window=4)  # per window

OWN = {"model": Option("decoder", str, False, ("decoder", "lstm"))}


def tuned(method: str, order: str, optimizer: str) -> dict[str, float]:
    """Return the learning rate and weight decay for a method, order and optimizer on this task."""
    table = TUNED_ALLREDUCE if method in AVERAGED else TUNED_ATC if order == "atc" else TUNED
    learning_rate, weight_decay = table.get(optimizer, (3e-3, 0.03))
    return dict(learning_rate=learning_rate, weight_decay=weight_decay)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of the language model, changed by a shorthand such as "workers=12,topology=torus"."""
    return of_keys(shorthand.parse(arg, OWN))


def of_keys(given: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return the config of a parsed shorthand."""
    smoke, steps = given.get("smoke", False), 20 if given.get("smoke") else 5000
    options = ACCUM_ADAM if given.get("optimizer", "").partition("(")[0] == "accum_adamw" else ADAM
    chunks = given.get("chunks", 2 if given.get("schedule") == "interleaved" else 1)
    return base.get_config(
        given,
        task="lm",
        data=dict(sample_bytes=40 if smoke else 400),
        model=_model(given, smoke, given.get("stages", 1) * chunks),
        own=tuple(OWN),
        steps=steps,
        batch=2,
        clip_norm=1.0,
        tuned=tuned,
        warmup_steps=150,
        options=options,
    )


def _model(given: Mapping[str, Any], smoke: bool, chunks: int) -> ml_collections.ConfigDict:
    """Return the section of the model, with at least one layer per virtual stage of a pipeline."""
    context = 32 if smoke else 128
    if given.get("model", "decoder") == "lstm":
        return parts.section("model", "lstm", vocabulary=256, context=context, width=16 if smoke else 128, depth=2)
    return parts.section(
        "model",
        "decoder",
        vocabulary=256,
        context=context,
        width=16 if smoke else 64,
        hidden=32 if smoke else 256,
        heads=2,
        depth=max(2, chunks),
    )
