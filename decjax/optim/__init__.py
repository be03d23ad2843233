"""What a worker does with its gradient: optax transformations that know of workers, AccumAdam and 1-bit Adam."""

from decjax.optim.accumulated import accumulated_adam
from decjax.optim.accumulated import accumulated_adamw
from decjax.optim.accumulated import AccumulatedAdamState
from decjax.optim.accumulated import scale_by_accumulated_adam
from decjax.optim.clip import clip_by_norm
from decjax.optim.decentralize import decentralize
from decjax.optim.decentralize import decentralized_adam
from decjax.optim.decentralize import decentralized_adamw
from decjax.optim.decentralize import DecentralizeState
from decjax.optim.decentralize import ORDERS
from decjax.optim.decentralize import stale_exchange
from decjax.optim.decentralize import synchronize
from decjax.optim.decentralize import SynchronizeState
from decjax.optim.local_updates import local_updates
from decjax.optim.local_updates import LocalUpdatesState
from decjax.optim.onebit import OnebitAdamState
from decjax.optim.onebit import scale_by_onebit_adam
from decjax.optim.tracking import track
from decjax.optim.tracking import tracked_exchange
from decjax.optim.tracking import TrackState
