"""What travels between stages, and what both ends remember of it.

    sender      (message, state) = send(x, state, kind, compress)
    receiver    (x, state) = receive(message, state, kind, compress)

`kind` is "F" for activations and "B" for their gradients; `compress` is decided by `compresses`, from the message's place in
the schedule, once for both ends. Both are static. Sender and receiver are stages of the same pipeline, which run the same program:
`send` is computed by stages that send, `receive` by those that receive, and neither may talk to anybody. The state is carried
from step to step as ordinary state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from decjax import schedules


class Boundary(NamedTuple):
    """How values pass from stage to stage.

    Attributes:
        init: `init(like) -> state` of one stage; `like` has shape and dtype of what travels.
        compresses: `compresses(send) -> bool`, whether a message of the schedule is compressed.
        send: see the module; None: everything travels as it is.
        receive: see the module.
    """

    init: Callable[[jax.ShapeDtypeStruct], Any]
    compresses: Callable[[schedules.Send], bool]
    send: Callable[..., tuple[Any, Any]] | None = None
    receive: Callable[..., tuple[jax.Array, Any]] | None = None


def identity() -> Boundary:
    """Everything travels as it is."""
    return Boundary(lambda like: (), lambda send: False)
