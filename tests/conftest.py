"""Eight CPU devices for all tests, before any backend starts, and one compilation cache for the whole suite.

Nearly all of the suite's time is compilation, much of it of equal programs: a run and its continuation, or the same command
in two processes. The cache is empty at the start and gone at the end; processes started by tests inherit it. Of the two code generators
of jax 0.10, the older one takes half the time.
"""

import importlib.metadata
import os
import shutil
import tempfile

_OWNER = "PYTEST_XDIST_WORKER" not in os.environ  # The process that starts the others.
if _OWNER:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="decjax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # Later ones have one generator, and do not know the flag.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def quick_compilation():
    """Code generation at its quickest: these programs run for milliseconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def users_generator(monkeypatch):
    """Steps of training as users have them compiled, where bits count: the older generator rounds sums and products elsewhere."""
    if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        compiled = jax.stages.Lowered.compile
        monkeypatch.setattr(
            jax.stages.Lowered,
            "compile",
            lambda lowered, options=None: compiled(lowered, (options or {}) | {"xla_cpu_use_fusion_emitters": True}),
        )


@pytest.fixture(scope="module")
def uncached_programs():
    """Programs are compiled anew each time: loaded from the cache, those of several CPU devices of jax 0.10 take collectives that do
    not need each other, as gossip and those of a pipeline's ticks, in an order that differs by device, and wait for ever."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def pytest_unconfigure(config):
    if _OWNER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
