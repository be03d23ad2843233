"""Tasks: a model's loss, every worker's data, and the metrics of the result.

task        what a task is
lm          predicts the next byte, or token, of any text
images      classifies small images
translation translates between two languages
nodes       classifies the nodes of a graph, of which each worker sees a part
quadratics  minimizes a sum of quadratics, whose optimum is known
clicks      predicts clicks of generated examples, with a known least loss; `impressions` generates them
partition   which examples each worker trains on
sources     where text comes from: files, folders, JSON lines, Parquet, or a source of one's own
text        corpora of bytes or tokens, and windows of them
bpe         byte-pair encoding, of text and of sentences
parallel    pairs of sentences in batches of a few lengths
datasets    data sets of images
graphs      graphs with labelled nodes; `graph_partition` divides them between workers
"""

from decjax.tasks.task import Data, Lookups, Metric, Task

__all__ = ["Data", "Lookups", "Metric", "Task"]
