"""Tasks: a model's loss, every worker's data, and the metrics of the result.

task        what a task is
lm          predicts the next byte of any text
images      classifies small images
translation translates between two languages
nodes       classifies the nodes of a graph, of which each worker sees a part
quadratics  minimizes a sum of quadratics, whose optimum is known
clicks      predicts clicks of generated examples, with a known least loss; `impressions` generates them
partition   which examples each worker trains on
text        byte corpora and windows of them
parallel    pairs of sentences in batches of a few lengths; `bpe` encodes them
datasets    data sets of images
graphs      graphs with labelled nodes; `graph_partition` divides them between workers
"""

from decjax.tasks.task import Data, Lookups, Metric, Task

__all__ = ["Data", "Lookups", "Metric", "Task"]
