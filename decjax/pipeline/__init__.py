"""Pipeline parallelism: models divided into stages, schedules of microbatches, and compressed messages between stages.

source       where a gradient comes from: a whole model, or one divided into stages
stages       which layers and tables a stage holds; from a model's parameters to the stages' and back
tables       a gradient source with embedding tables that the workers divide among them
shares       which worker owns which of them
bounds       its messages, in which no value is off by more than a bound
executor     the gradient of a divided model by any schedule, tick by tick
accumulate   gradients added up over microbatches
table        a schedule as arrays, which the executor reads
boundary     messages between stages: uncompressed, or compressed with lazy error propagation
links        the state that both ends of compressed messages keep
probe        a boundary that records how compression errors relate to changes between messages
autoencoder  learned autoencoders that narrow the activations between stages
sums         sums of a tensor-parallel group that travel coded
embedding    the average of a tied embedding, of which two stages hold a copy each
"""

from decjax.pipeline.autoencoder import INITS
from decjax.pipeline.boundary import Boundary, Transfer, coded
from decjax.pipeline.embedding import tied_tables, with_tied_table
from decjax.pipeline.executor import Pipeline, make_gradient
from decjax.pipeline.probe import probed
from decjax.pipeline.source import Source, check_microbatches, of_division, stateless, whole
from decjax.pipeline.stages import Division, divide
from decjax.pipeline.tables import of_tables, with_own_tables

__all__ = [
    "Boundary",
    "Division",
    "INITS",
    "Pipeline",
    "Source",
    "Transfer",
    "check_microbatches",
    "coded",
    "divide",
    "make_gradient",
    "of_division",
    "of_tables",
    "probed",
    "stateless",
    "tied_tables",
    "whole",
    "with_own_tables",
    "with_tied_table",
]
