"""Averages of gradients over all workers: reducers, and wrappers of them. `Reducer` says what a reducer is.

Each worker remembers what its own messages lose, so that errors stay bounded; a memory of the error of the *average* would grow as a
random walk.
"""

from decjax.reduce.coded import CodedMean as coded
from decjax.reduce.coded import CodedState
from decjax.reduce.coded import Demo as demo
from decjax.reduce.one_sided import OneSided as powersgd_one_sided
from decjax.reduce.one_sided import OneSidedState
from decjax.reduce.powersgd import PowerSGD as powersgd
from decjax.reduce.powersgd import PowerSGDState
from decjax.reduce.reducer import BEFORE, SILENT, Hook, Reducer, WrappedReducer, due_phase, every, first_stages, start_at
from decjax.reduce.reducer import Mean as mean

__all__ = [
    "BEFORE",
    "CodedState",
    "Hook",
    "SILENT",
    "OneSidedState",
    "PowerSGDState",
    "Reducer",
    "WrappedReducer",
    "coded",
    "demo",
    "due_phase",
    "every",
    "first_stages",
    "mean",
    "powersgd",
    "powersgd_one_sided",
    "start_at",
]
