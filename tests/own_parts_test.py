"""Custom parts are chosen, trained and listed like decjax's own, from a single file."""

import importlib
import sys

import ml_collections
import numpy as np
import pytest

from configs import base, digits, lm
from decjax import config as parts
from decjax import models, reduce, registry, train

pytestmark = pytest.mark.usefixtures("quick_compilation")
OWN = {
    "mixer": "lazy", "reducer": "twice", "codec": "halves", "topology": "wheel", "optimizer": "plain", "schedule": "constant",
    "method": "solo", "task": "points", "model": "line",
}  # fmt: skip
STEPS = 40


@pytest.fixture(scope="module", autouse=True)
def own_parts(forgotten_parts):
    """The file is imported, as by a config."""
    sys.modules.pop("tests.own_parts", None)
    return importlib.import_module("tests.own_parts")


def config_of(**given) -> ml_collections.ConfigDict:
    tuned = dict(learning_rate=0.2, weight_decay=0.0)
    config = base.get_config(
        dict(workers=4, simulate=True, optimizer="plain") | given,
        task="points",
        model=parts.section("model", "line"),
        steps=STEPS,
        batch=8,
        clip_norm=0.0,
        tuned=lambda *_: tuned,
    )
    config.schedule = parts.section("schedule", "constant", learning_rate=0.1)
    return config


@pytest.mark.parametrize("kind", OWN)
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


def test_a_model_that_names_a_task_of_decjax_is_trained_by_it():
    @registry.register("model", "narrow", tasks=("lm",))
    def narrow(divide, *, heads: int = 3):
        """A small decoder; it has no attention heads, so a tensor-parallel group need not divide any."""
        return models.decoder_lm(width=8, hidden=heads * 8, divide=divide)

    config = lm.get_config("smoke,workers=2,tensor=2")
    config.model = parts.section("model", "narrow")
    assert parts.resolve(config).model == ("narrow", {"heads": 3})
    assert set(registry.partners("task", "lm", "model")) == {"decoder", "gpt2", "llama", "lstm", "narrow"}
    assert registry.partners("model", "narrow", "task") == ("lm",) and registry.partners("model", "line", "task") == ("points",)
    config.model = parts.section("model", "line")
    with pytest.raises(
        parts.ConfigError, match="'line' is not a model of task 'lm'; use one of decoder, gpt2, llama, lstm, narrow, or give"
    ):
        parts.resolve(config)


def test_a_model_without_divided_parameters_needs_no_group():
    config = digits.get_config("workers=2,model=mlp")
    config.tensor = 2
    with pytest.raises(
        parts.ConfigError, match="tensor=2: task 'images' with model 'mlp' has no parameters to divide; use tensor=1"
    ):
        parts.resolve(config)


def test_only_a_reducer_that_says_so_has_warm_steps():
    for name, traits in dict(patient={}, warm=dict(warm_steps="window")).items():

        @registry.register("reducer", name, **traits)
        def windowed(channel, *, window: int = 1000):
            """The mean, by windows."""
            return reduce.mean(channel)

    assert parts.resolve(lm.get_config("smoke,workers=2,method=allreduce,reducer=patient")).reducer.options["window"] == 1000
    config = lm.get_config("smoke,workers=2,method=allreduce,reducer=warm")
    assert config.reducer.window == 2 and parts.resolve(config)
    config.reducer.window = 20
    with pytest.raises(
        parts.ConfigError, match="reducer.start=0: reducer.window=20 after it does not end within steps=20.* shorter window"
    ):
        parts.resolve(config)
