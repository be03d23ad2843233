"""User and environment errors: one line with the value, the constraint and the fix, printed without a traceback."""

from collections.abc import Iterator
import contextlib
import errno
import importlib
import os
from types import ModuleType

_FIXES = {  # by number of an error of the operating system
    errno.ENOENT: "check the path",
    errno.EISDIR: "a file must be there; move the folder away, or choose another path",
    errno.ENOTDIR: "a folder must be there; move the file away, or choose another path",
    errno.EEXIST: "move it away, or choose another path",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "make the file system writable, or choose another path",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.ENAMETOOLONG: "choose a shorter one",
}


def optional(package: str, purpose: str) -> ModuleType:
    """Import a package that is not always installed; a ValueError names it and its purpose."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ValueError(f"{purpose} needs the package {name}: pip install {name}") from error


class TrainingError(Exception):
    """Base class of user errors and of conditions that end a run.

    Attributes:
        exit_code: of a command that ends with the error.
    """

    exit_code = 2


class ConfigError(TrainingError):
    """An invalid config."""


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Raise a ConfigError for a value that does not fit, or that is too large to compute with."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(f"a number in the config is too large ({error}); use smaller sizes") from error


class CheckpointError(TrainingError):
    """A work directory or checkpoint that cannot be used."""


def not_written(what: str, folder: object, error: Exception) -> CheckpointError:
    """Return the error of a failed write: what, where, why, and the fix."""
    reason = " ".join((getattr(error, "strerror", None) or str(error)).split())[-100:]  # TensorStore's messages end with the cause.
    if "No such file" in reason or "Not a directory" in reason:
        fix = "bring the folder back"
    elif isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.EISDIR):
        fix = f"move {error.filename} away"
    elif "Read-only" in reason or "ermission" in reason:
        fix = "make the folder writable"
    else:
        fix = "make room there"
    return CheckpointError(
        f"{what} cannot be written in {folder} ({reason}); {fix}, and the same command continues from the last whole checkpoint"
    )


@contextlib.contextmanager
def translating_write_errors(what: str, folder: object) -> Iterator[None]:
    """Context manager that raises the `CheckpointError` of `not_written` if a file cannot be written, for example on a full disk."""
    try:
        yield
    except OSError as error:
        raise not_written(what, folder, error) from error


def refuse(problems: Iterator[str], error: type[TrainingError] = CheckpointError) -> None:
    """Raise an error for the first of the problems that a generator yields; nothing if there is none."""
    for problem in problems:
        raise error(problem)


def of_system(error: OSError) -> str:
    """Return an error of the operating system on one line: the file, the reason and the fix."""
    if error.filename is None or error.errno is None:
        return str(error)
    fix = "" if ";" in str(error.strerror) else f"; {_FIXES.get(error.errno, 'choose another path')}"  # Ours have a fix.
    return f"{os.fsdecode(error.filename)!r}: {error.strerror}{fix}"


class OutOfMemory(TrainingError):
    """Arrays that do not fit into the memory of a device or of this machine."""


@contextlib.contextmanager
def translating_out_of_memory() -> Iterator[None]:
    """Context manager that raises `OutOfMemory` for JAX's and Python's own errors about a lack of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # JAX's errors are of the former kind.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).split())[:120] or "no reason given"
        raise OutOfMemory(f"out of memory ({reason}); use a smaller model, batch_size, eval.batch_size or fewer workers") from error


class Diverged(TrainingError):
    """The loss or the parameters are no longer finite."""

    exit_code = 4  # differs from that of user errors, for searches of learning rates


class ViewChanged(Exception):
    """The group has changed: the current exchange will not complete, and the next view begins."""
