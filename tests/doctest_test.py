"""Examples in docstrings produce the output they show."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
import launch

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = [info.name for package in (decjax, launch) for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
ASSUMED = {"decjax": decjax, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
pytestmark = pytest.mark.usefixtures("quick_compilation")


def with_examples():
    """Modules and packages, read as text: most have no examples and need not be imported."""
    for name in ("decjax", *MODULES):
        path = ROOT / name.replace(".", "/")
        if ">>> " in (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text():
            yield name


@pytest.mark.parametrize("name", with_examples())
def test_examples_run(name):
    module = importlib.import_module(name)  # not via the package attribute, which may shadow it
    assert "+SKIP" not in inspect.getsource(module)
    results = doctest.testmod(module, extraglobs=ASSUMED, optionflags=doctest.ELLIPSIS)
    assert results.attempted and not results.failed
