"""Elastic runs in the threads of one process: the loop and its checks are those of static runs, and nothing is lost when members
leave.
"""

import collections
import contextlib
import json
import signal
import threading

import jax
import numpy as np
import pytest

from configs import quadratics
from decjax import config, topology, train
from decjax.elastic import coordinator
from decjax.elastic.members import ElasticMembers
from decjax.elastic.membership import Excluded, Membership
from decjax.elastic.trainer import Trainers
from decjax.elastic.workers import Group
from decjax.train import checkpoint, metrics, workdir
from decjax.train import run as run_lib
from tests.elastic_test import KEYS, Band, together, wait_until
from tests.membership_test import cut

STEPS, LOG, SAVE = 24, 4, 8
pytestmark = pytest.mark.usefixtures("quick_compilation")


class Killed(BaseException):
    """A process that ends without notice."""


def spec_of(shorthand="topology=one_peer_exponential", n=3, steps=STEPS, **fields):
    made = quadratics.get_config(f"workers={n},simulate=false,{shorthand},steps={steps}")
    made.update_from_flattened_dict(
        {"log_every": LOG, "eval.every": steps, "checkpoint.every": SAVE, "checkpoint.keep": 9} | fields
    )
    return config.resolve(made, n)


class Member:
    """One process of a run: `run()` takes its part; `events` are called after so many steps."""

    def __init__(self, band, spec, slot, folder, events=None, launch="one", resume_from=None):
        self.band, self.spec, self.slot, self.folder, self.launch = band, spec, slot, folder, launch
        self.events, self.resume_from, self.said, self.batches = events or {}, resume_from, [], []

    def __call__(self):
        self.group = group = Group(Membership(self.band.coordinator.address, self.slot, self.band.heartbeat_s, KEYS))
        members = ElasticMembers(Trainers(self.spec, group), group, self.launch, self.said.append)
        note_step, batch = members.note_step, members.batch

        def of(step, counters):
            if event := self.events.pop(step, None):
                event(self)
            return batch(step, counters)

        def noted(steps):
            number = group.view.taken(steps - 1) + group.index
            note_step(steps)
            self.batches.append(number)

        members.note_step, members.batch = noted, of
        try:
            self.loop = train.Run(members.trainer, self.folder, self.resume_from, members)
            self.outcome = self.loop.train()
        except Killed:
            return None
        except BaseException:
            group.membership.close()
            raise
        return self.outcome


def killed(member):
    raise Killed


def rows(folder, kind="train"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def trained(folder, spec, n=3, events=None, **options):
    """Return the members after a run."""
    with contextlib.closing(contextlib.ExitStack()):
        band = Band(n)
        try:
            members = [Member(band, spec, slot, folder, (events or {}).get(slot), **options) for slot in range(n)]
            together(members)
        finally:
            band.end()
    return members


def replicas(member):
    """Return every slot's parameters in the last checkpoint, [N, …]."""
    like = member.loop.members.like()
    with checkpoint.Checkpoints(member.folder, read_only=True) as saved:
        return jax.tree.leaves(saved.restore(saved.latest(), like)[0].params)


def test_a_run_without_faults_is_that_of_one_process(tmp_path):
    spec = spec_of()
    members = trained(tmp_path / "elastic", spec)
    simulated = train.Trainer(spec.replace(simulate=True))
    train.Run(simulated, tmp_path / "static").train()
    assert workdir.steps_saved(tmp_path / "elastic") == workdir.steps_saved(tmp_path / "static") == [8, 16, 24]
    for name in ("loss", "consensus_distance"):
        values = [[row[name] for row in rows(tmp_path / folder)] for folder in ("elastic", "static")]
        np.testing.assert_allclose(*values, rtol=1e-4)
    assert sorted(number for member in members for number in member.batches) == [*range(STEPS * 3)]
    again = trained(tmp_path / "elastic", spec)
    assert all(member.outcome.already_finished for member in again)


@pytest.mark.parametrize(
    "shorthand",
    [
        "method=allreduce",
        "method=diloco,every=4",
        "topology=ring,codec=int8,mixer=choco",
        "topology=torus",
        "topology=one_peer_exponential,codec=int8,mixer=choco",
        "topology=exponential,mixer=push_sum",
    ],
)
def test_members_are_lost_and_the_rest_goes_on_to_the_end(tmp_path, shorthand):
    """Down to one worker, with the writer among the lost ones. Any number of workers can continue from the last worker's
    checkpoint.
    """
    n = 4
    members = trained(tmp_path, spec_of(shorthand, n), n, {0: {7: killed}, 2: {13: killed}, 1: {18: killed}})
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps == [*range(LOG, STEPS + 1, LOG)] and workdir.steps_saved(tmp_path)[-1] == STEPS
    assert [row["workers"] for row in rows(tmp_path)][-1] == 1 and members[3].outcome.summary["steps"] == STEPS
    assert all(np.isfinite(x).all() for x in replicas(members[3]))
    # What a member has computed since its last exchange is lost with it, and is computed again.
    lasting = (member.batches if member.slot == 3 else member.batches[:-LOG] for member in members)
    numbers = collections.Counter(number for batches in lasting for number in batches)
    assert max(numbers.values()) == 1, "no batch is taken twice"
    if "torus" in shorthand:
        assert any("topology torus does not exist for 3 workers" in text for member in members for text in member.said)


@pytest.mark.parametrize("messages", [3, 4, 5])
def test_replicas_of_a_synchronous_method_are_equal_after_a_change(tmp_path, messages):
    """If a member dies before its last messages, the others stop one step apart; those behind take the state of those ahead."""

    def dies(member):
        exchange, sent = member.group.channel.exchange, []

        def dying(*given):
            sent.append(given)
            return killed(member) if len(sent) > messages else exchange(*given)

        member.group.channel.exchange = dying

    members = trained(tmp_path, spec_of("method=allreduce", 4), 4, {1: {9: dies}, 0: {15: killed}})
    for x in replicas(members[3]):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    assert max(row["consensus_distance"] for row in rows(tmp_path)) < 1e-6


def test_replicas_are_averaged_although_a_member_dies_in_it(tmp_path):
    def dies(member):
        member.loop.trainer.consensus = lambda state: killed(member)

    trained(tmp_path, spec_of(consensus_every=LOG, **{"eval.every": STEPS}), events={1: {SAVE - 1: dies}})
    assert [row["workers"] for row in rows(tmp_path)][:2] == [3, 2]
    assert max(row["consensus_distance"] for row in rows(tmp_path)) < 1e-6


def test_a_writer_that_others_do_not_reach_lets_another_write(tmp_path, monkeypatch):
    """A member rejoins later, and every row and checkpoint exists once."""
    joined, both = [], [{0, 1}, {0, 2}]

    def join(member):
        joined.append(member.group.membership)

    def part(member):
        monkeypatch.setattr(coordinator, "SETTLE", 0.0)
        cut(monkeypatch, joined, both)

    def heal(member):
        monkeypatch.undo()
        for membership in joined:
            membership._notify()
        wait_until(lambda: member.group.membership._is_stopped)

    members = trained(tmp_path, spec_of(), events={0: {0: join, 6: part}, 1: {0: join, 14: heal}, 2: {0: join}})
    assert [row["step"] for row in rows(tmp_path)] == [*range(LOG, STEPS + 1, LOG)]
    assert workdir.steps_saved(tmp_path) == [8, 16, 24]
    assert {2, 3} == {row["workers"] for row in rows(tmp_path)} and not members[0].loop.first


@pytest.fixture
def stop(monkeypatch):
    """Deliver a signal event to one process."""
    local = threading.local()

    @contextlib.contextmanager
    def collected():
        local.caught = []
        yield local.caught

    monkeypatch.setattr(run_lib.signals, "collected", collected)
    return lambda member: local.caught.append(signal.SIGTERM)


def test_batches_and_rows_go_on_where_they_stopped(tmp_path, stop):
    """A worker was lost, and the group stopped before the end: no batch is used twice, and only that step leaves one out."""
    spec = spec_of()
    first = trained(tmp_path, spec, events={1: {6: killed}, 2: {9: stop}})
    assert [member.outcome.signal for member in first if member.slot != 1] == [signal.SIGTERM] * 2
    before = {number for member in first for number in member.batches}
    second = trained(tmp_path, spec)
    after = {number for member in second for number in member.batches}
    assert max(before) < min(after) == second[0].loop.spec.workers * 12 - first[0].loop.counters["batches_left"]
    assert sorted(after) == [*range(min(after), max(after) + 1)] and len(after) == 12 * 3
    assert [row["step"] for row in rows(tmp_path)] == [*range(LOG, STEPS + 1, LOG)]
    assert [row["batches"] for row in rows(tmp_path) if row["step"] >= 12] == [min(after) + 12 * k for k in range(4)]
    assert workdir.steps_saved(tmp_path) == [8, 12, 16, 24]


def test_a_static_run_goes_on_in_the_data_where_an_elastic_one_stopped(tmp_path, stop):
    first = trained(tmp_path, spec_of(), events={1: {6: killed}, 2: {9: stop}})
    trainer = train.Trainer(spec_of())
    loop = train.Run(trainer, tmp_path)
    left = first[0].loop.counters["batches_left"]
    assert loop.start == 12 and loop.counters["batches_left"] == left > 0
    expected = trainer.workers.build(lambda worker: trainer.data.batch((36 + worker - left) % 3, (36 + worker - left) // 3))
    jax.tree.map(np.testing.assert_array_equal, loop.members.batch(12, loop.counters), expected)


@pytest.mark.parametrize("kind", ["other", "same"])
def test_the_checks_are_those_of_a_static_run(tmp_path, kind, stop):
    """--resume_from, changed data, another config, and checkpoints that are all damaged."""
    spec = spec_of()
    trained(tmp_path / "run", spec, events={2: {9: stop}})
    if kind == "other":
        longer = spec_of(n=2, steps=STEPS + 8, **{"eval.every": STEPS})
        (found, _) = trained(tmp_path / "more", longer, n=2, resume_from=tmp_path / "run")
        assert found.loop.counters["first_step"] == 12 and rows(tmp_path / "more")[0]["step"] == 16
        with pytest.raises(train.CheckpointError, match="holds a run with another config .*workers: 3 there, 2 here"):
            trained(tmp_path / "run", spec_of(n=2), n=2)
        with pytest.raises(train.CheckpointError, match="has no checkpoints"):
            trained(tmp_path / "never", spec, resume_from=tmp_path / "nothing")
        return
    path = tmp_path / "run/checkpoints/12/extra/metadata"
    extra = json.loads(path.read_text())
    extra["counters"]["corpus"] = "others"
    extra["counters_checksum"] = checkpoint.extra_checksum(extra)
    path.write_text(json.dumps(extra))
    with pytest.raises(train.CheckpointError, match="the data have changed since step 12"):
        trained(tmp_path / "run", spec)
    for file in (tmp_path / "run/checkpoints").rglob("d/*"):
        file.write_bytes(b"garbage!")
    with pytest.raises(train.CheckpointError, match="all checkpoints in .* are damaged .*; start again in another --workdir"):
        trained(tmp_path / "run", spec)


@pytest.mark.parametrize(
    "fields, complaint",
    [({"tensor": 2}, "tensor=2 with --elastic: .* use tensor=1"), ({"simulate": True}, "simulate with --elastic")],
)
def test_sizes_that_processes_of_one_device_do_not_have_are_refused(fields, complaint):
    with pytest.raises(train.ConfigError, match=complaint):
        Trainers(spec_of().replace(**fields), Group())


def test_a_diverged_run_names_the_last_good_checkpoint(tmp_path):
    def explode(member):
        member.loop.state = jax.tree.map(lambda x: x * np.nan if np.issubdtype(x.dtype, np.floating) else x, member.loop.state)

    with pytest.raises(train.Diverged, match="the last good checkpoint is of step 8"):
        trained(tmp_path, spec_of(), events={1: {10: explode}})


def test_another_process_writes_if_one_cannot(tmp_path, monkeypatch):
    """No row or checkpoint is missing; if none can be written, the run ends with the reason."""
    log, broken = metrics.JsonLines.log, set()

    def fails(self, step, kind, values):
        if threading.current_thread() in broken:
            raise OSError(24, "Too many open files")
        log(self, step, kind, values)

    monkeypatch.setattr(metrics.JsonLines, "log", fails)
    breaks = lambda member: broken.add(threading.current_thread())
    members = trained(tmp_path / "one", spec_of(), events={0: {6: breaks}})
    assert [row["step"] for row in rows(tmp_path / "one")] == [*range(LOG, STEPS + 1, LOG)]
    assert workdir.steps_saved(tmp_path / "one") == [8, 16, 24] and members[1].loop.first and not members[0].loop.first
    assert any("process 0 cannot write, process 1 does" in text for text in members[0].said)
    broken.clear()
    with pytest.raises((train.CheckpointError, Excluded), match="Too many open files|over"):
        trained(tmp_path / "all", spec_of(), events={slot: {6: breaks} for slot in range(3)})
    assert [row["step"] for row in rows(tmp_path / "all")] == [4]


def test_two_launches_do_not_write_into_one_directory(tmp_path):
    """Also when the first writer is lost while the second one waits."""
    reached, refused = threading.Event(), []

    def wait(member):
        reached.set()
        other = Trainers(spec_of(), Group())
        with pytest.raises(train.CheckpointError, match="is in use by a run that is still going"):
            workdir.claim(tmp_path, other.spec.document, launch="two")
        refused.append(member.slot)

    trained(tmp_path, spec_of(), events={0: {6: killed}, 1: {7: wait}, 2: {10: wait}})
    assert refused and [row["step"] for row in rows(tmp_path)] == [*range(LOG, STEPS + 1, LOG)]
    with (
        workdir.claim(tmp_path, spec_of().document, launch="two"),
        workdir.claim(tmp_path, spec_of().document, launch="two"),
        pytest.raises(train.CheckpointError, match="in use"),
    ):
        workdir.claim(tmp_path, spec_of().document)
    workdir.claim(tmp_path, spec_of().document).close()


def test_no_older_step_is_written_over_a_newer_one(tmp_path):
    def overtaken(member):
        (tmp_path / "checkpoints/999").mkdir()

    with pytest.raises((train.CheckpointError, Excluded), match="checkpoint of step 999, which is newer than step 16|over"):
        trained(tmp_path, spec_of(), events={1: {12: overtaken}})
    assert workdir.steps_saved(tmp_path) == [8, 999]


@pytest.mark.parametrize("name", topology.names())
def test_every_topology_has_a_stand_in(name):
    """For every number of workers that may remain of eight."""
    try:
        spec = spec_of(f"topology={name}", 8)
    except config.ConfigError:
        pytest.skip("needs options")
    group = Group()
    trainers = Trainers(spec, group)
    for n in range(1, 8):
        made = trainers.of(n)
        assert made.workers.num_workers == n and made.setup.topology.num_workers == n
