"""Tasks: a model's loss, every worker's data, and the metrics of the result.

task       the interface of a task
lm         language modeling on bytes or tokens of any text
partition  which examples each worker trains on
sources    where text comes from, and how errors of data are worded
text       corpora of bytes or tokens, and windows of them
shards     text as files of tokens, mapped into memory
bpe        byte-pair encoding
"""

from decjax.tasks.task import Data, Task

__all__ = ["Data", "Task"]
