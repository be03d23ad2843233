"""Eight CPU devices for all tests, before any backend starts, and one compilation cache for the whole suite.

Nearly all of the suite's time is compilation, much of it of equal programs: a run and its continuation, or the same command
in two processes. The cache is empty at the start and gone at the end; processes started by tests inherit it. Of the two code
generators of jax 0.10, the older one takes half the time. `make test-all` also compiles as users do:

    DECJAX_TEST_COMPILE=users    the compiler's own options
    DECJAX_TEST_CACHE=FOLDER     a cache that stays

Tests that take long are listed in tests/slow.txt and marked `slow`; those that also run as users compile, in tests/as_users.txt.
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

_OWNER = "PYTEST_XDIST_WORKER" not in os.environ  # The process that starts the others.
AS_USERS = os.environ.get("DECJAX_TEST_COMPILE") == "users"
MARK = f"DECJAX_TESTS={os.getpid()}"  # in the environment of all that this process starts
os.environ.update([MARK.split("=")])
MOST_MB = 1500  # of memory, in each process that runs tests
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under nohup it is ignored, which processes that tests start would inherit.
# Hundreds of processes read what is compiled here. They write no bytecode: a file that a test writes twice within a second would seem
# unchanged.
os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # In these processes it is `quick_compilation` that says so.
if _OWNER:
    for package in ("decjax", "launch", "configs", "experiments"):
        compileall.compile_dir(pathlib.Path(__file__).parent.parent / package, quiet=2)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("DECJAX_TEST_CACHE") or tempfile.mkdtemp(prefix="decjax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MALLOC_ARENA_MAX"] = "2"  # Of workers: each arena keeps memory of its own.
    # Later versions have one generator, and do not know the flag.
    if importlib.metadata.version("jaxlib").startswith("0.10.") and not AS_USERS:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
if not AS_USERS:  # Processes that tests start compile at their quickest, too.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.fixture(scope="module")
def quick_compilation():
    """Code generation at its quickest: these programs run for milliseconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not AS_USERS)
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


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs():
    """A file's programs go with it: together they would take gigabytes. The next file's are kept in the cache again."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    if "tests.runs" in sys.modules:
        sys.modules["tests.runs"].forget()
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # Else the C library keeps what programs took.


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running():
    """Processes that a failed test left behind would slow down all others."""
    yield
    end_what_is_left()


def end_what_is_left():
    """Kills the processes that tests of this process have started, those whose parents have ended among them."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            is_server = parent == os.getpid() and b"multiprocessing" in (entry / "cmdline").read_bytes()  # of tests/commands.py
            if MARK.encode() in (entry / "environ").read_bytes().split(b"\0") and not is_server:
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def forgotten_parts():
    """What a file enters in the registry goes with it: other tests do not see it."""
    from decjax import registry

    for kind in registry.KINDS:
        registry.names(kind)  # Those of decjax come first.
    before = {kind: dict(known) for kind, known in registry._parts.items()}
    yield
    for kind, known in registry._parts.items():
        known.clear()
        known.update(before[kind])


LISTS = pathlib.Path(__file__).parent
MARKED = {  # Files, tests, or single cases, by the mark that they get.
    mark: [line for line in (LISTS / f"{mark}.txt").read_text().splitlines() if not line.startswith("#")]
    for mark in ("slow", "as_users")
}


# Files whose tests take long and share nothing: each worker takes one test at a time.
APART = {"audit_test.py", "warm_cache_test.py", "gpt_optimus_test.py"}


def pytest_collection_modifyitems(items):
    """Marks what the lists hold. Files with many slow tests come first, and quick ones last: so no worker waits long for another at
    the end."""
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
