"""Parts of one's own are chosen, trained and listed as those of decjax are; one file holds them, and no second place."""

import importlib
import sys

import ml_collections
import numpy as np
import pytest

from configs import base
from decjax import config as parts
from decjax import registry, train

pytestmark = pytest.mark.usefixtures("quick_compilation")
OWN = {
    "mixer": "lazy", "reducer": "twice", "codec": "halves", "topology": "wheel", "optimizer": "plain", "schedule": "constant",
    "method": "solo", "task": "points", "model": "line",
}  # fmt: skip
STEPS = 40


@pytest.fixture(scope="module", autouse=True)
def own_parts(forgotten_parts):
    """The file is imported, as a config would."""
    sys.modules.pop("tests.own_parts", None)
    return importlib.import_module("tests.own_parts")


def config_of(**given) -> ml_collections.ConfigDict:
    tuned = dict(learning_rate=0.2, weight_decay=0.0)
    config = base.get_config(
        dict(workers=4, simulate=True, optimizer="plain") | given, steps=STEPS, batch=8, clip_norm=0.0, tuned=lambda *_: tuned
    )
    config.task, config.data = "points", parts.section("task", "points")
    config.model = parts.section("model", "line")
    config.schedule = parts.section("schedule", "constant", learning_rate=0.1)
    return config


@pytest.mark.parametrize("kind", registry.KINDS)
def test_one_of_each_kind_is_listed_with_its_options(kind, own_parts):
    assert OWN[kind] in registry.names(kind)
    part = registry.part(kind, OWN[kind])
    assert part.factory.__module__ == own_parts.__name__ and part.summary
    assert set(registry.complete(kind, OWN[kind], {})) == set(part.options)


@pytest.mark.parametrize(
    "given",
    [
        dict(topology="wheel", mixer="lazy(share=0.8)"),
        dict(topology="wheel", mixer="choco", codec="halves(steps=256)"),
        dict(method="allreduce", reducer="twice(scale=1.0)"),
        dict(method="allreduce", reducer="codec", codec="halves"),
        dict(method="solo"),
        dict(optimizer="muon", topology="ring"),
        dict(optimizer="lion(b1=0.8)", method="tracking", topology="ring"),
        dict(optimizer="adafactor", method="diloco", every=4),
    ],
    ids=str,
)
def test_they_are_trained_with(given):
    trainer = train.Trainer(parts.resolve(config_of(**given)))
    state, losses = trainer.init(), []
    for step in range(STEPS):
        state, loss_N = trainer.step(state, trainer.batch(step), step)
        losses.append(np.asarray(loss_N).mean())
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert trainer.evaluate(state).averaged["loss"] < losses[0]


def test_options_of_another_part_are_refused_by_name():
    document = parts.resolve(config_of(topology="wheel", mixer="lazy")).document
    document["mixer"]["gamma"] = 0.5
    with pytest.raises(parts.ConfigError, match="mixer 'lazy' has no option 'gamma'; use share"):
        parts.resolve(document)
