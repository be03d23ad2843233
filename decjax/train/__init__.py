"""The one train loop: build the parts from a config, run them in a work directory.

assemble     config -> parts; with methods, where a ConfigDict ends
methods      config -> what happens to gradients and parameters
state        the stacked state
selective    how many stages of a pipeline should compress
source       where gradients come from: a whole model, or one divided into stages
engine       one compiled step per phase: fused, or with the exchange beside the gradient
divide       what of an update needs no message, and is computed meanwhile
loop         steps, logging, signals, the end of a run
evaluate     the averaged model and the local models
checkpoint   Orbax, and whose directory it is
metrics      metrics.jsonl, TensorBoard, the screen
errors       what ends a run, in one line
measure      what a step, an exchange and a codec take: profiles for `decjax.costmodel`
silence      programs without their messages, for `measure`
"""

from decjax.train.assemble import SIMULATED_WORKERS, Setup, Size, build, devices_of_worker, message_ratio, size
from decjax.train.errors import CheckpointError, ConfigError, Diverged, TrainingError
from decjax.train.loop import Outcome, Run
