"""Signals that stop a run; they are collected, so that it can save a checkpoint first."""

from collections.abc import Iterator
import contextlib
import signal
import threading


@contextlib.contextmanager
def collected() -> Iterator[list[signal.Signals]]:
    """A context that collects SIGTERM and Ctrl-C in the list that it yields; a second Ctrl-C interrupts at once."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # Python gives signals to the main thread alone.
        yield caught
        return

    def note(number, frame):
        if signal.SIGINT in caught and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        caught.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
