"""Steps of a config, one at a time: what `launch.train` runs, without its loop."""

from collections.abc import Callable
import time

import jax
import ml_collections
import numpy as np

from decjax import train
from decjax.train import engine
from decjax.train import state as state_lib


class Stepper:
    """A method: its state, its compiled steps and one batch.

    Args:
        config: as `configs/lm.py` describes.
        gradient: wraps the config's gradient source; None: as it is.
    """

    def __init__(self, config: ml_collections.ConfigDict, gradient: Callable[[Callable], Callable] | None = None):
        self.setup = setup = train.build(config)
        self.state = state_lib.init(*setup.beginning)
        source = setup.source.gradient
        self.program = engine.make_step(
            gradient(source) if gradient else source, setup.method, setup.workers, config.seed, setup.config.engine
        )
        self.batch = setup.workers.build(lambda worker: setup.batch(worker, 0))
        self.count = 0

    def compile(self, step: int) -> engine.Program:
        """The program of a step."""
        return self.program(self.setup.method.phase(step), self.state, self.batch, np.int32(step))

    def start(self) -> None:
        """Starts a step, as a training loop does: nothing waits for its result but the next one."""
        self.state, self.loss_N = self.compile(self.count).run(self.state, self.batch, np.int32(self.count))
        self.count += 1

    def wait(self) -> None:
        """Until all steps are over."""
        jax.block_until_ready((self.state, self.loss_N))

    def step(self) -> float:
        """Seconds of one step."""
        self.compile(self.count)
        begun = time.perf_counter()
        self.start()
        self.wait()
        return time.perf_counter() - begun
