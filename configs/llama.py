"""Llama-shaped models of five sizes, trained with gossip on the text of configs/lm.py.

    python -m launch.train --config=configs/llama.py:workers=2,steps=200 --workdir=runs/llama
    python -m launch.train --config=configs/llama.py:size=124M,simulate,workers=8 --config.data.path=TEXT --workdir=runs/124M

    size   parameters   layers  width  hidden  heads  key-value heads  context  vocabulary
    10M        10.1 M        8    320     864      5                5      256         256
    124M      123.6 M       12    768    2048     12               12     1024       50304, tied
    350M      350.4 M       24   1024    2688     16               16     1024       50304, tied
    1B       1100.0 M       22   2048    5632     32                4     2048       32000
    7B       6738.4 M       32   4096   11008     32               32     4096       32000

The smallest model reads bytes and computes in float32. The others read tokens of byte-pair encoding, compute in bfloat16 and need an
accelerator. 1B has the shape of TinyLlama, 7B that of Llama 2. `--config.model.remat=none|dots|full` trades time for memory.

The learning rates are common ones of models of these sizes trained with AdamW; they are not tuned for gossip.

Shorthand as in configs/lm.py without `model`, and

    size=10M|124M|350M|1B|7B
    pretrained=FOLDER           start from a Llama, Qwen2 or GPT-2 in the files of Hugging Face: config.json and model.safetensors

With `pretrained`, tokenize the text with the model's tokenizer first (`python -m launch.tokenize`), and pass it as
`--config.data.path`. `python -m launch.export` writes a trained model in the same form.
"""

import ml_collections

from configs import base, shorthand
from decjax import config as parts
from decjax.registry import Option

LARGE = dict(dtype="bfloat16", tied=True, vocabulary=50304, context=1024)
LLAMA = dict(dtype="bfloat16", vocabulary=32000, remat="full")
SIZES = {
    "10M": dict(vocabulary=256, context=256, width=320, hidden=864, heads=5, kv_heads=5, depth=8),
    "124M": LARGE | dict(width=768, hidden=2048, heads=12, kv_heads=12, depth=12),
    "350M": LARGE | dict(width=1024, hidden=2688, heads=16, kv_heads=16, depth=24),
    "1B": LLAMA | dict(context=2048, width=2048, hidden=5632, heads=32, kv_heads=4, depth=22),
    "7B": LLAMA | dict(context=4096, width=4096, hidden=11008, heads=32, kv_heads=32, depth=32),
}
SMOKE = dict(vocabulary=256, context=32, width=16, hidden=32, heads=4, kv_heads=2, depth=2)
RATES = {"10M": 1e-3, "124M": 6e-4, "350M": 3e-4, "1B": 4e-4, "7B": 3e-4}
OWN = {"size": Option("10M", str, False, tuple(SIZES)), "pretrained": Option("", str)}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of a size, changed by a shorthand such as "size=124M,workers=8,simulate"."""
    given = shorthand.parse(arg, OWN)
    smoke, size = given.get("smoke", False), given.get("size", "10M")
    if folder := given.get("pretrained"):
        if "size" in given:
            raise ValueError(f"shorthand size={size} has no effect with pretrained={folder}; leave one out")
        model, learning_rate = parts.pretrained(folder, context=1024), 1e-4
    else:
        model, learning_rate = parts.section("model", "llama", **(SMOKE if smoke else SIZES[size])), RATES[size]
    tokenizer = "bytes" if model.vocabulary == 256 else "shards" if folder else "bpe"
    return base.get_config(
        given,
        task="lm",
        data=dict(sample_bytes=40 if smoke else 400, tokenizer=tokenizer),
        model=model,
        own=tuple(OWN),
        steps=20 if smoke else 5000,
        batch=2 if smoke else 8,
        clip_norm=1.0,
        tuned=base.by_optimizer({}, others=(learning_rate, 0.1)),
        warmup_steps=500,
        options=dict(b1=0.9, b2=0.95),
    )
