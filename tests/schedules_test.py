"""Pipeline schedules: each respects its dependencies, and takes the ticks and the memory that theory predicts."""

import numpy as np
import pytest

from decjax import schedules

CASES = [(name, S, M, 1) for name in ("gpipe", "1f1b") for S in (1, 2, 3, 4, 8) for M in (1, 2, 3, 4, 7, 16)]
CASES += [("interleaved", S, M, V) for S in (2, 3, 4, 8) for M in (S, 2 * S, 4 * S) for V in (2, 3)]


def positions(schedule):
    """(kind, microbatch, virtual stage) -> tick."""
    return {
        (op.kind, op.microbatch, schedule.virtual(stage, op.chunk)): t
        for t, row in enumerate(schedule.ticks)
        for stage, op in enumerate(row)
        if op
    }


@pytest.mark.parametrize("name, S, M, V", CASES)
def test_every_pass_is_taken_once_and_after_what_it_needs(name, S, M, V):
    schedule = schedules.make(name, S, M, V)
    taken = positions(schedule)
    assert len(taken) == 2 * S * V * M == sum(op is not None for row in schedule.ticks for op in row)
    for (kind, j, v), t in taken.items():
        if kind == "F" and v > 0:
            assert taken["F", j, v - 1] < t
        if kind == "B":
            assert taken["F", j, v] < t
            if v < S * V - 1:
                assert taken["B", j, v + 1] < t


@pytest.mark.parametrize("name, S, M, V", CASES)
def test_ticks_and_bubble_are_those_of_the_formula(name, S, M, V):
    schedule = schedules.make(name, S, M, V)
    assert schedule.num_ticks == 2 * (V * M + S - 1)
    waits = [op is None for row in schedule.ticks for op in row]
    assert np.mean(waits) == pytest.approx((S - 1) / (V * M + S - 1))


@pytest.mark.parametrize("name, S, M, V", CASES)
def test_live_activations(name, S, M, V):
    expected = {
        "gpipe": [M] * S,
        "1f1b": [min(M, S - s) for s in range(S)],
        "interleaved": [min(M * V, 2 * (S - 1 - s) + (V - 1) * S + 1) for s in range(S)],
    }[name]
    assert list(schedules.make(name, S, M, V).live) == expected


@pytest.mark.parametrize("name, S, M, V", CASES)
def test_every_message_reaches_the_pass_that_needs_it_in_time(name, S, M, V):
    schedule = schedules.make(name, S, M, V)
    taken, sent = positions(schedule), set()
    for t, messages in enumerate(schedule.sends):
        for kind in "FB":
            own = [m for m in messages if m.kind == kind]
            assert len({m.source for m in own}) == len({m.target for m in own}) == len(own), "not a permutation"
        for m in messages:
            v, to = schedule.virtual(m.source, m.source_chunk), schedule.virtual(m.target, m.target_chunk)
            assert to - v == (1 if m.kind == "F" else -1)
            assert taken[m.kind, m.microbatch, v] == t < taken[m.kind, m.microbatch, to]
            sent.add((m.kind, m.microbatch, v))
    assert len(sent) == 2 * M * (S * V - 1)


@pytest.mark.parametrize("S", [1, 2, 4, 8])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 7, 16])
def test_critical_gradients_of_1f1b_are_those_of_its_epilogue(S, M):
    """compress(s, j) ⇔ j ≥ M − (S − s)."""
    messages = [m for row in schedules.make("1f1b", S, M).sends for m in row]
    assert all((m.microbatch >= M - (S - m.source)) == m.in_epilogue for m in messages if m.kind == "B")
    assert not any(m.in_epilogue for m in messages if m.kind == "F")
    if M >= S - 1:
        assert sum(m.in_epilogue for m in messages) == S * (S - 1) // 2


def test_critical_gradients_come_last():
    """Also in the others: a stage that waits for a critical gradient has only backward passes left."""
    for name, S, M, V in CASES:
        schedule = schedules.make(name, S, M, V)
        taken = positions(schedule)
        for message in (m for row in schedule.sends for m in row if m.in_epilogue):
            at = taken["B", message.microbatch, schedule.virtual(message.target, message.target_chunk)]
            assert all(row[message.target] is None or row[message.target].kind == "B" for row in schedule.ticks[at:])
    assert sum(m.in_epilogue for row in schedules.make("gpipe", 4, 8).sends for m in row) == 8 * 3, "all: none forward is left"


def test_four_stages_of_1f1b_look_as_in_the_literature():
    """Drawn by hand: stage s does its first F in tick s, its first B in tick 2S − 1 − s."""
    rows = ["".join("." if op is None else op.kind for op in column) for column in zip(*schedules.make("1f1b", 4, 4).ticks)]
    assert rows == ["FFFF...B.B.B.B", ".FFF..BFB.B.B.", "..FF.BFBFB.B..", "...FBFBFBFB..."]


def test_waiting_for_each_other_is_told():
    F, B = (schedules.Op(kind, 0, 0) for kind in "FB")
    with pytest.raises(ValueError, match="wait for each other in tick 0"):
        schedules.Schedule("crossed", 2, 1, 1, ((B, F), (F, B)), (0, 0)).ticks


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("zigzag", 2, 4), "'zigzag' is unknown; use one of gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 4), "stages=0 must be at least 1"),
        (("1f1b", 2, 0), "microbatches=0 must be at least 1"),
        (("gpipe", 2, 4, 2), "chunks=2, stages=2 with schedule 'gpipe': .* need chunks=1"),
        (("interleaved", 4, 2, 2), "microbatches=2 .* multiple of stages=4; use 4, or"),
        (("interleaved", 4, 6, 2), "use 4 or 8"),
        (("interleaved", 2, 4, 1), "chunks=1, stages=2 with schedule 'interleaved': .* at least 2 of each"),
        (("interleaved", 1, 4, 2), "change the schedule"),
        (("interleaved", 2, 4, 0), "chunks=0"),
    ],
)
def test_impossible_schedules_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        schedules.make(*arguments)
    assert "\n" not in str(error.value)


def test_work_is_balanced():
    schedule = schedules.make("interleaved", 4, 8, 2)
    counts = np.array([[op is not None for op in row] for row in schedule.ticks]).sum(axis=0)
    assert (counts == 2 * 8 * 2).all()
