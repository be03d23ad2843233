"""A decoder-only transformer on tokens of byte-pair encoding, trained with gossip.

    python -m launch.train --config=configs/gpt.py:workers=16,simulate --config.data.path=TEXT --workdir=runs/gpt

TEXT is a file or folder, JSON lines or Parquet (`--config.data.field` names the field), or module:NAME of your own source; without
it, the sources of Python's standard library. The vocabulary of 4,000 tokens is trained on the text first, which takes seconds for a
megabyte. The loss is in nats per token; runs also report it per byte, and the perplexity.

2,000 steps on the library's sources reached a perplexity of 12 (2.48 nats per token, 0.80 per byte), in 30 minutes on one busy CPU core.
The learning rates are those of configs/lm.py, which were tuned for a smaller byte-level model.

Shorthand as in configs/lm.py.
"""

import ml_collections

from configs import lm, shorthand


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of the model, changed by a shorthand such as "workers=16,simulate,optimizer=accum_adamw"."""
    given = shorthand.parse(arg)
    config = lm.of_keys(given if given.get("smoke") else dict(steps=2000) | given)
    config.data.tokenizer = "bpe"
    if given.get("smoke"):
        config.model.vocabulary = 300
        return config
    stages = config.pipeline.stages * config.pipeline.chunks
    config.model.update(vocabulary=4000, context=64, width=128, hidden=512, heads=4, depth=-(-4 // stages) * stages)
    return config
