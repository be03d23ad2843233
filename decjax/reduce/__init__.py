"""Averaging gradients over all workers.

    mean          g_i <- (1/N) Σ_j g_j, a ring all-reduce of the gradient in a few flat buckets
    powersgd      the mean of rank-R approximations, with error feedback
    coded         the mean of messages of any codec, with error feedback; DeMo and SparseLoCo are special cases

Wrappers of any of them:

    start_at      another reducer for the first steps
    first_stages  another reducer for the last stages of a pipeline
    every         averages in every H-th step; in between nothing is sent

`Reducer` says what a reducer is, `decjax.reduce.messages` how encoded messages are averaged. All have a field `channel`, how
gradients travel. Each worker remembers what its own messages lose, so that errors stay bounded; a memory of the error of the *average*
would grow as a random walk.
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
