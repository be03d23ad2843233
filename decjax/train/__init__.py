"""Training: from the parts of a run to a trained model, with logs and checkpoints in a work directory.

trainer      steps, averages and evaluation, for loops of your own
run          the training loop: work directory, logging, signals, summary
members      the processes that train together: the same from start to end, or a group that changes
step         the train step of one worker
state        the training state of all workers
engine       the compiled step: as one program, or with the exchange in a thread of its own
memory       the memory that a device needs, predicted from a config
divide       splits an update into what needs no message and what each message completes
evaluate     evaluation of the averaged model and of each worker's model
checkpoint   checkpoints with Orbax, written while training continues, and the search for the newest undamaged one
workdir      the check that a directory belongs to the run, its locks, and the run whose replicas it starts from
summary      results of a run
metrics      trackers of a run's metrics: metrics.jsonl, TensorBoard, Weights & Biases
"""

from decjax.errors import CheckpointError, ConfigError, Diverged, TrainingError
from decjax.train.members import Members
from decjax.train.memory import DeviceMemory, predict_memory
from decjax.train.metrics import Tracker
from decjax.train.run import Outcome, Run
from decjax.train.state import State
from decjax.train.trainer import Trainer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeviceMemory",
    "Diverged",
    "Members",
    "Outcome",
    "Run",
    "State",
    "Tracker",
    "Trainer",
    "TrainingError",
    "predict_memory",
]
