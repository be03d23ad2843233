"""Which members an elastic run removes: pauses, busy processes, partitions, lost messages, members that do nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import zmq

from decjax.elastic import coordinator as coordinator_lib
from decjax.elastic import transport
from decjax.elastic.membership import Excluded
from tests.elastic_test import KEYS, Band, next_views, wait_until
from tests.local_test import ROOT

# Join as member 2, wait for a view, and print it.
MEMBER = """
import sys, time
from decjax.elastic.keys import Keys
from decjax.elastic.membership import Membership
member = Membership(("127.0.0.1", int(sys.argv[1])), 2, float(sys.argv[2]), Keys.of(sys.argv[3]))
member.ready(not member.is_late)
print(member.next_view().number, flush=True)
time.sleep(600)
"""


@pytest.fixture
def band():
    made = []

    def make(*slots, **options):
        made.append(Band(3, **options))
        return made[-1], [made[-1].join(slot) for slot in slots]

    yield make
    for each in made:
        each.end()


def slots_of(view):
    return [member.slot for member in view.members]


def rounds(coordinator, count=10):
    """Wait until the coordinator has checked so many times."""
    before = coordinator._now_s
    wait_until(lambda: coordinator._now_s > before + count * min(0.1, coordinator._heartbeat_s / 10))


def test_a_process_that_is_stopped_is_left_out(band):
    """Its connections stay open, but no process answers on them."""
    group, members = band(0, 1, heartbeat_s=2.0)
    line = [sys.executable, "-c", MEMBER, str(group.coordinator.address[1]), "2.0", KEYS.text]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as third:
        try:
            assert slots_of(next_views(*members)[0]) == [0, 1, 2] and third.stdout.readline() == "1\n"
            third.send_signal(signal.SIGSTOP)
            views = next_views(*members)
            assert slots_of(views[0]) == [0, 1] and group.coordinator.silent == {2}
        finally:
            third.kill()


def test_a_process_too_busy_to_speak_stays(band, monkeypatch):
    """ZeroMQ's threads answer for it"""
    group, members = band(0, 1, 2, heartbeat_s=0.3)
    next_views(*members)
    monkeypatch.setattr(members[2], "_send", lambda: None)
    time.sleep(10 * 0.3)
    rounds(group.coordinator)
    assert not group.coordinator.silent and group.coordinator.view.number == 1


def test_a_pause_of_the_coordinator_leaves_nobody_out(band, monkeypatch):
    """Like Ctrl-Z and fg on the launcher: messages that arrived meanwhile count, and the pause itself does not."""
    group, members = band(0, 1, 2, heartbeat_s=0.5)
    next_views(*members)
    serve, paused = group.coordinator.serve, []

    def pauses(wait_s):
        if not paused:
            paused.append(time.sleep(6 * 0.5))
            group.coordinator._open.clear()  # its connections may have been dropped meanwhile
        serve(wait_s)

    monkeypatch.setattr(group.coordinator, "serve", pauses)
    wait_until(lambda: paused)
    rounds(group.coordinator, 20)
    assert not group.coordinator.silent and group.coordinator.view.number == 1


def cut(monkeypatch, members, apart):
    """Make connections between pairs of members appear lost."""
    for member in members:
        lives = {other._member.life for other in members if {member.slot, other.slot} in apart}
        all_reached = type(member.transport).reached.fget
        kind = type(f"Cut{member.slot}", (type(member.transport),), {})
        kind.reached = property(lambda transport, lives=lives: [life for life in all_reached(transport) if life not in lives])
        monkeypatch.setattr(member.transport, "__class__", kind)
        member._notify()


def test_the_larger_part_of_a_partition_goes_on_and_the_rest_comes_back(band, monkeypatch):
    """All reach the coordinator, which keeps the larger group; no process is killed."""
    group, members = band(0, 1, 2)
    next_views(*members)
    members[1].step = members[2].step = 7
    with monkeypatch.context() as patch:
        patch.setattr(coordinator_lib, "SETTLE", 0.0)
        cut(patch, members, [{0, 1}, {0, 2}])
        views = next_views(*members[1:])
        assert slots_of(views[0]) == [1, 2] and views[0].step == 7
        members[1].step = members[2].step = 9
    for member in members:  # the link is back
        member._notify()
    healed = next_views(*members)[0]
    assert slots_of(healed) == [0, 1, 2] and healed.fresh == (0,) and healed.step == 9
    assert not group.coordinator.silent


def test_a_host_whose_connections_are_lost_one_by_one_leaves_no_healthy_member_out(band, monkeypatch):
    """The writer's first lost connection looks like one between two members, of which the writer would stay."""
    group, members = band(0, 1, 2, heartbeat_s=60.0)
    coordinator, writer = group.coordinator, members[0]._member.life.encode()
    next_views(*members)
    with monkeypatch.context() as patch:
        cut(patch, members, [{0, 2}])
        wait_until(lambda: coordinator._next_number)
        rounds(coordinator)
        assert coordinator.view.number == 1
        cut(patch, members, [{0, 1}, {0, 2}])
        wait_until(lambda: not coordinator._sessions[writer].report.reaches)
        coordinator._stopping_s -= 61  # as if a heartbeat had passed
        assert slots_of(next_views(*members[1:])[0]) == [1, 2]


def test_who_leaves_writes_to_no_descriptor_that_is_closed(band, monkeypatch):
    """Its descriptor may belong to another file by then; the reader threads may end before they are woken."""
    _, (member, *others) = band(0, 1, 2)
    next_views(member, *others)
    write, closing, failed = os.eventfd_write, threading.current_thread(), []
    readers = {member.transport._wake: member.transport._reader, member._wake: member._thread}

    def late(descriptor, value):
        try:
            write(descriptor, value)
            if threading.current_thread() is closing:
                readers[descriptor].join(60)
                write(descriptor, value)
        except OSError as error:
            failed.append(error)

    monkeypatch.setattr(os, "eventfd_write", late)
    member.close()
    assert not failed and not any(reader.is_alive() for reader in readers.values())


def test_a_lost_connection_begins_a_new_view_of_the_same_members(band):
    """Messages to it may be lost, and would be awaited."""
    _, members = band(0, 1, 2)
    first = next_views(*members)[0]
    members[1].transport.broken = first.number
    members[1]._notify()
    second = next_views(*members)[0]
    assert second.members == first.members and second.number == 2


def test_who_does_nothing_while_others_wait_is_left_out(band, monkeypatch):
    group, members = band(0, 1, 2, heartbeat_s=0.5)
    view = next_views(*members)[0]
    stuck, waits, computes = members
    monkeypatch.setattr(computes, "_idle", lambda: 0.0)  # it may be compiling
    for member in (stuck, waits):
        monkeypatch.setattr(member, "_idle", lambda: coordinator_lib.PATIENCE + 1.0)
    waits.transport.awaited.append(computes.slot)
    rounds(group.coordinator, 20)
    assert group.coordinator.view == view
    waits.transport.awaited.append(stuck.slot)
    assert slots_of(next_views(waits, computes)[0]) == [1, 2] and group.coordinator.silent == {0}


def test_idle_is_who_neither_steps_nor_moves_messages_nor_computes(band, monkeypatch):
    _, (member, *_) = band(0, 1, 2)
    now_s, used_s = [1000.0], [0.0]
    monkeypatch.setattr("decjax.elastic.membership.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("decjax.elastic.membership.time.process_time", lambda: used_s[0])
    monkeypatch.setattr(member, "_send", lambda: None)

    def after(seconds, used=0.0):
        now_s[0] += seconds
        used_s[0] += used
        return member._idle()

    member.step = 1
    after(0)
    assert after(60) == 60 / member._heartbeat_s
    assert after(60, used=30) == 0
    assert after(200) == 200 / member._heartbeat_s
    member.step = 2  # so steps may take as long
    assert after(0) == 0 and after(160) == 160 / 320


def test_a_member_that_speaks_otherwise_costs_itself_alone(band):
    group, members = band(0, 1, 2)
    next_views(*members)
    members[2]._send = lambda: members[2]._coordinator.send(b"[" * 60000)
    members[2]._notify()
    assert slots_of(next_views(*members[:2])[0]) == [0, 1]
    with pytest.raises(Excluded):
        members[2].next_view()


def test_a_member_that_missed_a_message_receives_the_state_later(band, monkeypatch):
    """Every answer contains everything."""
    group, members = band(0, 1, 2)
    next_views(*members)
    receive = members[0]._receive
    monkeypatch.setattr(members[0], "_receive", lambda message: False)
    members[1].transport.broken = 1
    members[1]._notify()
    wait_until(lambda: group.coordinator._next_number == 2 and members[1]._stopped[0] == 2)
    monkeypatch.setattr(members[0], "_receive", receive)
    members[0]._notify()
    assert {view.number for view in next_views(*members)} == {2}


@pytest.mark.parametrize("encrypt", [False, True])
def test_processes_that_have_ended_are_out(band, encrypt):
    group, members = band(0, 1, 2, encrypt=encrypt, heartbeat_s=1.0)
    next_views(*members)
    group.coordinator.ended.append(members[0]._member.process)  # of all three here
    for member in members:
        with pytest.raises(Excluded):
            member.next_view()


def test_the_last_report_counts_although_the_end_of_its_process_is_noticed_first(band, monkeypatch):
    """As when the launcher is stopped while a run ends."""
    group, (writer,) = band(0)
    coordinator, life = group.coordinator, writer._member.life.encode()
    coordinator._sessions[life].member = writer._member._replace(process=-1)  # the other two are in one process here
    next_views(writer, group.join(1), group.join(2))
    read, is_stopped = coordinator._read, threading.Event()
    is_stopped.set()
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "_read", lambda: not is_stopped.is_set() and read())
        writer._reports_over = True
        writer.close()
        coordinator.ended.append(-1)
        rounds(coordinator, 5)
        is_stopped.clear()
        wait_until(lambda: coordinator.is_over)
    assert coordinator.view.number == 1


def test_a_context_that_does_not_end_holds_nobody(monkeypatch):
    """ZeroMQ issue 2733: with authenticated connections, closed sockets may stay open on a busy machine."""
    context, held = zmq.Context(), threading.Event()
    monkeypatch.setattr(context, "term", held.wait, raising=False)
    transport.terminate(context)
    held.set()
