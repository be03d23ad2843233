"""A decjax worker of an emulated cluster: takes steps of any method of a config file on request; see `group`."""

import collections
from collections.abc import Callable
import contextlib
import ctypes
import socket
import time
from typing import Any

import jax
from jax.experimental import io_callback
import ml_collections
import numpy as np

from decjax import config as parts
from decjax import train
from experiments import script
from experiments.bench.cluster.serve import serve
from experiments.bench.timing import Stepper
from launch import config_file, join

THROUGHPUT_PORT = 4999
MOST_PERIOD = 128  # steps after which a schedule repeats, at most


class Pausing(Stepper):
    """A stepper whose steps can pause, to simulate slower compute."""

    def __init__(self, config: ml_collections.ConfigDict):
        self.pauses_s: collections.deque[float] = collections.deque()  # of steps that have not begun yet
        super().__init__(config, self.pausing)

    def pausing(self, gradient: Callable) -> Callable:
        """Return the gradient function with a pause before it, which keeps no core busy."""

        def sleep(_):
            time.sleep(self.pauses_s.popleft())
            return np.int32(0)

        def paused(params, state, tokens_BxT1, key):
            after = io_callback(sleep, jax.ShapeDtypeStruct((), np.int32), tokens_BxT1[0, 0])
            return gradient(params, state, tokens_BxT1 + after, key)

        return paused

    def start(self, pause_s: float = 0.0) -> None:
        self.pauses_s.append(pause_s)
        super().start()


class Worker:
    """The handlers of requests to a decjax worker."""

    def __init__(self):
        self.steppers: dict[str, Stepper] = {}

    def prepare(
        self, method: str, argument: str, fields: dict[str, Any], batch_size: int, pauses: bool = False, file: str = "configs/lm.py"
    ) -> dict[str, Any]:
        """Build and compile a method for as many workers as fit; return its period, in steps, and its number of parameters.

        It takes no step: gloo fails if a process compiles 30 s longer than others.
        """
        config = config_file.get_config(f"{file}:{argument}")
        config.update_from_flattened_dict(fields)
        config.workers = jax.device_count() // parts.read(config).devices_of_worker
        config.batch_size = batch_size * config.workers
        self.steppers[method] = stepper = (Pausing if pauses else Stepper)(config)
        phases = [stepper.trainer.method.phase(step) for step in range(MOST_PERIOD, 3 * MOST_PERIOD)]  # Outer steps begin late.
        period = next((p for p in range(1, MOST_PERIOD + 1) if phases[p:] == phases[:-p]), len(set(phases)))
        for step in range(2 * period):
            stepper.compile(step)
        params = stepper.trainer.workers.one_device(stepper.state.params)
        return {"period": period, "parameters": sum(x.size for x in jax.tree.leaves(params))}

    def steps(self, method: str, count: int, pause_s: tuple[float, float] = (0.0, 0.0), seed: int = 0) -> list[float]:
        """Return the seconds of `count` steps, each with a pause of pause_s[0] plus an exponential variable of mean pause_s[1].

        The first step is measured separately; of the others only the sum is meaningful, since they are dispatched asynchronously.
        """
        fixed, mean = pause_s
        rng = np.random.default_rng((seed, jax.process_index()))
        stepper, marks_s = self.steppers[method], [time.perf_counter()]
        for number in range(count):
            stepper.start(*([fixed + rng.exponential(mean)] if isinstance(stepper, Pausing) else []))
            if number in (0, count - 1):
                stepper.wait()
            marks_s.append(time.perf_counter())
        _give_back_memory()
        return np.diff(marks_s).tolist()

    def throughput(self, address: str, num_bytes: int) -> float | None:
        """Return the bytes per second of one TCP connection from process 1 to process 0; None elsewhere."""
        if jax.process_index() == 0:
            with socket.create_server((address, THROUGHPUT_PORT)) as listener, listener.accept()[0] as connection:
                received, begun = len(connection.recv(1)), time.perf_counter()
                while chunk := connection.recv(2**20):
                    received += len(chunk)
                return received / (time.perf_counter() - begun)
        if jax.process_index() == 1:
            with _connect(address) as connection:
                connection.sendall(bytes(num_bytes))
        return None


def _give_back_memory() -> None:
    """Return freed memory to the system, which glibc would keep: an emulated cluster has about twenty waiting workers."""
    with contextlib.suppress(AttributeError):  # Another C library.
        ctypes.CDLL(None).malloc_trim(0)


def _connect(address: str, tries: int = 300) -> socket.socket:
    for _ in range(tries):
        try:
            return socket.create_connection((address, THROUGHPUT_PORT))
        except ConnectionRefusedError:  # Process 0 does not listen yet.
            time.sleep(0.1)
    raise ConnectionRefusedError(address)


def main() -> None:
    with join.leaving_at_once((train.TrainingError,), "start again"):
        join.set_up_devices(0)
        worker = Worker()
        serve({"prepare": worker.prepare, "steps": worker.steps, "throughput": worker.throughput})


if __name__ == "__main__":
    script.run(main, errors=(train.TrainingError,))
