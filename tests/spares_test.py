"""Spare processes of an elastic run's launcher: one that exits is replaced, at once and then after growing delays."""

import contextlib
import sys

import pytest

from launch import elastic

STAYS = [sys.executable, "-c", "import sys; print(sys.stdin.readline())"]  # until it is called, or its launcher is gone
ENDS = [sys.executable, "-c", "pass"]


@pytest.fixture
def starter(monkeypatch):
    """Return the spares of two hosts with two slots each, with a manual clock."""
    now_s = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now_s[0])
    with contextlib.ExitStack() as stack:
        yield now_s, lambda spare_line: elastic._Starter(stack, [ENDS] * 4, [spare_line] * 4, [{}] * 4, 2)


def spares(held):
    """Return process ids by host."""
    held.hold_spares()
    return {host: spare.process.pid for host, spare in held._spares.items()}


def end(held, kill=False):
    for spare in held._spares.values():
        if kill:
            spare.process.kill()
        spare.process.wait(60)


def test_a_spare_that_ends_is_replaced_at_once(starter):
    held = starter[1](STAYS)
    before = spares(held)
    assert spares(held) == before and [*before] == [0, 1]
    end(held, kill=True)
    assert spares(held) == {}
    after = spares(held)
    assert [*after] == [0, 1] and not {*after.values()} & {*before.values()}


def test_spares_that_end_again_and_again_are_started_ever_more_slowly(starter):
    now_s, make = starter
    held, pauses_s = make(ENDS), []
    for _ in range(8):
        assert spares(held)
        end(held)
        spares(held)
        ended_s = now_s[0]
        while not spares(held):
            now_s[0] += 0.5
        pauses_s.append(now_s[0] - ended_s)
    assert pauses_s == [0, 1, 2, 4, 8, 16, elastic.MAX_PAUSE_S, elastic.MAX_PAUSE_S]


def test_a_spare_that_was_called_counts_as_well(starter):
    held = starter[1](STAYS)
    for _ in range(3):
        spares(held)
        end(held, kill=True)
        spares(held)
        held._ends = {host: (ends, 0.0) for host, (ends, _) in held._ends.items()}
    before = spares(held)
    assert held(3).process.pid == before[1] and held._ends == {0: (3, 0.0)}
    assert [*spares(held)] == [0, 1]
