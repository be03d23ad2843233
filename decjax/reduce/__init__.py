"""Averaging gradients over all workers.

    mean          g_i <- (1/N) Σ_j g_j, a ring all-reduce of the gradient in a few flat buckets
    powersgd      the mean of rank-R approximations, with error feedback
    coded         the mean of messages of any codec, with error feedback; DeMo and SparseLoCo are special cases
    gravac        the same with a ladder of codecs, of which the strongest that pays is used

Wrappers of any of them:

    start_at      another reducer for the first steps
    first_stages  another reducer for the last stages of a pipeline
    every         averages in every H-th step; in between nothing is sent

`Reducer` says what a reducer is, `decjax.reduce.messages` how encoded messages are averaged. Factories take the channel on which
gradients travel. Each worker remembers what its own messages lose, so that errors stay bounded; a memory of the error of the *average*
would grow as a random walk.
"""

from decjax.reduce.coded import CodedState, coded, demo
from decjax.reduce.gravac import GravacState, gravac
from decjax.reduce.one_sided import OneSidedState, powersgd_one_sided
from decjax.reduce.powersgd import PowerSGDState, powersgd
from decjax.reduce.reducer import BEFORE, SILENT, Reducer, Timing, due_phase, every, first_stages, mean, start_at

__all__ = [
    "BEFORE",
    "CodedState",
    "GravacState",
    "SILENT",
    "OneSidedState",
    "PowerSGDState",
    "Reducer",
    "Timing",
    "coded",
    "demo",
    "due_phase",
    "every",
    "first_stages",
    "gravac",
    "mean",
    "powersgd",
    "powersgd_one_sided",
    "start_at",
]
