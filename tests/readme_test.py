"""The README's own training loop runs as it stands, and learns."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

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


def test_every_dependency_is_explained():
    names = [re.split(r"[=;]", line)[0] for name in ("requirements.txt", "tests/requirements.txt", "tests/requirements-aot.txt")
             for line in (README.parent / name).read_text().splitlines() if line and not line.startswith("#")]
    table = README.read_text().split("## Dependencies")[1].split("## Sources")[0]
    assert [name for name in names if not re.search(rf"[| ,]{re.escape(name)}[ ,|]", table)] == []
