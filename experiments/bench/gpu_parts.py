"""What `experiments.gpu` measures on one accelerator; each function returns the numbers of a row of its results log.

A step is that of `launch.train` with configs/llama.py and simulated workers. Its update, which is all that follows the gradient, is
compiled by the engine as a program of its own, so that codecs and mixers are compared without the noise of the gradient.
"""

from collections.abc import Callable
import functools
import gc
import itertools
import math
import os
import pathlib
import statistics
import sysconfig
import time
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
import jax.numpy as jnp

from configs import llama
from decjax import config as parts
from decjax import files, registry, train
from decjax.errors import OutOfMemory, translating_out_of_memory
from decjax.program import hlo
from decjax.tasks import shards, sources
from decjax.train import engine, utilization
from decjax.typing import PyTree
from experiments.bench import codecs, overlap, timing
from launch import command

Numbers = dict[str, Any]

WORKERS = parts.SIMULATED_WORKERS
BATCH = {"124M": 64, "350M": 32, "1B": 16}  # sequences per step, of all workers together
ALL_REDUCE, GOSSIP = (f"workers={WORKERS},{method}" for method in ("method=allreduce", "topology=one_peer_exponential"))
OPTIONS = engine.early_exchange("gpu", [("", "")])
MIXERS = tuple(name for name in registry.names("mixer") if name != "exact")
EVALUATIONS, PERIOD = 20, 16  # evaluations of a run, after multiples of so many steps
VOCABULARY = 50304
SMOKE_FILES = 100


class Scale(NamedTuple):
    """Sizes of the measurements: by default those of the page."""

    smoke: bool = False  # tiny models on CPU
    rounds: int = 9
    steps: int = 5  # timed together in a round
    side: int = 16384  # of the matrix that codecs encode
    windows: int = 128  # of text for validation


SMOKE = Scale(smoke=True, rounds=1, steps=1, side=64, windows=8)


def start(smoke: bool) -> str:
    """Start JAX and return the kind of its device; end the command if it is not a GPU, unless it is a smoke run."""
    if smoke:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # The largest rows need most of the memory.
    device = jax.devices()[0]
    if device.platform != "gpu" and not smoke:
        command.fail(
            f"no GPU: JAX finds {device.platform} only; use a machine with an H100 or H200, or --smoke for tiny models on CPU"
        )
    return device.device_kind


def numbers(measure: Callable[[], Numbers]) -> Numbers:
    """Return the numbers of a row, or the reason why it has none as `failed`, so that the other rows are measured."""
    try:
        with translating_out_of_memory():
            return measure()
    except OutOfMemory:
        reason = "out of memory"
    except (train.TrainingError, RuntimeError, ValueError) as error:
        reason = command.one_line(error)[:100].replace("|", "/")
    _references.cache_clear()  # Their states may be lost.
    gc.collect()  # The next row needs the memory.
    return {"failed": reason}


def trainer_of(shorthand: str, scale: Scale, size: str = "124M", **fields: Any) -> train.Trainer:
    """Return the trainer of a method on a size of configs/llama.py, with workers simulated on one device."""
    batch = WORKERS if scale.smoke else BATCH[size]
    common = f"size={size},simulate,batch_size={batch}" + ",smoke" * scale.smoke
    config = llama.get_config(f"{common},{shorthand}")
    config.update_from_flattened_dict({"model.remat": "full", "data.tokenizer": "bytes", "data.sample_bytes": 0} | fields)
    return train.Trainer(parts.resolve(config, 1))


def card(scale: Scale) -> Numbers:
    """Return the device and its copy bandwidth, read and written bytes together."""
    with translating_out_of_memory():
        x, copy = jnp.ones((scale.side, scale.side)), jax.jit(jnp.copy)
        copy_s = statistics.median([timing.seconds(copy, x)[0] for _ in range(1 + scale.rounds)][1:])
    device, day = jax.devices()[0].device_kind, time.strftime("%Y-%m-%d")
    return {"device": device, "jax": jax.__version__, "day": day, "copy_GBps": 2e-9 * x.nbytes / copy_s}


def step(size: str, shorthand: str, scale: Scale) -> Numbers:
    """Return time, MFU and memory of a training step."""
    trainer = trainer_of(shorthand, scale, size)
    state, batch = trainer.init(), trainer.batch(0)
    program, loss_N, times_s = trainer.program(state, batch, 0), None, []
    for _ in range(1 + scale.rounds):  # The first one warms up.
        start_s = time.perf_counter()
        for _ in range(scale.steps):
            state, loss_N = trainer.take(program, state, batch, 0)
        jax.block_until_ready((state, loss_N))
        times_s.append((time.perf_counter() - start_s) / scale.steps)
    step_s, peak = statistics.median(times_s[1:]), utilization.peak_flops(jax.devices()[0])
    tokens = trainer.spec.batch_size * trainer.setup.task.items
    mfu, used = trainer.model_flops / (step_s * peak) if peak else None, hlo.device_bytes(program.executables[0])
    return {"step_s": step_s, "tokens": tokens, "mfu": mfu, "gib": used / 2**30}


class Update:
    """The update of a method, which follows the gradient, on a state of its own."""

    def __init__(self, shorthand: str, scale: Scale, grads: PyTree = None):
        trainer = trainer_of(shorthand, scale)
        self._state = trainer.init()
        self.grads = jax.tree.map(lambda x: 1e-3 * x, self._state.params) if grads is None else grads
        phase, messages = trainer.method.phase(0), lambda fn: fn
        self._run = engine.compile_update(trainer.step_parts, "fused", phase, self._state, self.grads, messages)

    def __call__(self) -> float:
        """Return the seconds of one update."""
        taken_s, self._state = timing.seconds(self._run, self._state, self.grads)
        return taken_s


@functools.cache
def _references(scale: Scale) -> dict[str, Update]:
    gossip = Update(GOSSIP, scale)
    return {GOSSIP: gossip, ALL_REDUCE: Update(ALL_REDUCE, scale, gossip.grads)}


def overhead(shorthand: str, scale: Scale) -> Numbers:
    """Return the time of an update of gossip, compared with all-reduce and uncompressed gossip, which take turns with it."""
    references = _references(scale)
    update = Update(f"workers={WORKERS},{shorthand}", scale, references[GOSSIP].grads)
    times_s = timing.take_turns({"": update, **references}, scale.rounds, warm_up=2)
    own, gossip, all_reduce = times_s[""], times_s[GOSSIP], times_s[ALL_REDUCE]
    return {
        "update_s": statistics.median(own),
        "more_s": statistics.median(a - b for a, b in zip(own, gossip, strict=True)),
        "to_gossip": statistics.median(a / b for a, b in zip(own, gossip, strict=True)),
        "to_all_reduce": statistics.median(a / b for a, b in zip(own, all_reduce, strict=True)),
    }


def codec(name: str, scale: Scale) -> Numbers:
    """Return the speed of a codec relative to a copy, by `codecs.PARTS`, its compression ratio and its error."""
    x = jax.random.normal(jax.random.key(1), (scale.side, scale.side))
    row = codecs.Row(name, x)
    medians = codecs.measure(x, {name: row}, None, scale.rounds)
    speeds = {part: medians[name, part] for part in codecs.PARTS[:3]}
    return speeds | {"smaller": row.smaller, "error": row.error}


def option(name: str, _: Scale) -> Numbers:
    """Return the value of an option of `engine.early_exchange` that the compiler accepts; a RuntimeError if it refuses it."""
    options: Any = {name: OPTIONS[name]}
    jax.jit(lambda x: x + 1).lower(1.0).compile(options)
    return {"value": OPTIONS[name]}


def schedule(name: str, _: Scale) -> Numbers:
    """Return when the messages of a method of `overlap.METHODS` start and end, in the compiled program for several GPUs.

    On one GPU the program is compiled ahead of time for eight of its kind.
    """
    try:
        devices, compiled = jax.devices(), "for these devices"
        if len(devices) == 1:
            topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{WORKERS}")
            devices, compiled = topology.devices, "ahead of time"
        argument, mixing = overlap.METHODS[name]
        cells = overlap.row(list(overlap.schedules(argument, devices, **mixing)))
    except Exception as error:  # A plugin that does not describe several GPUs may raise anything.
        return {"failed": f"not visible on this machine ({command.one_line(error)[:100]})"}
    return {"devices": f"{len(devices)}, {compiled}", "cells": cells}


# -- Loss -------------------------------------------------------------------------------------------------------------


def text(out: pathlib.Path, scale: Scale) -> tuple[pathlib.Path, Numbers]:
    """Return (folder, index) of the tokens of all Python files of this interpreter and its packages, made unless they are there.

    A file that occurs several times counts once.
    """
    folder, path = out / "tokens", out / "python.txt"
    if not (folder / shards.INDEX).exists():
        roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"/usr/lib/python3/dist-packages"}
        paths = sorted(path for root in roots for path in pathlib.Path(root).rglob("*.py") if path.is_file())
        texts = dict.fromkeys(path.read_bytes() for path in paths[: SMOKE_FILES if scale.smoke else None])
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(filter(sources.is_text, texts)))
        kind = "bytes" if scale.smoke else "bpe"
        shards.write(str(path), folder, tokenizer=kind, vocabulary=VOCABULARY)
    return folder, files.read_json(folder / shards.INDEX)["train"]


def loss(shorthand: str, steps: int, out: pathlib.Path, scale: Scale) -> Numbers:
    """Return the validation loss of the averaged model against tokens."""
    folder, index = text(out, scale)
    fields = {"data.path": str(folder), "data.tokenizer": "shards"}
    trainer = trainer_of(f"workers={WORKERS},steps={steps},{shorthand}", scale, **fields)
    state, losses, sent, start_s = trainer.init(), [], 0.0, time.perf_counter()
    tokens, every = trainer.spec.batch_size * trainer.setup.task.items, PERIOD * max(1, steps // PERIOD // EVALUATIONS)
    for number in itertools.count():
        if number % every == 0 or number == steps:
            value = trainer.evaluate(state, scale.windows, local=False).averaged["loss"]
            if not math.isfinite(value):
                return {"failed": f"diverged before step {number}"}
            losses.append((number * tokens, round(value, 4)))
        if number == steps:
            break
        batch = trainer.batch(number)
        program = trainer.program(state, batch, number)
        state, _ = trainer.take(program, state, batch, number)
        sent += float(program.sent["worker"].mean())
    taken_s = time.perf_counter() - start_s
    return {"losses": losses, "sent_bytes": sent / steps, "seconds": taken_s, "text": index}
