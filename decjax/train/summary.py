"""Results of a run: the contents of `summary.json`, and those of an evaluation."""

from collections.abc import Mapping
import pathlib
import signal
from typing import Any, NamedTuple

import jax
import numpy as np

from decjax import config, files
from decjax.train.evaluate import Evaluation
from decjax.typing import PyTree

BYTES = {  # counter -> (mesh axis, name of its value per step in the summary)
    "bytes_sent_per_worker": ("worker", "bytes_per_step_per_worker"),
    "bytes_between_stages_per_worker": ("stage", "bytes_between_stages_per_step_per_worker"),
}
# Entries of every summary.
REPORTED = ("steps", "time_s", "eval_loss", "local_eval_loss_min", "local_eval_loss_max", "bytes_per_step_per_worker")


class Outcome(NamedTuple):
    """The end of a run.

    Attributes:
        step: the last step taken.
        signal: the signal that interrupted the run; None if it is finished.
        summary: contents of `summary.json`; None if the run is not finished.
        shown: a sample of the averaged model, such as a generated text; None if the task has none.
        already_finished: whether the run was finished before, so nothing was computed.
    """

    step: int
    signal: signal.Signals | None
    summary: dict | None
    shown: str | None
    already_finished: bool = False


def spread(name: str, value: float, local_N: np.ndarray) -> dict[str, float]:
    """Return a metric with its minimum and maximum over workers."""
    return {name: value, f"{name}_min": float(local_N.min()), f"{name}_max": float(local_N.max())}


def read(workdir: pathlib.Path) -> dict | None:
    """Return the contents of summary.json; None if it is missing or damaged."""
    try:
        summary = files.read_json(workdir / "summary.json")
    except ValueError:
        return None
    return summary if all(isinstance(summary.get(name), int | float) for name in REPORTED) else None


def summarize(
    spec: config.RunSpec, result: Evaluation, further: Mapping[str, float], params: PyTree, counters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the contents of summary.json: metrics, size, time and bytes at the end of a run.

    `params` are those of the averaged model, and `further` are metrics that only the averaged model has.
    """
    values = {f"eval_{name}": value for name, value in {**result.averaged, **further}.items()}
    for name, local_N in result.local.items():
        values |= {f"local_eval_{name}_{of}": float(getattr(local_N, of)()) for of in ("mean", "min", "max")}
    steps = spec.steps - counters["first_step"]
    return values | {
        "num_params": sum(x.size for x in jax.tree.leaves(params)),
        "steps": spec.steps,
        "time_s": counters["time_s"],
        "goodput": counters["goodput"],
        **{per_step: counters[name] / steps for name, (_, per_step) in BYTES.items() if name in counters},
        "protocol": _protocol(spec),
    }


def _protocol(spec: config.RunSpec) -> str:
    """Describe whether and when replicas were replaced by their average."""
    first, last = spec.consensus_first, spec.consensus_last
    every = f"every {spec.consensus_every} steps" if spec.consensus_every else ""
    when = [every, f"in the first {first} steps" if first else "", f"in the last {last} steps" if last else ""]
    if not any(when):
        return "averaged model, training undisturbed"
    return f"replicas replaced by their average {', '.join(filter(None, when))}"


def title(setup: config.Setup) -> str:
    """Return a description of a run, such as "8 workers on 8 cpu devices, one_peer_exponential, 0.13 M parameters"."""
    workers = setup.workers
    devices = workers.devices
    params = jax.eval_shape(setup.task.init, jax.random.key(0))
    return (
        f"{_count(workers.num_workers, 'worker')} {'simulated ' if workers.simulated else ''}on "
        f"{_count(len(devices), f'{devices[0].device_kind} device')}, "
        f"{setup.topology.name if setup.topology else setup.spec.method.name}, "
        f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.3g} M parameters"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
