"""German to English (Multi30k's image captions), learned with gossip; an encoder–decoder of 1.2M parameters.

    python -m launch.train --config=configs/translation.py:method=allreduce,workers=16,simulate,steps=1000 \\
        --config.data.path=FOLDER --workdir=runs/allreduce
    python -m launch.train \\
        --config=configs/translation.py:workers=16,local_size=4,topology=alternating_exponential_ring,simulate,steps=1000 \\
        --config.data.path=FOLDER --workdir=runs/gossip

FOLDER holds train.de, train.en, val.de, val.en, test_2016_flickr.de and test_2016_flickr.en, plain or gzipped
(https://github.com/multi30k/dataset). Other pairs of files: --config.data.source=fr --config.data.test=NAME.

The averaged model reaches 38 BLEU on test_2016_flickr with the first command and 35 with the second, each in 20 to 42 minutes on one
busy CPU core. The defaults are 2,000 steps and one worker per device.

Shorthand as in configs/lm.py, without pipelines.
"""

import ml_collections

from configs import base, shorthand
from decjax import config as parts

# (learning rate, weight decay): the rates are those of `experiments.paper --only=translation,gap_translation`, tuned with 16 workers.
TUNED = dict(adamw=(8e-3, 1e-2), accum_adamw=(4e-3, 1e-2))
ADAM = dict(b1=0.9, b2=0.98)
# Per window. b1 is 0.9 to the power of the window: a gradient acts for as many steps as with Adam. b1=0.9 gives 6 BLEU instead of 35.
ACCUM_ADAM = dict(b1=0.43, b2=0.98, window=8)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Return the config of the translation, changed by a shorthand such as "workers=16,simulate"."""
    given = shorthand.parse(arg)
    smoke, steps = given.get("smoke", False), 10 if given.get("smoke") else 2000
    options = ACCUM_ADAM if given.get("optimizer", "").partition("(")[0] == "accum_adamw" else ADAM
    sizes = dict(vocabulary=300, width=16, hidden=32, heads=2, encoder=1, decoder=1) if smoke else {}
    config = base.get_config(
        given,
        task="translation",
        data=dict(length=48),
        model=parts.section("model", "translator", **sizes),
        steps=steps,
        batch=8,
        clip_norm=1.0,
        tuned=base.by_optimizer(TUNED, others=(2e-3, 1e-2)),
        tuned_workers=16,
        schedule="inverse_sqrt",
        warmup_steps=200,
        options=options,
    )
    config.eval.update(every=5 if smoke else 200, num_windows=16 if smoke else 0, batch_size=32)
    config.checkpoint.every = 5 if smoke else 200
    return config
