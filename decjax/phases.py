"""Checks that a step has a phase of its mixer or reducer, and was compiled for the schedule of that mixer or reducer."""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
from typing import Any, Protocol

_COMPARED_STEPS = 1000


class Phased(Protocol):
    """A mixer or reducer, as a schedule of phases."""

    @property
    def phases(self) -> Sequence[int]:
        """All values of the phase."""
        ...

    def phase(self, step: int, /) -> Any:
        """Return the phase of a step."""
        ...


_compiling: contextvars.ContextVar[Phased | None] = contextvars.ContextVar("schedule of the step that is compiled", default=None)


@contextlib.contextmanager
def compiling(schedule: Phased | None) -> Iterator[None]:
    """Context manager in which steps are compiled for a schedule."""
    token = _compiling.set(schedule)
    try:
        yield
    finally:
        _compiling.reset(token)


def check(schedule: Phased, phase: int | None) -> None:
    """Raise a ValueError if a schedule does not have a phase, or if `compiling` has another schedule."""
    if phase is None:
        return
    phases = schedule.phases
    if phase not in phases:
        raise ValueError(
            f"phase={phase} must be from {phases[0]} to {phases[-1]}; call update(…, phase=schedule.phase(step)), with the mixer or "
            "reducer as schedule"
        )
    other = _compiling.get()
    if other is None or other.phase == schedule.phase:
        return
    for step in range(_COMPARED_STEPS):
        if other.phase(step) != schedule.phase(step):
            raise ValueError(
                f"make_step has a schedule whose phase is {other.phase(step)} in step {step}, but the transformation's is "
                f"{schedule.phase(step)}; give make_step the mixer or reducer of the transformation"
            )
