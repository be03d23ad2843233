"""PyTorch beside decjax: a process of another interpreter, which waits while it is not asked, so that the two take turns."""

import contextlib
import json
import subprocess
from typing import Any

from launch import command


class Peer:
    """A module that another interpreter runs and that answers requests by `cluster.serve`, such as `experiments.bench.codecs_torch`.

    The interpreter is the one of --peers; it inherits the cores that this process may use. The attribute `version` is the version
    of PyTorch.

    Raises:
        UserError: if the process does not start, or ends without an answer.
    """

    def __init__(self, python: str, module: str, *arguments: str):
        self._python = python
        try:
            line = [python, "-m", module, *arguments]
            self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error
        self.version = self.ask("version")

    def ask(self, do: str, **arguments: Any) -> Any:
        """What the module's handler `do` returns for these arguments."""
        with contextlib.suppress(BrokenPipeError):  # Then there is no answer, which is handled below.
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        if not (answer := self._process.stdout.readline()):
            raise self._unusable("no answer")
        return json.loads(answer)

    def _unusable(self, why: str) -> command.UserError:
        return command.UserError(
            f"--peers={self._python}: {why}; give an interpreter with the packages of experiments/requirements-peers.txt"
        )
