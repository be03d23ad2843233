"""Averages of gradients over all workers: reducers, and wrappers of them. `Reducer` says what a reducer is.

Each worker remembers what its own messages lose, so that errors stay bounded; a memory of the error of the *average* would grow as a
random walk.
"""

from decjax.reduce.coded import CodedMean as coded
from decjax.reduce.coded import CodedState
from decjax.reduce.low_rank import OneSided as powersgd_one_sided
from decjax.reduce.low_rank import OneSidedState, PowerSGDState
from decjax.reduce.low_rank import PowerSGD as powersgd
from decjax.reduce.reducer import BEFORE, SILENT, Hook, Reducer, WrappedReducer, due_phase, every, first_stages, start_at
from decjax.reduce.reducer import Mean as mean

__all__ = ["Reducer", "WrappedReducer", "Hook", "BEFORE", "SILENT", "due_phase"]
__all__ += ["mean", "coded", "powersgd", "powersgd_one_sided"]
__all__ += ["every", "first_stages", "start_at", "CodedState", "OneSidedState", "PowerSGDState"]
