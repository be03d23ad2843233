"""Training: a run's parts take steps, in a work directory.

step         the train step, as one worker sees it
trainer      steps, averages and evaluation of a run's parts
run          the one loop: a work directory, logging, signals, the end
state        the stacked state
engine       one compiled step per phase: fused, or with the exchange beside the gradient
divide       what of an update needs no message, and is computed meanwhile
evaluate     the averaged model and the local models
checkpoint   Orbax, and whose directory it is
metrics      where numbers go: metrics.jsonl, TensorBoard, Weights & Biases, or a tracker of one's own
"""

from decjax.errors import CheckpointError, ConfigError, Diverged, TrainingError
from decjax.train.metrics import Tracker
from decjax.train.run import Outcome, Run
from decjax.train.state import State
from decjax.train.trainer import Trainer

__all__ = ["CheckpointError", "ConfigError", "Diverged", "Outcome", "Run", "State", "Tracker", "Trainer", "TrainingError"]
