"""launch/chaos.py: the grammar of --chaos, and when events fire."""

import itertools
import os
import signal

import pytest

from launch import chaos, command


def test_faults_come_in_the_order_of_their_times():
    text = "rate=0:5mbit@400s,kill=3@120s, freeze=1@200s+15s,cut=2@300.5s+30s"
    assert list(chaos.parse(text, 4, 4)) == [
        chaos.Event(120, "kill", 3),
        chaos.Event(200, "freeze", 1, 15),
        chaos.Event(300.5, "cut", 2, 30),
        chaos.Event(400, "rate", 0, 0, "5mbit"),
    ]
    assert list(chaos.parse("", 4)) == []


@pytest.mark.parametrize("kinds, found", [("kill", {"kill"}), ("all", {"kill", "freeze", "cut"})])
def test_a_storm_has_so_many_faults_an_hour_and_is_the_same_again(kinds, found):
    text = f"storm(per_hour=360,seed=3,kinds={kinds},lasts_s=7)"
    events = list(itertools.islice(chaos.parse(text, 8, 4), 2000))
    assert events == list(itertools.islice(chaos.parse(text, 8, 4), 2000))
    assert events == sorted(events) and 0.9 < events[-1].at_s / (2000 * 10) < 1.1
    assert {event.kind for event in events} == found
    for kind in found:
        assert {event.target for event in events if event.kind == kind} == set(range(4 if kind == "cut" else 8))
    assert all(event.lasts_s == (0 if event.kind == "kill" else 7) for event in events)


@pytest.mark.parametrize(
    "text, hosts, problem",
    [
        ("kill", 0, "'kill' is not a fault; write --chaos"),
        ("kill=1", 0, "'kill=1' is not a fault"),
        ("drown=1@5s", 0, "'drown=1@5s' is not a fault"),
        ("kill=4@5s", 0, "kill=4: there are 4 processes, from 0 to 3"),
        ("cut=1@5s+3s", 0, "cut needs an emulated cluster; use launch.cluster run"),
        ("cut=2@5s+3s", 2, "cut=2: there are 2 hosts, from 0 to 1"),
        ("freeze=1@5s", 0, "'freeze=1@5s' is not a fault; write --chaos"),
        ("kill=1@5s+3s", 0, "'kill=1@5s+3s' is not a fault; write --chaos"),
        ("rate=1@5s", 2, "'rate=1@5s' is not a fault; write --chaos"),
        ("storm(per_hour=0)", 0, "option per_hour=0 must be at least 1e-06"),
        ("storm(per_day=5)", 0, "must be like 'storm(per_hour=125"),
        ("storm(kinds=cut)", 0, "cut needs an emulated cluster"),
        ("storm(per_hour=many)", 0, "--chaos: option per_hour='many' must be a number; the default is 125.0"),
        ("storm(seed=abc)", 0, "--chaos: option seed='abc' must be a whole number"),
        ("storm(seed=0.5)", 0, "--chaos: option seed=0.5 must be a whole number"),
        ("storm(seed=0,seed=1)", 0, "option seed is given twice"),
        ("storm(kinds=flood)", 0, "--chaos: option kinds='flood' is unknown; use one of all, kill, freeze, cut"),
        ("storm(per_hour=1e999)", 0, "per_hour=inf must be finite"),
        ("storm(per_hour=nan)", 0, "must be finite"),
        ("storm(per_hour=1e-320)", 0, "must be at least 1e-06"),
        ("storm(lasts_s=1e999,kinds=freeze)", 0, "lasts_s=inf must be finite"),
        (f"storm(per_hour={10**400})", 0, ""),
        ("storm(", 0, "must read like"),
        (f"kill={'9' * 5000}@1s", 0, "is not a fault"),
        ("freeze=1@٣s+1s", 0, "is not a fault"),
    ],
)
def test_mistakes_are_refused(text, hosts, problem):
    with pytest.raises(command.UserError) as caught:
        chaos.parse(text, 4, hosts)
    assert problem in str(caught.value)


def test_a_rate_that_is_none_is_refused_before_its_time():
    with pytest.raises(command.UserError, match="rate='banana': must be a number with bit, kbit, mbit or gbit"):
        chaos.parse("rate=0:5mbit@1s,rate=0:banana@400s", 4, 2)
    assert [event.rate for event in chaos.parse("rate=0:2.5mbit@1s,rate=1:none@2s", 4, 2)] == ["2.5mbit", "none"]


class Box:
    """Record what is done to its links."""

    def __init__(self):
        self.did = []

    def set_link(self, host, up):
        self.did.append((host, up))

    def set_rate(self, rate, host=None):
        self.did.append((host, rate))


def test_faults_are_done_when_they_are_due_and_end(monkeypatch):
    now_s, sent, box = [100.0], [], Box()
    monkeypatch.setattr(chaos.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    events = chaos.parse("kill=0@1s,freeze=1@2s+5s,cut=1@3s+2s,rate=0:5mbit@4s,kill=2@20s,freeze=1@30s+9s", 3, 2)
    trouble = chaos.Chaos(events, {0: 10, 1: 11, 2: None}.get, box)
    trouble.look()
    assert not sent
    now_s[0] += 2.5
    trouble.look()
    assert sent == [(10, signal.SIGKILL), (11, signal.SIGSTOP)]
    now_s[0] += 3
    trouble.look()
    assert box.did == [(1, False), (0, "5mbit")]
    now_s[0] += 1.6
    trouble.look()
    assert box.did[2:] == [(1, True)] and sent[2:] == [(11, signal.SIGCONT)]
    now_s[0] += 25
    trouble.look()
    assert sent[3:] == [(11, signal.SIGSTOP)]  # there is no process 2
    trouble.close()
    assert sent[4:] == [(11, signal.SIGCONT)]
