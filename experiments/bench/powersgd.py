"""What PowerSGD's arithmetic costs on one core, beside that of PyTorch's `powerSGD_hook`.

    python -m experiments.bench.powersgd --peers=PYTHON

PYTHON is an interpreter with experiments/requirements-peers.txt; without it only decjax is timed. Gradients are those of a
transformer in separate arrays; one worker, so that nothing is sent. The two and a copy of the gradients in memory take turns
on one and the same core; a ratio is the copy's time over the one in question in the same round, and medians of these count.
"""

import json
import os
import statistics
import time

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import rich.box
import rich.console
import rich.table

from decjax import mesh, reduce
from decjax.channel import Channel
from experiments.bench.peer import Peer
from launch import command, memory

RANK = 4
_PEERS = flags.DEFINE_string("peers", "", "Python interpreter with PyTorch; empty: leave it out.")
_ROUNDS = flags.DEFINE_integer("rounds", 60, "Timed rounds.", lower_bound=1)
_CORE = flags.DEFINE_integer("core", 0, "The core that computes.", lower_bound=0)


def shapes(width: int = 256, hidden: int = 1024, depth: int = 6, vocabulary: int = 4096) -> list[tuple[int, ...]]:
    """Of the arrays of a small decoder, 6.8 million values."""
    block = [(width, 3 * width), (width, width), (width, hidden), (hidden, width), (width,), (width,)]
    return [(vocabulary, width), *depth * block, (width,), (width, vocabulary)]


class Ours:
    """The reducer, compiled for one worker; gradients and state are given away, as in a training step."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.workers = mesh.make_workers(1, devices=jax.devices()[:1])
        reducer = reduce.powersgd(Channel(self.workers.axis), rank=RANK)
        self.grads = self.workers.stack([jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes()])
        self.copy = jax.jit(lambda grads: jax.tree.map(jnp.copy, grads))
        self.state = self.workers.jit(reducer.init, (0,))(self.grads)
        self.reduce = self.workers.jit(reducer.reduce, (0, 0), donate_argnums=(0, 1))

    def step(self) -> float:
        grads = jax.block_until_ready(self.copy(self.grads))
        begun = time.perf_counter()
        _, self.state = jax.block_until_ready(self.reduce(grads, self.state))
        return time.perf_counter() - begun


class Copy:
    """As many bytes from one place to another."""

    def __init__(self):
        self.source = np.ones(sum(map(np.prod, shapes())), np.float32)
        self.target = np.zeros_like(self.source)

    def step(self) -> float:
        begun = time.perf_counter()
        np.copyto(self.target, self.source)
        return time.perf_counter() - begun


class Theirs(Peer):
    """The hook, in an interpreter that has PyTorch."""

    def __init__(self, python: str):
        super().__init__(python, "experiments.bench.powersgd_torch", json.dumps(shapes()))

    def step(self) -> float:
        return self.ask("step")


def main(argv: list[str]) -> None:
    del argv
    if hasattr(os, "sched_setaffinity"):
        if _CORE.value not in (cores := os.sched_getaffinity(0)):
            raise command.UserError(f"--core={_CORE.value} is not ours to use; use one of {', '.join(map(str, sorted(cores)))}")
        os.sched_setaffinity(0, {_CORE.value})  # Before the backend starts its threads; the peer inherits it.
    memory.keep_freed()
    contenders = {"copy": Copy(), "decjax": Ours()}
    if _PEERS.value:
        peer = Theirs(_PEERS.value)
        contenders[f"PyTorch {peer.version}"] = peer
    for contender in contenders.values():
        for _ in range(3):
            contender.step()
    times = {name: [] for name in contenders}
    for k in range(_ROUNDS.value):
        names = list(contenders)
        for name in names[k % len(names) :] + names[: k % len(names)]:  # Nobody always goes first.
            times[name].append(contenders[name].step())
    num_bytes = contenders["copy"].source.nbytes
    table = rich.table.Table(box=rich.box.MARKDOWN, title=f"PowerSGD of rank {RANK}, {num_bytes / 4e6:.1f}M values, one core")
    for column in ("", "ms", "GB/s of gradients", "ratio to a copy", "speed ÷ PyTorch's"):
        table.add_column(column, justify="right" if column else "left")
    theirs = next((taken for name, taken in times.items() if name.startswith("PyTorch")), None)
    for name, taken in times.items():
        ratio = statistics.median(copy / t for copy, t in zip(times["copy"], taken))
        faster = statistics.median(other / t for other, t in zip(theirs, taken)) if theirs and name == "decjax" else None
        median = statistics.median(taken)
        table.add_row(
            name, f"{1e3 * median:.1f}", f"{1e-9 * num_bytes / median:.2f}", f"{ratio:.3f}", f"{faster:.2f}" if faster else ""
        )
    rich.console.Console(width=120).print(table)


if __name__ == "__main__":
    command.run(main)
