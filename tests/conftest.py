"""Eight CPU devices for all tests, set before any backend starts, and one compilation cache for the whole suite.

Nearly all of the suite's time is compilation, much of it of equal programs: a run and its continuation, or the same command in two
processes. The cache is empty at the start and removed at the end; processes started by tests inherit it. jax 0.10 has two CPU code
generators, of which the older one takes half the time. `make test-all` also compiles the way users do:

    DECJAX_TEST_COMPILE=users    the compiler's default options
    DECJAX_TEST_CACHE=FOLDER     a persistent cache

Slow tests are listed in tests/slow.txt and marked `slow`; those that also run as users compile, in tests/as_users.txt.
"""

import collections
import compileall
import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile

_OWNER = "PYTEST_XDIST_WORKER" not in os.environ  # the process that starts the others
AS_USERS = os.environ.get("DECJAX_TEST_COMPILE") == "users"
MARK = f"DECJAX_TESTS={os.getpid()}"  # in the environment of every process started from here
os.environ.update([MARK.split("=")])
MOST_MB = 1500  # memory limit of each test process
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and processes started by tests would inherit that
# Hundreds of processes read the bytecode compiled here. They write none: a file that a test writes twice within a second would seem
# unchanged.
os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # in these processes, `quick_compilation` sets it
if _OWNER:
    for package in ("decjax", "launch", "configs", "experiments"):
        compileall.compile_dir(pathlib.Path(__file__).parent.parent / package, quiet=2)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("DECJAX_TEST_CACHE") or tempfile.mkdtemp(prefix="decjax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MALLOC_ARENA_MAX"] = "2"  # for workers: each arena keeps its own memory
    # Later versions have one generator and reject the flag.
    if importlib.metadata.version("jaxlib").startswith("0.10.") and not AS_USERS:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import garbage  # noqa: E402, F401

jax.config.update("jax_num_cpu_devices", 8)
if not AS_USERS:  # processes started by tests also compile without optimizations
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.fixture(scope="module")
def quick_compilation():
    """Turn compiler optimizations off: these programs run for milliseconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not AS_USERS)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def users_generator(monkeypatch):
    """Compile training steps as users do where bits matter: the older generator rounds sums and products elsewhere."""
    if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        compiled = jax.stages.Lowered.compile
        monkeypatch.setattr(
            jax.stages.Lowered,
            "compile",
            lambda lowered, options=None: compiled(lowered, (options or {}) | {"xla_cpu_use_fusion_emitters": True}),
        )


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs():
    """Release a file's programs, which together would take gigabytes. The next file's programs are cached again."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    if "tests.runs" in sys.modules:
        sys.modules["tests.runs"].forget()
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # otherwise the C library keeps the memory of released programs


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running():
    """Kill processes that a failed test left behind; they would slow down all others."""
    yield
    end_what_is_left()


def end_what_is_left():
    """Kill the processes started by this process's tests, including orphans."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            is_server = parent == os.getpid() and b"multiprocessing" in (entry / "cmdline").read_bytes()  # of tests/commands.py
            if MARK.encode() in (entry / "environ").read_bytes().split(b"\0") and not is_server:
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def forgotten_parts():
    """Remove the parts that a file registers, so that other tests do not see them."""
    from decjax import registry

    for kind in registry.KINDS:
        registry.names(kind)  # register decjax's own parts first
    before = {kind: dict(known) for kind, known in registry._parts.items()}
    yield
    for kind, known in registry._parts.items():
        known.clear()
        known.update(before[kind])


LISTS = pathlib.Path(__file__).parent
MARKED = {  # files, tests, or single cases, by mark
    mark: [line for line in (LISTS / f"{mark}.txt").read_text().splitlines() if not line.startswith("#")]
    for mark in ("slow", "as_users")
}


# Files with slow tests that share nothing: each test may go to a different worker.
APART = {"audit_test.py", "warm_cache_test.py", "gpt_optimus_test.py"}


def pytest_collection_modifyitems(items):
    """Apply the marks of the lists, and sort: files with many slow tests first, quick ones last, so that no worker waits long at
    the end.
    """
    slow = collections.Counter()
    for item in items:
        path, _, case = item.nodeid.partition("::")
        file = pathlib.PurePath(path).name
        for mark, listed in MARKED.items():
            if {file, f"{file}::{case}", f"{file}::{case.partition('[')[0]}"}.intersection(listed):
                item.add_marker(mark)
                slow[path] += mark == "slow"
    items.sort(key=lambda item: -slow[item.nodeid.partition("::")[0]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") == "loadfile":
        from xdist.scheduler import LoadFileScheduling

        class Scheduling(LoadFileScheduling):
            def _split_scope(self, nodeid):
                file = super()._split_scope(nodeid)
                return nodeid if pathlib.PurePath(file).name in APART else file

        return Scheduling(config, log)


_memory_mb: dict[str, int] = {}


def pytest_sessionfinish(session):
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_mb"] = peak_mb
    elif not session.config.getoption("numprocesses", None):
        _memory_mb["main"] = peak_mb


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _memory_mb[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak_mb", 0)


def pytest_terminal_summary(terminalreporter):
    peaks = ", ".join(f"{name} {peak} MB" for name, peak in sorted(_memory_mb.items()))
    terminalreporter.write_line(f"most memory of a process: {peaks}; wanted: at most {MOST_MB} MB")


def pytest_unconfigure():
    if _OWNER and "DECJAX_TEST_CACHE" not in os.environ:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
