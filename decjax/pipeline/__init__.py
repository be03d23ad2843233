"""Pipeline parallelism: models divided into stages, schedules of microbatches, and compressed messages between stages.

source       where a gradient comes from: a whole model, or one divided into stages
stages       which layers and tables a stage holds; from a model's parameters to the stages' and back
executor     the gradient of a divided model by any schedule, tick by tick
accumulate   gradients added up over microbatches
ticks        a schedule as arrays, which the executor reads
boundary     messages between stages: uncompressed, or compressed with lazy error propagation
links        the state that both ends of compressed messages keep
probe        a boundary that records how compression errors relate to changes between messages
autoencoder  learned autoencoders that narrow the activations between stages
embedding    the average of a tied embedding, of which two stages hold a copy each
"""

from decjax.pipeline.autoencoder import INITS
from decjax.pipeline.boundary import Boundary, Transfer, coded
from decjax.pipeline.embedding import tied_tables, with_tied_table
from decjax.pipeline.executor import Pipeline, make_gradient
from decjax.pipeline.probe import probed
from decjax.pipeline.source import Source, Staged, Whole, check_microbatches, stateless
from decjax.pipeline.stages import Division, divide

__all__ = [
    "Boundary",
    "Division",
    "INITS",
    "Pipeline",
    "Source",
    "Staged",
    "Transfer",
    "Whole",
    "check_microbatches",
    "coded",
    "divide",
    "make_gradient",
    "probed",
    "stateless",
    "tied_tables",
    "with_tied_table",
]
