"""decjax: training deep networks when the network between workers is the bottleneck.

A training method is a composition of small, pure things, each usable alone. From the bottom up:

    topology    who talks to whom, when                    NumPy only
    schedules   which pipeline stage does what, when       NumPy only
    costmodel   when decentralized beats all-reduce        NumPy only
    mesh        workers as mesh axes, the collectives      JAX
    hlo         what a compiled program sends, read from its text
    buckets     a pytree as a few flat messages
    codecs      what a message looks like on the wire
    gossip      mixing parameters over a topology
    reduce      averaging gradients over all workers
    optim       optax transformations built on the two
    models      Flax models, ignorant of all this
    pipeline    models divided into stages, and what these send each other
    data        corpora and per-worker batches
    train       the one loop, checkpoints, evaluation, metrics

`launch` (command lines), `configs` (data) and `experiments` (one script per claim) stand outside and above.
"""

import importlib.metadata
import pathlib
import tomllib

from decjax import codecs, costmodel, gossip, mesh, reduce, schedules, topology
from decjax.mesh import make_workers
from decjax.optim import (
    accumulated_adam,
    accumulated_adamw,
    decentralize,
    decentralized_adam,
    decentralized_adamw,
    local_updates,
    synchronize,
    track,
)

_SOURCE = pathlib.Path(__file__).parent.parent / "pyproject.toml"  # Of a source tree, which need not be installed.
__version__ = (
    tomllib.loads(_SOURCE.read_text())["project"]["version"] if _SOURCE.is_file() else importlib.metadata.version("decjax")
)
