"""How every command starts and fails: absl flags, one-line errors, exit codes.

A mistake of the user ends with `error: …` on standard error and exit code 2, an interrupted run with 128 + signal.
`--debug` shows the traceback instead.
"""

from collections.abc import Callable
import sys

from absl import app
from absl import flags
from absl import logging

USER_ERROR = 2
_DEBUG = flags.DEFINE_bool("debug", False, "Show tracebacks of errors.")


def fail(message: object, code: int = USER_ERROR) -> None:
    """Ends the program with one line on standard error."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def run(main: Callable[[list[str]], int | None], errors: tuple[type[Exception], ...] = ()) -> None:
    """Runs `main(argv)` under absl.

    Args:
        main: gets the positional arguments behind the program's name; returns the exit code.
        errors: exceptions that speak to the user; told in one line.
    """
    def parse(argv):
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            fail(f"{error}; --help lists the flags")
        except (ValueError, AttributeError, KeyError, TypeError, OSError) as error:  # A config file's own complaints.
            if "--debug" in argv:
                raise
            fail(str(error).strip("'\"").splitlines()[0])

    def guarded(argv):
        logging.set_verbosity(logging.ERROR)  # JAX and Orbax report every backend and every file.
        try:
            return main(argv[1:])
        except errors as error:
            if _DEBUG.value:
                raise
            fail(" ".join(str(error).split()))

    app.run(guarded, flags_parser=parse)
