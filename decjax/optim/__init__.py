"""What a worker does with its gradient: optax transformations that know of workers, and AccumAdam."""

from decjax.optim.accumulated import accumulated_adam
from decjax.optim.accumulated import accumulated_adamw
from decjax.optim.accumulated import AccumulatedAdamState
from decjax.optim.accumulated import scale_by_accumulated_adam
from decjax.optim.decentralize import decentralize
from decjax.optim.decentralize import decentralized_adam
from decjax.optim.decentralize import decentralized_adamw
from decjax.optim.decentralize import DecentralizeState
from decjax.optim.decentralize import ORDERS
from decjax.optim.decentralize import stale_exchange
from decjax.optim.decentralize import synchronize
from decjax.optim.decentralize import SynchronizeState
from decjax.optim.tracking import track
from decjax.optim.tracking import tracked_exchange
from decjax.optim.tracking import TrackState
