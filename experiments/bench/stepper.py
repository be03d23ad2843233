"""Steps of a config, one at a time: what `launch.train` runs, without its loop."""

from collections.abc import Callable
import dataclasses
import time

import jax
import ml_collections

from decjax import config as parts
from decjax import pipeline, train


class Stepper:
    """Takes steps of a config, all on one batch; `gradient`, if given, is applied to the function that computes its gradient."""

    def __init__(self, config: ml_collections.ConfigDict, gradient: Callable[[Callable], Callable] | None = None):
        setup = parts.build(parts.resolve(config, jax.device_count()))
        if gradient:
            assert isinstance(setup.source, pipeline.Whole)
            setup = dataclasses.replace(setup, source=dataclasses.replace(setup.source, around=gradient))
        self.trainer = train.Trainer(setup)
        self.state, self.batch, self.count = self.trainer.init(), self.trainer.batch(0), 0

    def compile(self, step: int) -> None:
        """Compiles the program of a step, unless it is compiled already."""
        self.trainer.program(self.state, self.batch, step)

    def start(self) -> None:
        """Dispatches a step without waiting for its result, as a training loop does."""
        self.state, self.loss_N = self.trainer.step(self.state, self.batch, self.count)
        self.count += 1

    def wait(self) -> None:
        """Waits until all steps are complete."""
        jax.block_until_ready((self.state, self.loss_N))

    def step(self) -> float:
        """Seconds of one step, without compilation."""
        self.compile(self.count)
        begun = time.perf_counter()
        self.start()
        self.wait()
        return time.perf_counter() - begun
