"""Timing of benchmarks: contenders take turns, on one core where its speed is measured, also with PyTorch in another interpreter."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import json
import os
import subprocess
import time
from typing import Any, NoReturn

import jax
import ml_collections

from decjax import config as parts
from decjax import pipeline, train
from launch import command, memory


def on_core(core: int | None = None) -> None:
    """Limit this process and those it starts to one core, by default the last; call it before a JAX backend starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        ours = sorted(os.sched_getaffinity(0))
        if core is not None and core not in ours:
            command.refuse(f"--core={core}: this process may not use it", f"use one of {', '.join(map(str, ours))}")
        os.sched_setaffinity(0, {ours[-1] if core is None else core})
    memory.keep_freed()


def seconds(program: Callable, *arguments: object) -> tuple[float, Any]:
    """Return (seconds that a program takes, its result)."""
    start_s = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start_s, result


def rotated(names: Sequence[str], k: int) -> list[str]:
    """Return the names in the order of round k, each of which starts with another one."""
    first = k % len(names)
    return [*names[first:], *names[:first]]


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Return the seconds of every contender in each round, after `warm_up` runs of each that do not count."""
    for step in contenders.values():
        for _ in range(warm_up):
            step()
    times_s = {name: [] for name in contenders}
    for k in range(rounds):
        for name in rotated(list(contenders), k):
            times_s[name].append(contenders[name]())
    return times_s


class Stepper:
    """Takes steps of a config as `launch.train` does, all on one batch; `gradient` wraps the function that computes its gradient."""

    def __init__(self, config: ml_collections.ConfigDict, gradient: Callable[[Callable], Callable] | None = None):
        setup = parts.resolve(config, jax.device_count()).setup.place()
        if gradient:
            assert isinstance(setup.source, pipeline.Whole)
            setup = dataclasses.replace(setup, source=dataclasses.replace(setup.source, around=gradient))
        self.trainer = train.Trainer(setup)
        self.state, self.batch, self.taken = self.trainer.init(), self.trainer.batch(0), 0

    def compile(self, step: int) -> None:
        """Compile the program of a step, unless that is done."""
        self.trainer.program(self.state, self.batch, step)

    def start(self) -> None:
        """Dispatch a step without waiting for its result, as a training loop does."""
        self.state, self.loss_N = self.trainer.step(self.state, self.batch, self.taken)
        self.taken += 1

    def wait(self) -> None:
        """Wait until all steps are complete."""
        jax.block_until_ready((self.state, self.loss_N))

    def step(self) -> float:
        """Return the seconds of one step, without compilation."""
        self.compile(self.taken)
        start_s = time.perf_counter()
        self.start()
        self.wait()
        return time.perf_counter() - start_s


class Peer:
    """A module that another interpreter runs and that answers requests by `cluster.serve`, such as `experiments.bench.codecs_torch`.

    It inherits the cores that this process may use, and waits between requests. The attribute `version` is the version of PyTorch.

    Args:
        python: the interpreter, that of --peers.
        module: the module.
        *arguments: of the module.

    Raises:
        UserError: if the process does not start, or ends without an answer.
    """

    def __init__(self, python: str, module: str, *arguments: str):
        self._python = python
        try:
            line = [python, "-m", module, *arguments]
            self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            self._refuse(str(error.strerror))
        self.version = self.ask("version")

    def ask(self, do: str, **arguments: object) -> Any:
        """Return the answer of the module's handler `do` for these arguments."""
        with contextlib.suppress(BrokenPipeError):  # Then there is no answer, which is handled below.
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        if not (answer := self._process.stdout.readline()):
            self._refuse("no answer")
        return json.loads(answer)

    def _refuse(self, why: str) -> NoReturn:
        fix = "give an interpreter with the packages of experiments/requirements-peers.txt"
        command.refuse(f"--peers={self._python}: {why}", fix)
