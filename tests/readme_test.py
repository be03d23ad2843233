"""What the README shows runs as it stands: its training loop learns, its commands and configs exist."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from decjax import train
from experiments import compression

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_loop_of_the_readme_learns():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(4,))

    def batches(t):
        x = np.random.default_rng(t).normal(size=(8, 16, 4)).astype(np.float32)
        return x, (x @ truth).astype(np.float32)

    scope = {"loss": lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2),
             "batches": batches, "init_params": {"w": jnp.zeros(4)}}
    exec(code, scope)
    assert jax.device_count() == 8
    np.testing.assert_allclose(scope["average"]["w"], truth, atol=0.05)


def test_every_command_of_the_readme_exists():
    modules = set(re.findall(r"python -m ((?:launch|experiments)[\w.]+)", README.read_text()))
    assert len(modules) >= 6
    for module in modules:
        assert (README.parent / (module.replace(".", "/") + ".py")).is_file(), module


SHORTHANDS = sorted({*re.findall(r"--config=configs/lm\.py:(\S+)", README.read_text()), *(row.shorthand for row in compression.ROWS)})


@pytest.mark.parametrize("shorthand", SHORTHANDS)
def test_every_config_of_the_readme_and_of_the_compression_table_can_be_trained(shorthand):
    workers = re.search(r"workers=(\d+)", shorthand)
    many = workers and int(workers[1]) > jax.device_count()
    config = lm.get_config(f"{shorthand},smoke,steps=60" + (",simulate" if many else ""))
    config.data.path = str(README)
    train.build(config)


def test_every_dependency_is_explained():
    names = [re.split(r"[=;]", line)[0] for name in ("requirements.txt", "tests/requirements.txt", "tests/requirements-aot.txt")
             for line in (README.parent / name).read_text().splitlines() if line and not line.startswith("#")]
    table = README.read_text().split("## Dependencies")[1].split("## Sources")[0]
    assert [name for name in names if not re.search(rf"[| ,]{re.escape(name)}[ ,|]", table)] == []
