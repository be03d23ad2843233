"""Compute time of PowerSGD on one core, compared with PyTorch's `powerSGD_hook`.

    python -m experiments.bench.powersgd
    python -m experiments.bench.powersgd --peers=.venv-peers/bin/python

The peer is an interpreter with experiments/requirements-peers.txt; without it only decjax is timed. Gradients are those of a
transformer in separate arrays; one worker, so that nothing is sent. The two and a copy of the gradients in memory take turns
on one and the same core; a ratio is the copy's time over the one in question in the same round, and medians of these count.
"""

import json
import statistics

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from decjax import mesh, reduce
from decjax.channel import Channel
from experiments import script
from experiments.bench import timing

RANK = 4
# Shapes of the arrays of a small decoder, 6.8 million values: 6 layers of width 256 between an embedding and an output layer.
BLOCK = [(256, 3 * 256), (256, 256), (256, 1024), (1024, 256), (256,), (256,)]
SHAPES = [(4096, 256), *6 * BLOCK, (256,), (256, 4096)]
_PEERS = flags.DEFINE_string("peers", "", "Python interpreter with PyTorch; empty: leave it out.")
_ROUNDS = flags.DEFINE_integer("rounds", 60, "Timed rounds.", lower_bound=1)
_CORE = flags.DEFINE_integer("core", 0, "The core that computes.", lower_bound=0)


class Ours:
    """decjax's PowerSGD, compiled for one worker; gradients and state are donated, as in a training step."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.workers = mesh.make_workers(1, devices=jax.devices()[:1])
        reducer = reduce.powersgd(Channel(self.workers.axis), rank=RANK)
        self.grads = self.workers.stack([jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES])
        self.copy = jax.jit(lambda grads: jax.tree.map(jnp.copy, grads))
        self.state = self.workers.jit(reducer.init, (0,))(self.grads)
        self.reduce = self.workers.jit(reducer.reduce, (0, 0), donate_argnums=(0, 1))

    def step(self) -> float:
        """Return the seconds of one reduction."""
        grads = jax.block_until_ready(self.copy(self.grads))
        taken_s, (_, self.state) = timing.seconds(self.reduce, grads, self.state)
        return taken_s


def main() -> None:
    timing.on_core(_CORE.value)
    source = np.ones(sum(map(np.prod, SHAPES)), np.float32)
    target = np.zeros_like(source)
    contenders = {"copy": lambda: timing.seconds(np.copyto, target, source)[0], "decjax": Ours().step}
    theirs = None
    if _PEERS.value:
        peer = timing.Peer(_PEERS.value, "experiments.bench.powersgd_torch", json.dumps(SHAPES))
        theirs = f"PyTorch {peer.version}"
        contenders[theirs] = lambda: peer.ask("step")
    times_s = timing.take_turns(contenders, _ROUNDS.value, warm_up=3)

    def speed(name: str, reference: str) -> float:
        return statistics.median(other / own for own, other in zip(times_s[name], times_s[reference], strict=True))

    title = f"PowerSGD of rank {RANK}, {source.size / 1e6:.1f}M values, one core"
    table = script.table("", "ms", "GB/s of gradients", "ratio to a copy", "speed ÷ PyTorch's", title=title)
    for name, taken_s in times_s.items():
        median_s = statistics.median(taken_s)
        compared = f"{speed(name, theirs):.2f}" if theirs and name == "decjax" else ""
        rate = f"{1e-9 * source.nbytes / median_s:.2f}"
        table.add_row(name, f"{1e3 * median_s:.1f}", rate, f"{speed(name, 'copy'):.3f}", compared)
    script.show(table)


if __name__ == "__main__":
    script.run(main)
