"""The README's code runs as shown: its training loop learns. tests/docs_commands_test.py checks its commands."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from configs import shorthand as arguments
from experiments import compression
from tests.runs import trainer_of

README = pathlib.Path(__file__).parents[1] / "README.md"


(OWN_LOOP,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_own_loop_of_the_readme_learns():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(4,))

    def batch(t):
        x = np.random.default_rng(t).normal(size=(8, 16, 4)).astype(np.float32)
        return x, (x @ truth).astype(np.float32)

    scope: dict = {"loss": lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2)}
    exec(OWN_LOOP.replace("3e-3", "3e-2"), scope)
    workers = scope["workers"]
    params = workers.stack({"w": jnp.zeros(4)})
    state = workers.jit(scope["tx"].init, (0,))(params)
    for t in range(200):
        params, state = scope["take"](t, params, state, batch(t))
    np.testing.assert_allclose(jax.tree.map(lambda x: x.mean(axis=0), params)["w"], truth, atol=0.05)


@pytest.mark.parametrize("shorthand", sorted({row.shorthand for row in compression.ROWS}))
def test_every_config_of_the_compression_table_can_be_trained(shorthand):
    small = arguments.parse("smoke,steps=60")
    config = lm.of_keys(arguments.parse(shorthand) | small)
    config.data.path = str(README)
    trainer_of(config)


def test_every_dependency_is_explained():
    names = [
        re.split(r"[=;\[]", line)[0]
        for name in ("requirements.txt", "tests/requirements.txt", "tests/requirements-aot.txt", "docs/requirements.txt")
        for line in (README.parent / name).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    table = (README.parent / "CONTRIBUTING.md").read_text().split("## Dependencies")[1]
    assert [name for name in names if not re.search(rf"[| ,]{re.escape(name)}[ ,|]", table)] == []
