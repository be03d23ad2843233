"""Command lines, one a module: `python -m launch.train`."""

import re
import sys
import traceback


def _excepthook(kind, error, trace):
    """Report on one line what can fail while the modules of a command are imported: interrupts, and variables that JAX refuses."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted before anything began", file=sys.stderr)
    elif issubclass(kind, ValueError) and traceback.extract_tb(trace)[-1].filename.endswith("jax/_src/config.py"):
        variable = re.search(r"jax_\w+", str(error), re.IGNORECASE)
        fix = f"correct the variable {variable[0].upper()}, or unset it" if variable else "correct the variables JAX_…"
        print(f"error: {error}; {fix}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _excepthook
