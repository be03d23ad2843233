"""Gradients of stages, averaged over pipelines: a table shared by two stages, and stages of which only some compress."""

import functools

import jax
import numpy as np
import optax
import pytest

from decjax import mesh, models, pipeline, reduce
from decjax.channel import Channel
from decjax.optim import clip_by_global_norm, synchronize
from decjax.program import hlo

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCABULARY, WIDTH, STEPS = 16, 8, 20
TABLE_BYTES = 4 * VOCABULARY * WIDTH
POWERSGD = functools.partial(reduce.powersgd, rank=1)


@functools.cache
def model(depth):
    return models.decoder_lm(vocabulary=VOCABULARY, context=4, width=WIDTH, hidden=8, heads=2, depth=depth, tied=True)


def selective(channel=Channel()):
    """PowerSGD on three of four stages."""
    return reduce.first_stages(POWERSGD, 3, 4, channel=channel)


class Training:
    """All-reduce of synthetic gradients; clips in every step, so that the norm matters."""

    def __init__(self, N, S, T, make_reducer, *, fused, simulate=False, **channel_options):
        self.workers = w = mesh.make_workers(N, stages=S, tensor=T, simulate=simulate, divided=model(S).divided)
        self.division = pipeline.divide(model(S).parts, S, fused_embedding=fused)
        channel = Channel(w.axis, **channel_options)
        self.reducer = pipeline.with_tied_table(make_reducer(channel), self.division, channel)
        self.tx = synchronize(optax.chain(clip_by_global_norm(0.5, self.division.global_norm), optax.adam(0.02)), self.reducer)
        self.params = w.stack(jax.jit(lambda: self.division.split(model(S).init(jax.random.key(0))))())
        self.state = w.jit(self.tx.init, (0,))(self.params)
        self.program = w.jit(self._step, (0, 0, 0)).lower(self.params, self.state, self.gradients(0)).compile()

    def _step(self, params, state, grads):
        updates, state = self.tx.update(self.division.sum_tied(grads), state, params)
        return optax.apply_updates(params, updates), state

    def gradients(self, step):
        """Gradients of every stage of every worker: a slowly changing common part plus an individual one; zero where there is no
        parameter.
        """

        def of(path, x_NxS):
            key = len(jax.tree_util.keystr(path)), x_NxS.size
            common, own = (
                np.random.default_rng(key).normal(size=x_NxS.shape[1:]),
                np.random.default_rng((step, *key)).normal(size=x_NxS.shape),
            )
            return (np.cos(0.1 * step) * common + 0.3 * own).astype(np.float32) * (np.asarray(x_NxS) != 0)

        return self.workers.place(jax.tree_util.tree_map_with_path(of, self.workers.fetch(self.params)))

    def run(self):
        seen = []
        for step in range(STEPS):
            self.params, self.state = self.program(self.params, self.state, self.gradients(step))
            seen.append(self.workers.fetch(self.params))
        for params in seen:
            jax.tree.map(lambda x_NxS: np.testing.assert_array_equal(x_NxS, np.broadcast_to(x_NxS[:1], x_NxS.shape)), params)
            table_SxVxD = params["table_VxD"][0]
            np.testing.assert_array_equal(table_SxVxD[0], table_SxVxD[-1])
            assert not table_SxVxD[1:-1].any()
        return seen

    def sent(self):
        """Return the bytes that the devices of a stage send, [S], by axis."""
        text = self.program.as_text()
        sent = hlo.bytes_by_stage(text, self.workers.sizes)
        self.sent_within_groups = hlo.bytes_sent(text, self.workers.mesh.size).sum() - sum(
            sent_NxS.sum() for sent_NxS in sent.values()
        )
        assert all((sent_NxS == sent_NxS[0]).all() for sent_NxS in sent.values())
        return {axis: sent_NxS[0] for axis, sent_NxS in sent.items()}

    def declared(self):
        """Return the bytes sent to other workers by all stages of one worker."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), self.params)
        return self.workers.stages * self.reducer.num_bytes(one, self.workers.num_workers)[0]


@functools.cache
def trained(N, S, T, make_reducer, fused):
    training = Training(N, S, T, make_reducer, fused=fused)
    return training, training.run()


def close(found, expected):
    """Adam divides by a root that may be tiny."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize(
    "N, S, T, make_reducer, by_stage",
    [
        (4, 2, 1, reduce.mean, [reduce.mean] * 2),
        (2, 2, 2, POWERSGD, [POWERSGD] * 2),
        (2, 4, 1, selective, [POWERSGD] * 3 + [reduce.mean]),
    ],
    ids=["mean", "PowerSGD, tensor=2", "PowerSGD on three stages of four"],
)
def test_fused_is_apart_for_fewer_bytes(N, S, T, make_reducer, by_stage):
    """With T = 2 the shards of a table hold rows of different words, which must not be added. Where only some stages compress, one
    copy of the table is on a stage that does and the other on one that does not.
    """
    (apart, path), (fused, fused_path) = (trained(N, S, T, make_reducer, fused) for fused in (False, True))
    close(fused_path, path)
    assert np.abs(path[-1]["table_VxD"] - path[0]["table_VxD"]).max() > 0.1

    rest = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), part)
        for name, part in apart.params.items()
        if name != "table_VxD"
    }
    others_S = np.array([make().num_bytes(rest, N)[0] for make in by_stage])
    ends_S, (apart_sent, fused_sent) = np.array([1.0, *[0.0] * (S - 2), 1.0]), (apart.sent(), fused.sent())
    np.testing.assert_allclose(apart_sent["worker"] - others_S, 2 * (N - 1) / N * TABLE_BYTES * ends_S)
    np.testing.assert_allclose(fused_sent["worker"] - others_S, (N - 1) / N * TABLE_BYTES * ends_S)
    norm_bytes = 2 * (S - 1) / S * 4 * T  # summed over stages
    for sent, training in ((apart_sent, apart), (fused_sent, fused)):
        np.testing.assert_allclose(sent["stage"], TABLE_BYTES * ends_S + norm_bytes)
        np.testing.assert_allclose(training.declared(), sent["worker"].sum())
    of_table = [sent["worker"][0] - others_S[0] + TABLE_BYTES for sent in (apart_sent, fused_sent)]
    np.testing.assert_allclose(of_table, [TABLE_BYTES * (3 * N - 2) / N, TABLE_BYTES * (2 * N - 1) / N])
    np.testing.assert_allclose(of_table[0] / of_table[1], (3 * N - 2) / (2 * N - 1))
    assert fused.sent_within_groups <= apart.sent_within_groups  # columns are halved, rows are unchanged


def test_a_tied_table_gets_the_sum_over_stages_of_the_mean_over_workers_and_counts_once_in_the_norm():
    """The first step of plain gradient descent, in NumPy."""
    training, _ = trained(4, 2, 1, reduce.mean, True)
    w, division = training.workers, training.division

    def update(grads):
        averaged, _ = training.reducer.reduce(grads, ())
        return averaged["table_VxD"], division.global_norm(averaged)

    grads = training.gradients(3)
    table_NxSxVxD, norm_NxS = w.fetch(w.jit(update, (0,))(grads))
    grads = w.fetch(grads)
    expected_VxD = grads["table_VxD"].sum(axis=1).mean(axis=0)
    np.testing.assert_allclose(table_NxSxVxD, np.broadcast_to(expected_VxD, table_NxSxVxD.shape), rtol=1e-5, atol=1e-6)
    others = [x.mean(axis=0) for name, part in grads.items() if name != "table_VxD" for x in jax.tree.leaves(part)]
    norm = np.sqrt(sum(np.square(x).sum() for x in [expected_VxD, *others]))
    np.testing.assert_allclose(norm_NxS, np.full((4, 2), norm), rtol=1e-5)


def test_only_the_first_stages_compress():
    training, _ = trained(2, 4, 1, selective, True)
    compressed, _ = training.workers.fetch(training.state).reducer
    assert all(error_NxSxIxJ[:, :3].any() and not error_NxSxIxJ[:, 3].any() for error_NxSxIxJ in compressed.error)


def test_selective_stages_are_divided_by_tensor_parallel_groups():
    """The compiler's collectives within a group wait for all devices of all stages, so no branch may contain one."""

    first_of_two = functools.partial(reduce.first_stages, POWERSGD, 1, 2, reduce.mean)

    divided, whole = (Training(2, 2, T, first_of_two, fused=True) for T in (2, 1))
    close(divided.run()[-1], whole.run()[-1])
    scoped = [collective for collective in hlo.collectives(divided.program.as_text(), 8) if collective.stages]
    assert scoped and all(collective.kind == "all-reduce" for collective in scoped)


def test_of_full_rank_the_compressed_stages_are_the_plain_ones():
    exact = functools.partial(reduce.powersgd, rank=8, gate=np.inf)
    full = functools.partial(reduce.first_stages, exact, 1, 2, reduce.mean)
    close(Training(4, 2, 1, full, fused=True).run()[-1], trained(4, 2, 1, reduce.mean, True)[1][-1])


def test_simulated_stages_take_the_same_steps_and_declare_the_bytes():
    simulated, (divided, path) = Training(2, 4, 1, selective, fused=True, simulate=True), trained(2, 4, 1, selective, True)
    close(simulated.run()[-1], path[-1])
    assert simulated.declared() == divided.declared()


def test_the_devices_of_a_tensor_parallel_group_send_each_its_part():
    """A single array is not gathered first; a replicated array is sent whole by each device."""
    training = Training(2, 2, 2, reduce.mean, fused=True, bucket_bytes=0)
    w = training.workers
    copies = jax.tree.map(
        lambda x, sharding: 4 * x.size / 4 * (1 if sharding.shard_shape(x.shape) != (1, 1, *x.shape[2:]) else 2),
        training.params,
        w.shardings(training.params),
    )
    expected = sum(jax.tree.leaves(copies)) - copies["table_VxD"] / 2
    np.testing.assert_allclose(training.sent()["worker"], np.full(2, expected))


@pytest.mark.parametrize("simulate", [False, True])
@pytest.mark.parametrize(
    "name, collective",
    [
        ("exchange", lambda x, axis: axis.exchange(x, [(0, 1), (1, 0)])),
        ("scatter_mean", lambda x, axis: axis.scatter_mean(x, 2)),
        ("gather", lambda x, axis: axis.gather(x, 2)),
        ("sum", lambda x, axis: axis.sum(x)),
    ],
)
def test_only_collectives_that_some_stages_can_send_are_sent_by_some(name, collective, simulate):
    """The other bytes would be those of all stages, whatever `sent_by` says."""
    w = mesh.make_workers(2, stages=2, simulate=simulate)

    with pytest.raises(RuntimeError, match=f"Axis.{name} needs all stages, but only stages 0 send on this axis"):
        jax.eval_shape(w.map(lambda x: collective(x, w.axis.sent_by([0])), (0,)), jax.ShapeDtypeStruct((2, 2, 8), np.float32))


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda: reduce.first_stages(POWERSGD, 0, 4), "0 compressed stages of 4: must be between 1 and 4"),
        (lambda: reduce.first_stages(POWERSGD, 5, 4), "must be between 1 and 4"),
        (
            lambda: reduce.first_stages(POWERSGD, 2, 4, lambda channel: reduce.start_at(POWERSGD(), 3, reduce.mean())),
            "one of a single phase",
        ),
    ],
)
def test_impossible_choices_of_stages_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        make()
    assert "\n" not in str(error.value)


def test_reducers_of_all_stages_are_themselves():
    reducer = POWERSGD()
    assert reduce.first_stages(lambda channel: reducer, 4, 4) is reducer
