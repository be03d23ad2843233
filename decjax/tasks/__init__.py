"""Tasks: a model's loss, every worker's data, and the metrics of the result.

task        what a task is
lm          predicts the next byte, or token, of any text
images      classifies small images
translation translates between two languages
quadratics  minimizes a sum of quadratics, whose optimum is known
partition   which examples each worker trains on
sources     where text comes from: files, folders, JSON lines, Parquet, or a source of one's own
text        corpora of bytes or tokens, and windows of them
bpe         byte-pair encoding, of text and of sentences
parallel    pairs of sentences in batches of a few lengths
datasets    data sets of images
"""

from decjax.tasks.task import Data, Task

__all__ = ["Data", "Task"]
