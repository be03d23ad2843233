"""SlowMo around decentralized training: workers also mix their parameters inside of a block."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import numpy as np
import optax

from decjax import gossip, reduce, registry
from decjax.optim.decentralize import decentralize
from decjax.optim.method import OldMethod, check_phase_is_known
from decjax.optim.slowmo import SlowMo


@registry.register(
    "method",
    "slowmo_gossip",
    chooses=("mixer", "reducer", "optimizer"),
    messages="parameters; changes of H steps",
    memory="2 copies",
    source="arXiv 1910.00643",
)
def slowmo_gossip(
    inner: optax.GradientTransformation,
    mixer: gossip.Mixer,
    reducer: reduce.Reducer,
    num_workers: int,
    learning_rate: Callable[[Any], Any],
    *,
    order: Literal["awc", "atc"] = "awc",
    every: int = 12,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.6,
    reset: bool = False,
) -> OldMethod:
    """SlowMo around gossip: H steps of decentralized training, then one along a momentum of the workers' average changes.

    As `slowmo`, with parameters mixed in every step. A worker sends the mixer's messages in every step, and once in H steps the
    reducer's. The mixer's memory starts anew after each average. Any data; the mixer's graphs.

    Args:
        order: "awc" mixes the parameters before the step, so the exchange overlaps with the gradient; "atc" mixes after the step.
        every: H, steps from one average to the next.
        outer_learning_rate: α; 1: the momentum is applied as it is.
        outer_momentum: β.
        reset: start the optimizer's moments anew after each average; false: they are kept.

    Reference: Wang et al. 2020, arXiv 1910.00643, algorithm 1.
    """
    if mixer.weight:
        raise ValueError(
            f"method 'slowmo_gossip' averages with equal weights, and those of {mixer} differ; use mixer 'exact' or 'choco'"
        )
    check_phase_is_known("method 'slowmo_gossip'", mixer)
    if reducer.usage:
        raise ValueError(
            "method 'slowmo_gossip' needs a reducer whose messages are known beforehand; use 'codec' instead of 'gravac'"
        )
    average = reduce.every(reducer, every)
    base = decentralize(inner, mixer, order)
    form = SlowMo(base, mixer, average, learning_rate, every, outer_learning_rate, outer_momentum, reset, inner)
    both = _Both(form, mixer, average, num_workers)
    return OldMethod(form.transformation, both.phase, both.num_bytes, both.exchange if order == "awc" else None, mixer=mixer)


@dataclasses.dataclass(frozen=True)
class _Both:
    """Phases and messages of a mixer in every step and a reducer in some."""

    form: SlowMo
    mixer: gossip.Mixer
    average: reduce.Reducer
    num_workers: int

    def phase(self, step: int) -> int:
        due = self.average.phase(step)
        assert due is not None  # It is known beforehand.
        return (self.mixer.phase(step) - self.mixer.phases.start) * len(self.average.phases) + self.average.phases.index(due)

    def num_bytes(self, params: Any, phase: int | None) -> np.ndarray:
        mixing, due = self.form.phases(phase)
        return self.mixer.num_bytes(params, mixing) + self.average.num_bytes(params, self.num_workers, due)

    def exchange(self, params: Any, opt_state: Any, phase: int) -> Any:
        return self.mixer.exchange(params, opt_state.mixer, self.form.phases(phase)[0])
