"""decjax.elastic in the threads of one process: collectives against JAX's, views, and trajectories against simulated workers."""

import concurrent.futures
import functools
import sys
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quadratics
from decjax import config
from decjax.elastic import trainer as trainer_lib
from decjax.elastic.coordinator import Coordinator
from decjax.elastic.keys import Keys
from decjax.elastic.membership import Excluded, Membership
from decjax.elastic.programs import MEMBERS
from decjax.elastic.view import Member, View
from decjax.elastic.workers import ElasticWorkers, Group
from decjax.errors import ViewChanged
from decjax.train import engine
from decjax.train.trainer import Trainer

KEYS, HEARTBEAT_S = Keys.made(), 20.0  # long enough for a busy machine


class Band:
    """A coordinator and the members of a group, in threads."""

    def __init__(self, slots, least=1, heartbeat_s=HEARTBEAT_S, encrypt=False):
        self.members, self.encrypt = [], encrypt
        self.coordinator = Coordinator("127.0.0.1", slots, least, heartbeat_s, KEYS)
        self.heartbeat_s, self.over = heartbeat_s, threading.Event()
        self.thread = threading.Thread(target=self.coordinator.run, args=(self.over.is_set,), daemon=True)
        self.thread.start()

    def join(self, slot, step=0):
        membership = Membership(self.coordinator.address, slot, self.heartbeat_s, Keys.of(KEYS.text), self.encrypt)
        membership.step = step
        self.members.append(membership)
        membership.ready(has_replica=not membership.is_late)
        return membership

    def end(self):
        for member in self.members:
            member.close()
        self.over.set()
        self.thread.join()


@pytest.fixture
def band(request):
    made = Band(**request.param) if hasattr(request, "param") else Band(3)
    yield made
    made.end()


def together(functions, timeout_s=300):
    """Return the results of functions that wait for each other. If one fails, `Band.end` releases the others."""
    pool = concurrent.futures.ThreadPoolExecutor(len(functions), thread_name_prefix="member")
    futures = [pool.submit(function) for function in functions]
    done, waiting = concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_EXCEPTION)
    pool.shutdown(wait=False)
    for future in done:
        future.result()  # raises the thread's error
    assert not waiting, f"not done after {timeout_s} s; all threads:\n" + "\n".join(where())
    return [future.result() for future in futures]


def where():
    """Return each thread's position."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return (f"{names.get(ident)}\n{''.join(traceback.format_stack(frame))}" for ident, frame in sys._current_frames().items())


def groups(band, slots):
    def enter(slot):
        group = Group(band.join(slot))
        group.enter()
        return group

    return together([functools.partial(enter, slot) for slot in slots])


def collect(axis, n, x):
    """Combine the results of every collective."""
    pairs = [(k, (k + 1) % n) for k in range(n - 1)]
    return {
        "exchanged": axis.exchange(x, pairs),
        "narrow": axis.exchange(x.astype(jnp.bfloat16), pairs),
        "mean": axis.mean(jnp.sin(x)),
        "wired": axis.mean(x, jnp.bfloat16),
        "gathered": axis.all_gather(x * axis.index),
        "scattered": axis.all_to_all(jnp.stack([x + k for k in range(n)])),
        "twice": axis.sum(jnp.cos(axis.sum(x))),
        "shared": axis.gather(axis.scatter_mean(jnp.tile(x, n), n) * 2, n),
    }


def test_collectives_are_those_of_jax(band):
    n, size = 3, 7
    x = np.random.default_rng(0).normal(size=(n, size)).astype(np.float32)

    def member(group):
        workers = ElasticWorkers(n, 1, None, group=group)
        run = workers.jit(functools.partial(collect, MEMBERS, n), (0,))
        return run(workers.build(lambda worker: x[worker]))

    from decjax.mesh.axis import SIMULATED

    found = together([functools.partial(member, group) for group in groups(band, range(n))])
    expected = jax.vmap(functools.partial(collect, SIMULATED, n), axis_name=SIMULATED.name)(x)
    for worker, own in enumerate(found):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[worker], rtol=1e-5, atol=1e-6), own, expected)
    for name in ("mean", "wired", "twice"):
        assert all((own[name] == found[0][name]).all() for own in found)


def wait_until(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def next_views(*memberships):
    return together([membership.next_view for membership in memberships])


def test_views_follow_who_leaves_and_who_comes(band):
    members = [band.join(slot) for slot in range(3)]
    first = next_views(*members)
    assert first[0] == first[1] == first[2] and [member.slot for member in first[0].members] == [0, 1, 2]
    for step, membership in enumerate(members):
        membership.step = 10 + step
    members[0].close()
    second = next_views(*members[1:])
    assert second[0] == second[1] and second[0].step == 12 and second[0].number == 2
    assert second[0].fresh == (1,) and second[0].source.slot == 2, "whoever is a step behind gets the other's replica"
    members[1].step = 12
    assert second[0].block == 12 * 3 and [member.slot for member in second[0].members] == [1, 2]
    late = band.join(0)
    assert late.is_late
    third = next_views(late, *members[1:])
    assert third[0] == third[1] == third[2] and third[0].fresh == (0,) and third[0].source.slot == 1
    assert third[0].step == 12 and third[0].block == 12 * 3


def test_batches_go_on_where_a_checkpoint_says(band):
    members = [Membership(band.coordinator.address, slot, band.heartbeat_s, KEYS) for slot in range(3)]
    for member in members:
        member.step, member.taken = 40, 95
        member.ready(has_replica=True)
    assert {(view.step, view.block, view.fresh) for view in next_views(*members)} == {(40, 95, ())}
    for member in members:
        member.close()


def replaced(band):
    """A member that replaces another and has no replica yet, and the two that have theirs."""
    gone, *others = [band.join(slot) for slot in range(3)]
    next_views(gone, *others)
    gone.close()
    next_views(*others)
    late = band.join(0)
    assert next_views(late, *others)[0].fresh == (0,)
    return late, *others


def test_member_is_fresh_until_it_has_its_replica(band):
    late, source, other = replaced(band)
    source.close()  # while it sends its replica
    again = next_views(late, other)[0]
    assert again.fresh == (0,) and again.source.slot == 2
    late.step = again.step  # now it has one
    other.close()
    assert next_views(late)[0].fresh == ()


def test_group_without_a_replica_begins_anew(band):
    late, *others = replaced(band)
    for member in others:
        member.close()
    with pytest.raises(Excluded):
        while True:  # a view may begin before the second is gone
            late.next_view()
    anew = [band.join(slot, step=40) for slot in range(3)]
    assert not any(member.is_late for member in anew)
    assert next_views(*anew)[0][:2] == (1, 40)


def test_a_view_that_ends_before_a_member_has_begun_it_is_never_begun(band, monkeypatch):
    """Its messages would be awaited although no member sends them any more."""
    gone, one, two = (band.join(slot) for slot in range(3))
    next_views(gone, one, two)
    gone.close()
    wait_until(lambda: band.coordinator.view.number == 2)
    send, withheld = two._send, []
    monkeypatch.setattr(two, "_send", lambda: withheld.append(two._stopped) if two._stopped[0] == 3 else send())
    late = band.join(0)  # the members are asked to stop, and one has not answered yet
    wait_until(lambda: (3, 0) in withheld and one._stopped == (3, 0))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.next_view)
        time.sleep(0.2)
        assert not waiting.done()
        monkeypatch.setattr(two, "_send", send)
        two._notify()
        assert waiting.result(timeout=120).number == 3
    assert next_views(late, two)[0].number == 3


def test_a_run_is_over_when_its_writer_says_so(band):
    writer, one, two = members = [band.join(slot) for slot in range(3)]
    assert {view.writer for view in next_views(*members)} == {0}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(member.await_end) for member in (one, two)]
        time.sleep(0.2)
        assert not any(each.done() for each in waiting)
        writer.close()  # it dies before everything is written
        for each in waiting:
            with pytest.raises(ViewChanged):
                each.result(timeout=120)
        assert {view.writer for view in next_views(one, two)} == {1}
        waiting = pool.submit(two.await_end)
        one.end()
        waiting.result(timeout=120)
    one.close()
    with pytest.raises(Excluded):
        band.join(0)
    two.await_end()  # later departures change nothing


def test_the_end_reaches_members_that_wait_for_others(band):
    """One waits for a message, and one has not begun its announced view."""
    gone, writer, waits = groups(band, range(3))
    gone.membership.close()
    together([writer.enter, waits.enter])
    late = band.join(0)
    views = together([writer.enter, waits.enter])
    assert late.slot in views[0].fresh
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(waits.channel.exchange, np.ones(3), None, 1)
        time.sleep(0.2)
        writer.membership.end()
        with pytest.raises(ViewChanged):
            waiting.result(timeout=120)
    for member in (waits.membership, late):
        wait_until(lambda member=member: member._is_over)
        with pytest.raises(Excluded):
            member.next_view()


def test_whoever_waits_for_one_that_is_gone_is_told(band):
    one, two, three = groups(band, range(3))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.channel.exchange, np.ones(3), None, 1)
        time.sleep(0.2)
        assert not waiting.done()
        two.membership.close()
        with pytest.raises(ViewChanged):
            waiting.result(timeout=120)
    together([one.enter, three.enter])
    together(
        [
            functools.partial(one.channel.exchange, np.ones(3), 1, None),
            functools.partial(three.channel.exchange, np.ones(3), None, 0),
        ]
    )


@pytest.mark.parametrize("slots", [1, 4])
def test_batches_are_taken_in_order_by_whoever_there_is(slots):
    taken, view = [], View(1, 0, tuple(Member(slot, "", "", 0) for slot in range(4)))
    for living, steps in ((4, 3), (3, 5), (4, 2)):
        members = view.members[:living] if living < 4 else tuple(Member(slot, "", "", 0) for slot in range(4))
        view = view._replace(members=members)
        taken += [view.batch_of(index, view.step + k, slots) for k in range(steps) for index in range(living)]
        view = view._replace(step=view.step + steps, block=view.block + steps * living)
    assert taken == [(number % slots, number // slots) for number in range(4 * 3 + 3 * 5 + 4 * 2)]


def spec(shorthand, n):
    return config.resolve(quadratics.get_config(f"workers={n},simulate=false,{shorthand}"), n)


@pytest.mark.parametrize(
    "shorthand",
    [
        "topology=one_peer_exponential",
        "topology=ring,codec=int8",
        "method=allreduce",
        "method=diloco",
        "topology=ring,mixer=choco,codec=int8",
    ],
)
def test_members_take_the_steps_of_simulated_workers(shorthand, band):
    n, steps = 3, 6
    told = spec(shorthand, n)

    def member(group):
        trainer = trainer_lib.Trainers(told, group).of(len(group.view.members))
        state = trainer.init()
        for step in range(steps):
            state, _ = trainer.step(state, trainer.batch(step), step)
        return trainer.workers.fetch(state.params), trainer.consensus_distance(state), trainer.average(state)[0]

    found = together([functools.partial(member, group) for group in groups(band, range(n))])
    simulated = Trainer(told.replace(simulate=True))
    state = simulated.init()
    for step in range(steps):
        state, _ = simulated.step(state, simulated.batch(step), step)
    expected = simulated.workers.fetch(state.params), simulated.consensus_distance(state), simulated.average(state)[0]
    for own in found:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), own, expected)


def test_messages_travel_beside_the_gradient(band):
    """Where the method allows it: with order "awc", not with "atc"."""
    group, *_ = groups(band, range(3))
    for order, expected in (("awc", "split"), ("atc", "fused")):
        trainer = trainer_lib.Trainers(spec(f"topology=one_peer_exponential,order={order}", 3), group).of(3)
        assert engine.choose("auto", trainer.method, trainer.workers) == expected


def test_what_is_compiled_is_kept_when_a_member_leaves(band):
    """Only programs that depend on the number of workers are recompiled."""

    def step(group, told=spec("topology=one_peer_exponential", 3)):
        trainer = trainer_lib.Trainers(told, group).of(len(group.view.members))
        state = trainer.init()
        state, _ = trainer.step(state, trainer.batch(0), 0)
        return len(group.compiled)

    one, two, three = groups(band, range(3))
    before = together([functools.partial(step, group) for group in (one, two, three)])
    three.membership.close()
    together([one.enter, two.enter])
    after = together([functools.partial(step, group) for group in (one, two)])
    assert after[0] - before[0] <= before[0] // 2
