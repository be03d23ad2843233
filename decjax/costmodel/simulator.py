"""The simulator of training steps: a max-plus recursion over workers, for every method, single stages and pipelines.

A method sends messages over a topology's rounds. All-reduce is the topology "complete" with gradients as messages, so one recursion
covers all methods. For worker i, message b and one step, with D(i) the workers whose messages i needs in that step's phase,

    compute        r_{i,b} = S_i + F_i + Σ_{k≤b} B_{i,k}                                 S_i: start of the step
    exchange       e_{i,b} = max_{j∈D(i)} max(ready_{j,b}, free_j) + c_{i,b}             free_j = e_{j,b−1}: one at a time

    not overlapped (all-reduce; adapt then communicate)
        gradients    ready = r,                         S' = e_last + opt
        parameters   ready = r + opt_{≤b},              S' = e_last + combine
    overlapped: what is sent in step t − 1 is needed in step t
        gradients    ready = r,                         S' = max(r_last, e⁻_last) + opt      (one step stale)
        parameters   u_b = max(u_{b−1} + B_b + opt_b, e⁻_b) + combine_b, ready = u,  S' = u_last   (adapt while communicating)

where e⁻ is the e of the exchange that started in the step before. Encoding and decoding extend the time until a message is ready. A
worker waits only for those in D(i), and a late neighbor costs nothing if its message arrives within the step.

The equations are derived here from how these systems work, not taken from a paper. Arrays are [K, N]: K independent systems
(replicas, bandwidths, …) of N workers, so no loop runs over workers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from decjax.costmodel.exchange import Exchange
from decjax.costmodel.methods import PARAMETERS, Method


class StepCosts(NamedTuple):
    """One step of a worker, whose messages to other workers are divided into B buckets.

    Attributes:
        forward: fraction of the compute time before the backward pass.
        backward: fraction of the compute time of each bucket's part of the backward pass.
        sizes: fraction of the parameters in each bucket.
        optimizer_s: seconds of the optimizer.
        combine_s: seconds to combine received parameters with the local ones; 0 if gradients are averaged.
        codec_s: seconds to encode and decode an exchange, one number or [K, 1]; the worker computes nothing else meanwhile.
        routes: who waits for whom in each phase.
        cost_s: c of each phase, [B, K or 1, N or 1] seconds.
    """

    forward: float
    backward: Sequence[float]
    sizes: Sequence[float]
    optimizer_s: float
    combine_s: float
    codec_s: float | np.ndarray
    routes: Sequence[Exchange]
    cost_s: Sequence[np.ndarray]


class Times(NamedTuple):
    """Times of events in K systems of N workers over T steps, in seconds from the start."""

    start_TxKxN: np.ndarray  # [T + 1, K, N], when each step starts; the last entry is the end of the last step
    computed_TxKxN: np.ndarray  # [T, K, N], when the gradient is done
    launched_TxKxN: np.ndarray  # when the first message of the exchange needed in a step is sent; nan in steps without one
    arrived_TxKxN: np.ndarray  # when all messages of that exchange have arrived; nan in steps without one

    def step_KxN(self, warm_up: int) -> np.ndarray:
        """Return the mean seconds of a step after so many steps of warm-up."""
        return (self.start_TxKxN[-1] - self.start_TxKxN[warm_up]) / (len(self.computed_TxKxN) - warm_up)


def horizon(method: Method, num_steps: int) -> tuple[int, int]:
    """Return (warm-up steps, all steps): a quarter of `num_steps` and as many more, in whole periods, so that all phases count alike."""
    warm_up = -(-num_steps // 4 // method.period) * method.period
    return warm_up, warm_up + -(-num_steps // method.period) * method.period


def simulate(method: Method, step: StepCosts, compute_TxKxN: np.ndarray) -> Times:
    """Return the times of all events over T steps with the given compute times, seconds."""
    T, K, N = compute_TxKxN.shape
    starts, computed = np.zeros((T + 1, K, N)), np.zeros((T, K, N))
    launched, arrived = np.full((T, K, N), np.nan), np.full((T, K, N), np.nan)
    parameters, free, pending = method.message == PARAMETERS, np.zeros((K, N)), None

    for t in range(T):
        phase = method.phase_of(t)
        sends = method.phase_of(t + 1) if method.overlap else phase  # The phase of the exchange that starts in this step.
        combine_s = step.combine_s if phase is not None else 0.0
        ready_b = _ready(step, method, starts[t], compute_TxKxN[t], pending, combine_s, 0.0 if sends is None else step.codec_s)
        u = ready_b[-1]
        computed[t] = starts[t] + compute_TxKxN[t]
        arrivals = None
        if sends is not None:
            arrivals = _arrivals(step.routes[sends], step.cost_s[sends], ready_b, free)
            free, needed = arrivals[-1], t + method.overlap
            if needed < T:
                launched[needed], arrived[needed] = arrivals[0] - step.cost_s[sends][0], free
        if not method.overlap and arrivals is not None:
            u = arrivals[-1] + (combine_s if parameters else step.optimizer_s)
        elif method.overlap:
            if not parameters:
                u = (u if pending is None else np.maximum(u, pending[-1])) + step.optimizer_s
            pending = arrivals
        elif not parameters:
            u = u + step.optimizer_s
        starts[t + 1] = u
    return Times(starts, computed, launched, arrived)


def _arrivals(route: Exchange, cost_b: np.ndarray, ready_b: list[np.ndarray], free_KxN: np.ndarray) -> list[np.ndarray]:
    """Return when each bucket of an exchange arrives, one after the other; all earlier exchanges have arrived at `free_KxN`."""
    arrivals = []
    for ready, cost in zip(ready_b, cost_b, strict=True):
        free_KxN = route.arrival(np.maximum(ready, free_KxN)) + cost
        arrivals.append(free_KxN)
    return arrivals


def _ready(
    step: StepCosts,
    method: Method,
    start_KxN: np.ndarray,
    compute_KxN: np.ndarray,
    pending: list[np.ndarray] | None,
    combine_s: float,
    codec_s: float | np.ndarray,
) -> list[np.ndarray]:
    """Return when each bucket of a step is ready to be sent; buckets on their way arrive at `pending`."""
    u, ready_b = start_KxN + step.forward * compute_KxN, []
    for b, backward in enumerate(step.backward):
        u = u + backward * compute_KxN
        if method.message == PARAMETERS:
            u = u + step.sizes[b] * step.optimizer_s
            if pending is not None:
                u = np.maximum(u, pending[b])
            if method.overlap:
                u = u + step.sizes[b] * combine_s
        ready_b.append(u := u + step.sizes[b] * codec_s)
    return ready_b
