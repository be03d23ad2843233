"""Checks of the phase of a step: that the schedule of a mixer or reducer has it, and is the one by which the step was compiled."""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import Any

_COMPARED = 1000  # steps of two schedules
_compiling: contextvars.ContextVar = contextvars.ContextVar("schedule of the step that is compiled", default=None)


@contextlib.contextmanager
def compiling(schedule: Any) -> Iterator[None]:
    """A context in which steps are compiled for the phases of a schedule, an object with `phase` and `phases`."""
    token = _compiling.set(schedule)
    try:
        yield
    finally:
        _compiling.reset(token)


def check(schedule: Any, phase: int | None) -> None:
    """Raise a ValueError for a phase that a schedule does not have, or that `compiling` took from one with other phases."""
    if phase is None:
        return
    known = schedule.phases
    if phase not in known:
        raise ValueError(
            f"phase={phase} must be from {known[0]} to {known[-1]}; call update(…, phase=schedule.phase(step)), with the mixer or "
            "reducer as schedule"
        )
    other = _compiling.get()
    if other is None or other.phase is schedule.phase:
        return
    for step in range(_COMPARED):
        if other.phase(step) != schedule.phase(step):
            raise ValueError(
                f"make_step has a schedule whose phase is {other.phase(step)} in step {step}, where that of the transformation is "
                f"{schedule.phase(step)}; give make_step the mixer or reducer of the transformation"
            )
