"""Pipeline parallelism: models divided into stages, schedules of microbatches, and compressed messages between stages.

source       gradient sources: a whole model, or one divided into stages
stages       the layers and tables of each stage, and the average of a tied table
executor     the gradient of a divided model by any schedule, tick by tick
ticks        a schedule as arrays, which the executor reads
boundary     messages between stages, uncompressed or compressed, and their memories
autoencoder  learned autoencoders that narrow the activations between stages
"""

from decjax.pipeline.boundary import Boundary, Transfer
from decjax.pipeline.boundary import CodedBoundary as coded
from decjax.pipeline.executor import Pipeline, check_microbatches
from decjax.pipeline.source import Source, Staged, Whole, stateless
from decjax.pipeline.stages import Division, divide, tied_tables, with_tied_table

__all__ = [
    "Boundary",
    "Division",
    "Pipeline",
    "Source",
    "Staged",
    "Transfer",
    "Whole",
    "check_microbatches",
    "coded",
    "divide",
    "stateless",
    "tied_tables",
    "with_tied_table",
]
