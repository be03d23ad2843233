"""Training: from the parts of a run to a trained model, with logs and checkpoints in a work directory.

trainer      steps, averages and evaluation, for loops of your own
run          the training loop: work directory, logging, signals, summary
members      the processes that train together: the same from start to end, or a group that changes
step         the train step of one worker
state        the training state of all workers
pace         the seconds of steps, for methods that decide by them
engine       the compiled step: as one program, or with the exchange beside the gradient
divide       splits an update into what needs no message and what each message completes
evaluate     evaluation of the averaged model and of every worker's own
checkpoint   checkpoints with Orbax, written while training goes on, and the search for the newest that is not damaged
contents     the records of a checkpoint besides the state: checksums, and the names and shapes of its arrays
workdir      the check that a directory belongs to the run, and the lock on it
summary      what a run comes to
metrics      where the numbers of a run go: metrics.jsonl, TensorBoard, Weights & Biases, or a tracker of one's own
"""

from decjax.errors import CheckpointError, ConfigError, Diverged, TrainingError
from decjax.train.members import Members
from decjax.train.metrics import Tracker
from decjax.train.run import Outcome, Run
from decjax.train.state import State
from decjax.train.trainer import Trainer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Diverged",
    "Members",
    "Outcome",
    "Run",
    "State",
    "Tracker",
    "Trainer",
    "TrainingError",
]
