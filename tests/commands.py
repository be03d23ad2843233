"""The project's commands as a user runs them, without starting Python each time.

`python -m launch.train` takes two seconds to import its dependencies before it reads its flags, and another half second to read a
config. Here a server imports them once and forks a process for every command; the fork runs its module as __main__, with its own
arguments, environment, output and exit code.
"""

import functools
import multiprocessing
from multiprocessing import forkserver
import os
import pathlib
import pickle
import runpy
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
IMPORTED = (
    "absl.app",
    "decjax.costmodel.plan",
    "decjax.topology",
    "decjax.measure",
    "decjax.train",
    "ml_collections.config_flags",
    "rich.console",
    "rich.table",
    "tests.all_parts",
    "tests.garbage",  # last
)
# A process with several threads does not fork safely, and numpy would start one per core.
SERVER = {"OPENBLAS_NUM_THREADS": "1"}


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Return what `python -m module arguments…` would do in the repository's root.

    Args:
        module: such as "launch.train".
        *arguments: of the command.
        **environment: additional variables; those of JAX are read by the server and must be in `SERVER`.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        code = _forked(_become, module, arguments, environment, outputs)
        return subprocess.CompletedProcess([module, *arguments], code, *(path.read_text() for path in outputs))


class Flag(NamedTuple):
    """A flag of a command."""

    parser: Any  # absl's, whose `parse` raises ValueError; None for flags of other libraries
    boolean: bool
    required: bool


@functools.cache
def flags(module: str) -> dict[str, Flag]:
    """Return the flags of `python -m module` by name, including those of libraries, without running the command."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "flags")
        _forked(_tell_flags, module, path)
        return {name: Flag(*of) for name, of in pickle.loads(path.read_bytes()).items()}


def _forked(target, module, *rest) -> int:
    process = _server().Process(target=target, args=(module, *rest))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        raise subprocess.TimeoutExpired([module, *map(str, rest)], TIMEOUT_S)
    return process.exitcode


@functools.cache
def _server() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with mock.patch.dict(os.environ, SERVER):
        forkserver.ensure_running()
    return context


def _become(module, arguments, environment, outputs):
    for number, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    _start(module, *arguments)


def _start(module, *arguments):
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _tell_flags(module, path):
    from absl import app, flags

    with mock.patch.object(app, "run"):  # all flags are defined by the time a command calls it
        _start(module)
    found = flags.FLAGS
    required = {name for name in found if any("other than None" in str(v.message) for v in found[name].validators)}
    told = {name: (_if_picklable(found[name].parser), bool(found[name].boolean), name in required) for name in found}
    path.write_bytes(pickle.dumps(told))


def _if_picklable(value):
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception:  # parsers of other libraries may be anything
        return None
