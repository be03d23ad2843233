"""How every command starts and fails: absl flags, one-line errors, exit codes.

A mistake of the user ends with `error: …` on standard error and exit code 2, an interrupted run with 128 + signal.
`--debug` shows the traceback instead.
"""

from collections.abc import Callable
import re
import signal
import sys
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

USER_ERROR = 2
LAUNCHER = "DECJAX_LAUNCHER"  # Set in the environment of commands that another command started.
_DEBUG = flags.DEFINE_bool("debug", False, "Show tracebacks of errors.")


def fail(message: object, code: int = USER_ERROR) -> NoReturn:
    """Ends the program with one line on standard error."""
    sys.unraisablehook = lambda unraisable: None  # Background tasks of libraries have nothing to add while we leave.
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _one_line(error: Exception) -> str:
    """What a config file or a flag complains of. Its text may hold a whole traceback, of which the last line matters."""
    text = str(error).replace("\\n", "\n").replace("\\'", "'")  # A KeyError's message is the repr of its text.
    last = ([line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__])[-1].removeprefix("ValueError: ")
    if missing := re.search(r"Flag (--\w+) must have a value other than None", last):
        return f"{missing[1]} is missing; --help lists the flags"
    if isinstance(error, (AttributeError, KeyError)):
        last = last.strip('"')
        return f"unknown config field: {last}; the config file lists the fields"
    return last.removesuffix("'") if last.count("'") % 2 else last


def run(main: Callable[[list[str]], int | None], errors: tuple[type[Exception], ...] = ()) -> None:
    """Runs `main(argv)` under absl.

    Args:
        main: gets the positional arguments behind the program's name; returns the exit code.
        errors: exceptions that speak to the user; told in one line.
    """
    def parse(argv):
        try:
            return flags.FLAGS(argv)
        except (flags.Error, ValueError, AttributeError, KeyError, TypeError, OSError) as error:
            if "--debug" in argv:
                raise
            fail(_one_line(error) + ("; --help lists the flags" if isinstance(error, flags.UnrecognizedFlagError) else ""))

    def guarded(argv):
        logging.set_verbosity(logging.ERROR)  # JAX and Orbax report every backend and every file.
        try:
            return main(argv[1:])
        except errors as error:
            if _DEBUG.value:
                raise
            fail(_one_line(error))
        except KeyboardInterrupt:
            fail("interrupted; the same command starts again from what was saved", 128 + signal.SIGINT)

    app.run(guarded, flags_parser=parse)
