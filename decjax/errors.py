"""What can go wrong through no fault of the program; each message names the value, the constraint and the fix."""

from collections.abc import Iterator
import contextlib


class TrainingError(Exception):
    """A mistake of the user or a condition of the run, told in one line."""


class ConfigError(TrainingError):
    """A config that describes no possible run."""


class CheckpointError(TrainingError):
    """A work directory or checkpoint that cannot be used."""


class OutOfMemory(TrainingError):
    """Arrays that no device, or this machine, can hold."""


@contextlib.contextmanager
def memory_told() -> Iterator[None]:
    """Turns a lack of memory, of whatever kind, into `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # JAX's errors are of the former kind.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).split())[:120] or "no reason given"
        raise OutOfMemory(f"out of memory ({reason}); use a smaller model, batch_size, eval.batch_size or fewer workers") from error


class Diverged(TrainingError):
    """The loss or the parameters are no longer finite."""
