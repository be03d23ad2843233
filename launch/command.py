"""Start and end of all commands: absl flags, one-line errors, exit codes.

A `UserError` ends a command with `error: …` on standard error and exit code 2, a diverged run with 4, an interruption with
128 + signal. `--debug` shows the traceback instead.
"""

from collections.abc import Callable, Iterator
import contextlib
import copy
import errno
import io
import math
import os
import pathlib
import re
import signal
import sys
import tempfile
import traceback
from typing import NoReturn

from absl import app, flags, logging
import rich.box
import rich.console
import rich.table

from decjax.errors import of_system
from launch import config_file

USER_ERROR, DIVERGED = 2, 4  # exit codes; the latter is that of `decjax.errors.Diverged`
LAUNCHER = "DECJAX_LAUNCHER"  # an environment variable of commands that another command started
# Control characters except tabs and line breaks, line separators, marks of text direction, and surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_DEBUG = flags.DEFINE_bool("debug", False, "Show tracebacks of errors.")


class UserError(ValueError):
    """User error, which `run` reports on one line."""


def refuse(problem: str, fix: str = "") -> NoReturn:
    """Raise a UserError. `problem` names the value and what is allowed, `fix` what to do."""
    raise UserError(f"{problem}; {fix}" if fix else problem)


def check(*rules: tuple[object, str, str]) -> None:
    """Refuse the first rule that does not hold.

    Args:
        *rules: of what goes with what: whether it holds, what is wrong and what is allowed, and what to do.
    """
    for holds, problem, fix in rules:
        if not holds:
            refuse(problem, fix)


@contextlib.contextmanager
def refusing(what: str, fix: str = "", errors: tuple[type[BaseException], ...] = (ValueError,)) -> Iterator[None]:
    """Context manager that turns errors about `what` into user errors."""
    try:
        yield
    except errors as error:
        refuse(f"{what}: {error}", fix)


class Interrupted(SystemExit):
    """A signal that ends the command after `finally` clauses have run, like KeyboardInterrupt. The argument is the exit code."""


def console(max_width: int | None = None) -> rich.console.Console:
    """Return a console for tables, as wide as the terminal or COLUMNS, 140 columns in a file or pipe, and at most `max_width`."""
    console = rich.console.Console(highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = 140
    console.width = min(console.width, max_width or console.width)
    return console


def table(*headers: str, words: int = 1, title: str | None = None, caption: str | None = None) -> rich.table.Table:
    """Return an empty table in the style of all commands; the first `words` columns are for text, the others for numbers."""
    table = rich.table.Table(title=title, caption=caption, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    for column, header in enumerate(headers):
        table.add_column(header, justify="left" if column < words else "right", vertical="bottom", no_wrap=True)
    return table


def printable(text: str) -> str:
    """Escape control characters in text from data or from a model, which a terminal would execute; keep line breaks and tabs."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def fail(message: object, code: int = USER_ERROR) -> NoReturn:
    """End the program with one line on standard error."""
    _leaving()
    sys.unraisablehook = lambda unraisable: None  # No messages from background tasks of libraries.
    print(f"error: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr, flush=True)
    sys.exit(code)


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with a user error."""
    return getattr(error, "exit_code", USER_ERROR)


@contextlib.contextmanager
def defining_config() -> Iterator[None]:
    """Context manager for defining a flag of a config file; ml_collections reads --flagfile then, before `run` does."""
    try:
        yield
    except flags.CantOpenFlagFileError as error:
        fail(one_line(error))


def options_only(argv: list[str]) -> None:
    """Refuse positional arguments."""
    if argv:
        refuse(f"unexpected argument {argv[0]!r}", "options start with --")


class Output(flags.ArgumentParser):
    """The parser of a flag whose value is a path to write. `run` refuses a path that cannot be written before the command starts.

    Args:
        kind: "folder", "file", or "figure", a file of a type that matplotlib can draw.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def flag_type(self) -> str:
        return "path"

    def check(self, flag: str, text: str) -> None:
        """Raise a UserError unless the path can be written."""
        if self.kind == "folder":
            folder(flag, text)
        else:
            output(flag, text, figure=self.kind == "figure")


FOLDER, FILE, FIGURE = map(Output, ("folder", "file", "figure"))


def folder(option: str, text: str) -> pathlib.Path:
    """Check that a directory can be written or created, without creating it; return its path."""
    path = pathlib.Path(text)
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.exists(parent))
    reason = _why_invalid(path) or (_why_not_writable(existing) if existing.is_dir() else f"{existing} is not a directory")
    return _checked(option, text, reason, f"choose a --{option}, such as runs/lm")


def output(option: str, text: str, figure: bool = False) -> pathlib.Path:
    """Check that a file, or a figure of a type that matplotlib supports, can be written; return its path."""
    path = pathlib.Path(text)
    if figure and text:
        from matplotlib import backend_bases  # Importing it takes a second.

        if (suffix := path.suffix[1:].lower()) not in (suffixes := backend_bases.FigureCanvasBase.filetypes):
            problem = f"a figure cannot be of type {suffix!r}" if suffix else "a figure needs a file type, as in plan.png"
            refuse(f"--{option}={text!r}: {problem}", f"use one of {', '.join(sorted(suffixes))}")
    reason = _why_invalid(path) or ("it is a folder" if path.is_dir() else _why_not_writable(path.parent))
    return _checked(option, text, reason, "give the path of a file, or leave it out")


def _checked(option: str, text: str, reason: str, if_empty: str) -> pathlib.Path:
    """Return the path of an option; refuse one that is empty, or that cannot be written for a reason."""
    if not text.strip():
        refuse(f"--{option} is empty", if_empty)
    if reason:
        refuse(f"--{option}={text!r} cannot be written ({reason})", f"choose another --{option}")
    return pathlib.Path(text)


def _why_not_writable(folder: pathlib.Path) -> str:
    """Return the reason why no file can be created in a folder; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        in_proc = isinstance(error, FileNotFoundError) and folder.is_dir()
        return f"{folder} takes no files" if in_proc else error.strerror or str(error)


def _why_invalid(path: pathlib.Path) -> str:
    """Return the reason why a path is invalid; empty if it is valid."""
    try:
        path.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _check_flags() -> None:
    """Refuse outputs that cannot be written, and nan and infinity, which absl's bounds accept."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if isinstance(flag.parser, Output) and flag.value is not None:
            flag.parser.check(name, flag.value)
        if name.startswith("config."):  # Checked with the config.
            continue
        for value in flag.value if isinstance(flag.value, list) else [flag.value]:
            if isinstance(value, float) and not math.isfinite(value):
                refuse(f"--{name}={value} must be a finite number", "give one, or leave it out")


def no_devices(error: BaseException) -> str:
    """Return the message for JAX's error that it cannot start its devices; empty for other errors."""
    if not isinstance(error, RuntimeError | AssertionError):
        return ""
    in_jax = any(frame.f_code.co_filename.endswith("xla_bridge.py") for frame, _ in traceback.walk_tb(error.__traceback__))
    if not in_jax and "Unable to initialize backend" not in str(error):
        return ""
    if os.environ.get("JAX_PLATFORMS") == "cpu" and "JAX_NUM_CPU_DEVICES" not in os.environ:
        return ""  # The CPU is always available, so this has another cause.
    reason = " ".join(str(error).split())[:160] or "no JAX for them is installed"
    settings = "".join(f"{name}={os.environ[name]}: " for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES") if name in os.environ)
    return f"{settings}JAX cannot start its devices ({reason}); set JAX_PLATFORMS=cpu, or install JAX for them"


def one_line(error: Exception) -> str:
    """Return the message of an error from a config file or flag on one line; of a traceback in its text, the last line."""
    if isinstance(error, OSError):
        return " ".join(of_system(error).split())
    text = str(error)
    if isinstance(error, flags.CantOpenFlagFileError):
        return f"{text.removeprefix('ERROR:: ')}; check --flagfile"
    if isinstance(error, KeyError) or "Traceback" in text:
        text = text.replace("\\n", "\n").replace("\\'", "'")  # A KeyError's message is the repr of its text.
    elif not isinstance(error, AttributeError | flags.Error):
        text = " ".join(text.split())  # Values may contain line breaks.
    last = ([line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__])[-1].removeprefix("ValueError: ")
    if missing := re.search(r"Flag (--\w+) must have a value other than None", last):
        return f"{missing[1]} is missing; --help lists the flags"
    if switch := re.search(r"[Ff]lag --([\w.]+)=(.*?): .*[Nn]on-boolean argument", " ".join(text.split())):
        return f"--{switch[1]}={switch[2]} must be true or false; write --{switch[1]} or --no{switch[1]}"
    if number := re.search(r"[Ff]lag (--[\w.]+=.*): (invalid literal for int|could not convert string to float)", last):
        return f"{number[1]} must be a {'whole number' if 'int' in number[2] else 'number'}"
    if isinstance(error, (AttributeError, KeyError)):
        last = last.strip('"')
        return f"unknown config field: {last}; the config file lists the fields"
    # In the repr of a traceback the last quote belongs to the repr.
    return last.removesuffix("'") if "Traceback" in text and last.count("'") % 2 else last


class _Stream(io.FileIO):
    """A standard stream that discards output once its reader is gone, as with `| head` or a closed terminal."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return memoryview(data).nbytes


def _outlive_readers() -> None:
    """Keep the command running after the reader of its output is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # Tests may capture the output.
            buffer = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            wrapper = io.TextIOWrapper(buffer, stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)
            setattr(sys, name, wrapper)


def add_common(values: flags.FlagValues) -> None:
    """Define the flags that all commands have."""
    of_logging = [name for name in flags.FLAGS if flags.FLAGS.find_module_defining_flag(name) == "absl.logging"]
    for name in {flags.FLAGS[name].name for name in (*of_logging, "debug")}:  # Short names are copied with the long ones.
        values[name] = copy.deepcopy(flags.FLAGS[name])


def parsed(argv: list[str], values: flags.FlagValues) -> list[str]:
    """Parse a command line into flags; return the program's name and the positional arguments. Raise a UserError for mistakes."""
    try:
        if problem := config_file.complaint(argv):
            refuse(problem)
        return values(argv)
    except UserError:
        raise
    except Exception as error:  # A config file may raise anything.
        launches = ", and options of the run go after --" if "module" in values else ""
        hint = f"; --help lists the flags{launches}" if isinstance(error, flags.UnrecognizedFlagError) else ""
        refuse(one_line(error) + hint)


def run(main: Callable[[list[str]], int | None], errors: tuple[type[Exception], ...] = ()) -> None:
    """Run `main(positional arguments) -> exit code` under absl. UserError, OSError and `errors` are reported on one line."""

    _outlive_readers()

    def parse(argv):
        try:
            return parsed(argv, flags.FLAGS)
        except SystemExit:  # After --help, for which absl returns 1.
            sys.exit(0)
        except UserError as error:
            if "--debug" in argv:
                raise
            fail(error)

    def guarded(argv):
        # JAX and Orbax log each backend, file and traceback.
        logging.set_verbosity(logging.ERROR if _DEBUG.value else logging.FATAL)
        try:
            _check_flags()
            code = main(argv[1:])
            _leaving()
            return code
        except (UserError, OSError, *errors) as error:
            if _DEBUG.value:
                raise
            fail(no_devices(error) or one_line(error), code_of(error))
        except (RuntimeError, AssertionError) as error:
            if _DEBUG.value or not (message := no_devices(error)):
                raise
            fail(message)
        except (KeyboardInterrupt, Interrupted) as stopped:
            code = int(stopped.args[0]) if isinstance(stopped, Interrupted) else 128 + signal.SIGINT
            name = signal.Signals(code - 128).name
            fail(f"interrupted by {name}; the same command continues from what was saved", code)

    _set_up_terminal()
    if "--help" in sys.argv[1:]:
        _shorten_help()
    app.run(guarded, flags_parser=parse)


def _shorten_help() -> None:
    """Print the default of a flag on its line in --help, and no type."""
    for flag in {id(flag): flag for name in flags.FLAGS for flag in [flags.FLAGS[name]]}.values():
        flag.help = (flag.help or "").partition(";\n    repeat this option")[0]  # Texts of such flags say so.
        if flag.default_as_str not in (None, "''", "'false'", "'None'", "'[]'"):
            default = ",".join(map(str, flag.default)) if isinstance(flag.default, list) else flag.default_as_str.strip("'")
            flag.help = f"{flag.help.removesuffix('.')}; default: {default}."
        flag.default_as_str, flag.parser = None, copy.copy(flag.parser)
        flag.parser.syntactic_help = ""


def _set_up_terminal() -> None:
    """Prevent unusual terminal settings from ending a command."""
    for name in ("COLUMNS", "LINES"):  # rich and absl parse them as numbers.
        if not re.fullmatch("[1-9][0-9]*", os.environ.get(name, "1")):
            del os.environ[name]
    for stream in (sys.stdout, sys.stderr):  # Their encoding may lack some characters.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leaving() -> None:
    """Flush the output; from here on, an interrupt ends the process at once."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # Its disk is full, or it is closed.
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
