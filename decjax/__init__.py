"""decjax: training deep networks when the network between workers is the bottleneck.

A training method is a composition of small, pure things, each usable alone. From the bottom up:

    topology    who talks to whom, when                    NumPy only
    schedules   which pipeline stage does what, when       NumPy only
    runtime     when decentralized beats all-reduce        NumPy only
    mesh        workers as mesh axes, the collectives      JAX
    buckets     a pytree as a few flat messages
    codecs      what a message looks like on the wire
    gossip      mixing parameters over a topology
    reduce      averaging gradients over all workers
    optim       optax transformations built on the two
    models      Flax models, ignorant of all this
    pipeline    models divided into stages, and what these send each other
    tasks       losses, metrics and per-worker batches
    train       the one loop, checkpoints, evaluation, metrics

`launch` (command lines), `configs` (data) and `experiments` (one script per claim) stand outside and above.
"""

from decjax import codecs, gossip, mesh, reduce, runtime, schedules, topology
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
