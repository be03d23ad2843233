"""A worker of an emulated cluster, which answers requests on its standard input, one JSON object a line.

Standard library only, since the peers run without JAX.
"""

from collections.abc import Callable
import json
import os
import sys
from typing import Any


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer `{"do": name, **arguments}` with `handlers[name](**arguments)` until standard input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries goes to standard error, not between the answers.
    for line in sys.stdin:
        request = json.loads(line)
        answer = handlers[request.pop("do")](**request)
        print(json.dumps(answer), file=answers, flush=True)
