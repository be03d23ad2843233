"""Models divided into pipeline stages, and the executor of their schedules.

    stages      which layers, and which ends, a stage holds; from a model's parameters to stages' and back
    executor    the gradient of a divided model, tick by tick of any schedule
    boundary    what travels between stages
"""

from decjax.pipeline.boundary import Boundary
from decjax.pipeline.boundary import identity
from decjax.pipeline.executor import make_gradient
from decjax.pipeline.executor import Pipeline
from decjax.pipeline.stages import divide
from decjax.pipeline.stages import Division
