"""decjax: training deep networks when the network between workers is the bottleneck.

A training method is composed of small, pure parts, each usable alone. From the bottom up:

    options     types and ranges of options; checks of arguments against annotations   standard library only
    typing      aliases for annotations                                                JAX
    registry    parts by name; a part's signature is its section of a config           standard library only
    errors      user and environment errors, and their texts                           standard library only
    files       bounded reads and atomic writes of files                               standard library only
    signals     signals that end a program, handled for a while                        standard library only
    topology    communication graphs: who sends to whom in each step                   NumPy only
    schedules   pipeline schedules: which stage computes what in each tick             NumPy only
    costmodel   predicted time per iteration of a method on a cluster                  NumPy only
    program     slices of traced programs; the messages of compiled ones               JAX from here on
    mesh        workers as axes of a device mesh, and the collectives along them
    noise       cheap random numbers, for rounding and dropout
    buckets     a pytree as a few flat arrays
    principal   the directions in which samples vary most
    codecs      message formats: casts, quantization, sparsification, low rank
    phases      checks that a step is compiled for its phase                           standard library only
    channel     how arrays travel: axis, bucket size, random seed
    gossip      mixing parameters over a topology
    reduce      averaging gradients over all workers, compressed or not
    optim       optax transformations built on `gossip` and `reduce`, and the methods that a config names
    models      Flax models; they contain nothing about workers
    tasks       what is trained: a model's loss, data for each worker, metrics
    pipeline    gradients of a model, whole or divided into stages
    config      from a ConfigDict to a checked specification of a run
    train       the train step, the trainer, and the training loop in a work directory
    measure     times of a step, an exchange and a codec on the devices at hand
    elastic     runs whose workers may leave and rejoin
    contrib     parts that few runs need, imported only when a config or command asks for them

`launch` (command lines), `configs` (data) and `experiments` (one script per claim) are built on top of the package.
"""

import importlib.metadata
import pathlib
import tomllib

from decjax import codecs, costmodel, gossip, mesh, reduce, registry, schedules, topology
from decjax.channel import Channel
from decjax.mesh import make_workers
from decjax.optim import (
    accumulated_adam,
    accumulated_adamw,
    apply_if_finite,
    decentralize,
    decentralized_adam,
    decentralized_adamw,
    local_updates,
    make_step,
    synchronize,
)

__all__ = [
    "Channel",
    "__version__",
    "accumulated_adam",
    "accumulated_adamw",
    "apply_if_finite",
    "codecs",
    "costmodel",
    "decentralize",
    "decentralized_adam",
    "decentralized_adamw",
    "gossip",
    "local_updates",
    "make_step",
    "make_workers",
    "mesh",
    "reduce",
    "registry",
    "schedules",
    "synchronize",
    "topology",
]


def _version(folder: pathlib.Path) -> str:
    """The version in `folder` if it is the source tree, where the package need not be installed; else that of the installed one."""
    source = folder / "pyproject.toml"
    project = tomllib.loads(source.read_text()).get("project", {}) if source.is_file() else {}
    return project["version"] if project.get("name") == "decjax" else importlib.metadata.version("decjax")


__version__ = _version(pathlib.Path(__file__).parent.parent)
