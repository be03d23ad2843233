"""How benchmarks time: contenders take turns, on a core of their own where one core is what is asked about."""

from collections.abc import Callable, Sequence
import os
import time
from typing import Any

import jax

from launch import command, memory


def on_core(core: int | None = None) -> None:
    """Limits this process and those it starts to one core, by default the last; call it before a JAX backend starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        ours = sorted(os.sched_getaffinity(0))
        if core is not None and core not in ours:
            raise command.UserError(f"--core={core}: this process may not use it; use one of {', '.join(map(str, ours))}")
        os.sched_setaffinity(0, {ours[-1] if core is None else core})
    memory.keep_freed()


def seconds(program: Callable, *arguments: Any) -> tuple[float, Any]:
    """(seconds that a program takes, its result)."""
    begun = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    return time.perf_counter() - begun, result


def rotated(names: Sequence[str], k: int) -> list[str]:
    """The names in the order of round k, rotated so that another one comes first in each round."""
    first = k % len(names)
    return [*names[first:], *names[:first]]


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of every contender in each round, after `warm_up` runs of each that do not count."""
    for step in contenders.values():
        for _ in range(warm_up):
            step()
    times_s = {name: [] for name in contenders}
    for k in range(rounds):
        for name in rotated(list(contenders), k):
            times_s[name].append(contenders[name]())
    return times_s
