"""Handling of signals that end a program, so that a run can save a checkpoint first."""

from collections.abc import Callable, Iterator
import contextlib
import signal
import threading
from typing import Any


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Context manager in which `handler` handles signals. SIGHUP stays ignored under `nohup`."""
    handled = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def collected() -> Iterator[list[signal.Signals]]:
    """Context manager that collects SIGTERM, SIGHUP and Ctrl-C in a list; a second Ctrl-C interrupts at once."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # Only the main thread receives signals.
        yield caught
        return

    def note(number, frame):
        if signal.SIGINT in caught and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        caught.append(signal.Signals(number))

    with handling(note, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        yield caught
