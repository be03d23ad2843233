"""The project's commands as a user runs them, quicker than by starting Python.

`python -m launch.train` takes two seconds to import what it needs before it reads its flags. Here a server imports it once, and
every command is a process forked from it: it runs its module as __main__, and has arguments, environment, output and exit code of
its own.
"""

import functools
import multiprocessing
from multiprocessing import forkserver
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
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
)
# A process of several threads does not fork well, and numpy would start one per core.
QUICK = {} if os.environ.get("DECJAX_TEST_COMPILE") == "users" else {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
SERVER = {**QUICK, "OPENBLAS_NUM_THREADS": "1"}


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """What `python -m module arguments…` would come to, in the repository's root.

    Args:
        module: such as "launch.train".
        *arguments: of the command.
        **environment: variables besides those of the tests; those of JAX are read by the server and must be in `SERVER`.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        process = _server().Process(target=_become, args=(module, arguments, environment, outputs))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired([module, *arguments], TIMEOUT_S)
        return subprocess.CompletedProcess([module, *arguments], process.exitcode, *(path.read_text() for path in outputs))


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
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
