"""What is trained on: a model's loss, per-worker data, and how the result is judged. See `decjax.tasks.task`."""

from decjax.tasks.task import Data, Metric, Task
