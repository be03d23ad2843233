"""Bytes on the wire: of programs compiled here, of lines as other backends print them, and of the real training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from decjax import mesh
from decjax import topology as topology_lib
from decjax.pipeline import stateless
from decjax.program import hlo
from decjax.train import engine
from decjax.train.step import Step
from tests.runs import trainer_of

N = 8
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
ODD_EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]


# -- Programs compiled here -------------------------------------------------------------------------------------------


def compiled(fn, width=12, dtype=jnp.float32):
    """HLO of `fn(x_1xW)` on eight devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("node", "local"))
    spec = jax.sharding.PartitionSpec(("node", "local"))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jnp.zeros((N, width), dtype)).compile().as_text()


ALL = ("node", "local")


def permute(x, axis_name=ALL):
    return jax.lax.ppermute(x, axis_name, [(0, 1), (2, 2), (3, 0), (1, 5)])


@pytest.mark.parametrize(
    "fn, kind, groups, num_bytes, sent_N",
    [
        # 12 float32 are 48 bytes.
        (permute, "collective-permute", ((0, 1), (3, 0), (1, 5)), 48, [48, 48, 0, 48, 0, 0, 0, 0]),
        (lambda x: jax.lax.psum(x, ALL), "all-reduce", (tuple(range(N)),), 48, [2 * 7 / 8 * 48] * N),
        (lambda x: jax.lax.psum(x, "local"), "all-reduce", tuple(map(tuple, PAIRS)), 48, [48] * N),
        (lambda x: jax.lax.psum(x, "node"), "all-reduce", tuple(map(tuple, ODD_EVEN)), 48, [2 * 3 / 4 * 48] * N),
        (
            lambda x: jax.lax.psum(x, ALL, axis_index_groups=ODD_EVEN),
            "all-reduce",
            tuple(map(tuple, ODD_EVEN)),
            48,
            [2 * 3 / 4 * 48] * N,
        ),
        (
            lambda x: jax.lax.psum_scatter(x[0], ALL, axis_index_groups=PAIRS, tiled=True)[None],
            "reduce-scatter",
            tuple(map(tuple, PAIRS)),
            48,
            [24] * N,
        ),
        (
            lambda x: jax.lax.all_gather(x[0], "node", tiled=True)[None],
            "all-gather",
            tuple(map(tuple, ODD_EVEN)),
            4 * 48,
            [3 * 48] * N,
        ),
    ],
    ids=["permute", "all-reduce", "local axis", "node axis", "grouped", "reduce-scatter", "all-gather"],
)
def test_compiled_collectives(fn, kind, groups, num_bytes, sent_N):
    text = compiled(fn)
    (collective,) = hlo.collectives(text, N)
    assert collective == hlo.Collective(kind, groups, num_bytes)
    np.testing.assert_allclose(hlo.bytes_sent(text, N), sent_N, rtol=1e-12)


def test_compiled_permutes_of_other_dtypes():
    assert hlo.bytes_sent(compiled(permute, 12, jnp.bool_), N)[0] == 12
    assert hlo.bytes_sent(compiled(permute, 12, jnp.int8), N)[0] == 12
    assert hlo.bytes_sent(compiled(permute, 12, jnp.uint16), N)[0] == 24


def test_all_reduces_that_xla_combines_count_in_full():
    text = compiled(lambda x: jax.lax.psum(x, ALL) + jnp.pad(jax.lax.psum(3 * x[:, :5], ALL), ((0, 0), (0, 7))))
    found = hlo.collectives(text, N)
    assert sum(collective.num_bytes for collective in found) == 4 * (12 + 5)
    assert len(found) == 1 and "(f32[1,12]" in text, "nothing was combined, so this tests no tuple"


def test_program_without_collectives_sends_nothing():
    text = compiled(lambda x: jnp.sin(x) * jax.lax.axis_index(ALL))
    assert hlo.collectives(text, N) == []
    np.testing.assert_array_equal(hlo.bytes_sent(text, N), np.zeros(N))


def test_several_collectives_add_up():
    text = compiled(lambda x: jax.lax.psum(permute(x), "local"))
    np.testing.assert_allclose(hlo.bytes_sent(text, N), np.array([48, 48, 0, 48, 0, 0, 0, 0]) + 48)


# -- Lines as accelerators print them ---------------------------------------------------------------------------------

LINES = {
    "permute": (
        "  %cp = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,1},{2,0}}",
        ("collective-permute", ((0, 1), (2, 0)), 32),
    ),
    "permute to nobody": ("  ROOT %cp = f32[8]{0} collective-permute(%x), source_target_pairs={}", ("collective-permute", (), 32)),
    "permute-start": (
        "  %s = (f32[8,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(f32[8,4]{1,0} %x), channel_id=3, source_target_pairs={{0,1},{1,0}}",
        ("collective-permute", ((0, 1), (1, 0)), 128),
    ),
    "combined permute-start": (
        "  %s = ((f32[8]{0}, bf16[6]{0}), (f32[8]{0}, bf16[6]{0})) collective-permute-start(%x, %y), source_target_pairs={{0,1}}",
        ("collective-permute", ((0, 1),), 32 + 12),
    ),
    "all-reduce of everyone": (
        "  %ar = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add",
        ("all-reduce", (tuple(range(N)),), 32),
    ),
    "all-reduce-start": (
        "  %ar.1 = f32[8]{0} all-reduce-start(f32[8]{0} %x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add",
        ("all-reduce", ((0, 1, 2, 3), (4, 5, 6, 7)), 32),
    ),
    "combined all-reduce-start": (
        "  %ar = (f32[8]{0}, /*index=1*/bf16[3]{0}, f32[]) all-reduce-start(%x, %y, %z), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
        ("all-reduce", tuple(map(tuple, PAIRS)), 32 + 6 + 4),
    ),
    "all-gather-start": (
        "  %ag = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}",
        ("all-gather", tuple(map(tuple, ODD_EVEN)), 32),
    ),
    "combined all-gather-start": (
        "  %ag = ((f32[2]{0}, bf16[1]{0}), (f32[8]{0}, bf16[4]{0})) all-gather-start(%x, %y), "
        "replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}",
        ("all-gather", tuple(map(tuple, ODD_EVEN)), 32 + 8),
    ),
    "reduce-scatter-start": (
        "  %rs = ((f32[8]{0}), f32[4]{0}, u32[]) reduce-scatter-start(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
        ("reduce-scatter", tuple(map(tuple, PAIRS)), 32),
    ),
    "all-to-all-start": (
        "  %aa = ((f32[8]{0}), f32[8]{0}, s32[]) all-to-all-start(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}",
        ("all-to-all", tuple(map(tuple, PAIRS)), 32),
    ),
    "iota": (
        "  %ar = s8[8]{0} all-reduce(%x), replica_groups=[4,2]<=[8], use_global_device_ids=true",
        ("all-reduce", tuple(map(tuple, PAIRS)), 8),
    ),
    "iota of one group": ("  %ar = s8[8]{0} all-reduce(%x), replica_groups=[1,8]<=[8]", ("all-reduce", (tuple(range(N)),), 8)),
    # Devices 0 … 7 as a 4 x 2 array, transposed: its rows are the even and the odd devices.
    "iota transposed": (
        "  %ar = f8e4m3fn[8]{0} all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true",
        ("all-reduce", tuple(map(tuple, ODD_EVEN)), 8),
    ),
    # As 2 x 2 x 2 (a, b, c), in the order (a, c, b): groups differ in b.
    "iota transposed in three": (
        "  %ar = pred[8]{0} all-reduce(%x), replica_groups=[4,2]<=[2,2,2]T(0,2,1)",
        ("all-reduce", ((0, 2), (1, 3), (4, 6), (5, 7)), 8),
    ),
    "mesh of one axis": (
        "  %ar = f32[8]{0} all-reduce(%x), replica_groups=mesh['data'=8] {'data'}, use_global_device_ids=true",
        ("all-reduce", (tuple(range(N)),), 32),
    ),
    "mesh along the last axis": (
        "  %ar = f32[8]{0} all-reduce(%x), replica_groups=mesh['node'=4,'local'=2,'stage'=1] {'local'}",
        ("all-reduce", tuple(map(tuple, PAIRS)), 32),
    ),
    "mesh along two of three axes": (
        "  %ar = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}",
        ("all-reduce", ((0, 4, 1, 5), (2, 6, 3, 7)), 32),
    ),
    # The mesh has the devices 0 4 / 1 5 / 2 6 / 3 7: its columns are groups along 'a', and its rows along 'b'.
    "mesh of transposed devices": (
        "  %ag = f32[4]{0} all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}",
        ("all-gather", ((0, 1, 2, 3), (4, 5, 6, 7)), 16),
    ),
    "mesh of transposed devices, the other axis": (
        "  %ag = f32[4]{0} all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}",
        ("all-gather", ((0, 4), (1, 5), (2, 6), (3, 7)), 16),
    ),
    "mesh of devices in order": (
        "  %ag = f32[4]{0} all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([8]) {'b'}, dimensions={0}",
        ("all-gather", tuple(map(tuple, PAIRS)), 16),
    ),
}


@pytest.mark.parametrize("line, expected", LINES.values(), ids=LINES)
def test_lines(line, expected):
    assert hlo.collectives(f'ENTRY %main {{\n{line}, metadata={{op_name="a(b)"}}\n}}', N) == [hlo.Collective(*expected)]


@pytest.mark.parametrize(
    "line",
    [
        "  %d = f32[8]{0} collective-permute-done((f32[8]{0}, f32[8]{0}, u32[], u32[]) %collective-permute-start.1)",
        "  %d = f32[8]{0} all-reduce-done(f32[8]{0} %all-reduce-start)",
        "  %d = f32[8]{0} all-gather-done((f32[2]{0}, f32[8]{0}) %all-gather-start)",
        "  %g = f32[8]{0} get-tuple-element((f32[8]{0}, f32[3]{0}) %all-reduce.1), index=0",
        "  ROOT %f = f32[8]{0} fusion(f32[8]{0} %all-reduce, f32[8]{0} %all-gather.3), kind=kLoop, calls=%fused",
    ],
)
def test_lines_that_send_nothing(line):
    assert hlo.collectives(line, N) == []


def test_unreadable_groups_are_refused_rather_than_guessed():
    with pytest.raises(ValueError, match="replica groups .*device_ids"):
        hlo.collectives("  %ar = f32[8] all-reduce(%x), replica_groups=mesh['a'=8], device_ids=(7,6,5,4,3,2,1,0) {'a'}", N)


# -- The training step ------------------------------------------------------------------------------------------------


@functools.cache
def corpus_file(folder):
    path = folder / "text"
    path.write_bytes(b"abcdefgh" * 500)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


def steps(folder, argument, gradients=None, **method):
    """Return (compiled HLO, measured bytes_N, declared bytes_N, P) for every phase of a tiny model's training step.

    `gradients` replaces the model's own; with a fast one the mixing compiles as before, in a tenth of the time.
    """
    config = lm.get_config(f"smoke,workers={N},optimizer=sgdm,{argument}")
    config.model.update(context=4, width=4, hidden=4, heads=1, depth=1)
    config.data.path = corpus_file(folder)
    config.method.update(method)
    trainer = trainer_of(config)
    state, method, topology = trainer.abstract, trainer.method, trainer.setup.topology
    gradient = stateless(gradients) if gradients else trainer.setup.source.gradient
    program = engine.compile_per_phase(Step(gradient, method, trainer.workers, 0))
    one = trainer.workers.one_device(state.params)
    num_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(one))
    found = {}
    for step in range((topology.period if topology else 1) * getattr(method, "every", 1)):
        phase = method.phase(step)
        compiled_step = program(phase, state, trainer.batch(step), np.int32(step))
        sent_N = compiled_step.sent["worker"]
        found[phase] = (compiled_step.executables[0].as_text(), sent_N, method.num_bytes(one, phase), num_bytes)
    return list(found.values())


def quick_gradients(params, batch, key):
    """Of ½ ‖x‖²."""
    del batch, key
    return jnp.zeros(()), params


def parties(collectives):
    """Return the sizes of the sets of workers that depend on one another within a step, directly or through others."""
    party = {worker: {worker} for worker in range(N)}
    for collective in collectives:
        for group in collective.groups:
            joint = set().union(*(party[worker] for worker in group))
            for worker in joint:
                party[worker] = joint
    return {len(workers) for workers in party.values()}


@pytest.mark.parametrize(
    "argument, messages, largest_group, largest_party",
    [
        ("topology=one_peer_exponential", 1, 2, None),
        ("topology=one_peer_exponential(pairwise=True)", 1, 2, 2),
        ("topology=ring", 2, 2, None),
        ("method=local", 0, 1, 1),
        ("method=allreduce", 2 * (N - 1) / N, N, N),
    ],
    ids=["one-peer", "pairs", "ring", "local", "all-reduce"],
)
def test_bytes_of_a_step(folder, argument, messages, largest_group, largest_party):
    own = argument in ("topology=one_peer_exponential", "method=allreduce")  # gradients of the model
    measured = steps(folder, argument, None if own else quick_gradients)
    assert len(measured) == (3 if "exponential" in argument else 1)
    for text, sent_N, declared_N, num_bytes in measured:
        np.testing.assert_allclose(sent_N, messages * num_bytes, rtol=1e-12)
        np.testing.assert_allclose(declared_N, sent_N, rtol=1e-12)
        np.testing.assert_array_equal(hlo.bytes_sent(text, N), sent_N)
        collectives = hlo.collectives(text, N)
        assert max((len(group) for c in collectives for group in c.groups), default=1) == largest_group
        if largest_party:
            assert parties(collectives) == {largest_party}


def test_bytes_of_alternating_exponential_ring(folder):
    """A joint mean of two nodes takes the parameters out of each node once, and involves no other node."""
    L = 2
    topology = topology_lib.make("alternating_exponential_ring", N, local_size=L)
    measured = steps(folder, "topology=alternating_exponential_ring,local_size=2", gradients=quick_gradients)
    assert len(measured) == topology.period
    meetings = 0
    for phase, (text, sent_N, declared_N, num_bytes) in enumerate(measured):
        np.testing.assert_allclose(declared_N, sent_N, rtol=1e-12)
        joint = {source for shift in topology.rounds[phase].shifts for source, _ in shift.pairs}
        collectives = hlo.collectives(text, N)
        assert max(len(group) for c in collectives for group in c.groups) == L
        assert parties(collectives) == ({2 * L} if len(joint) == N // L else {L, 2 * L} if joint else {L})
        out_of_node = np.zeros(N // L)
        for collective in collectives:
            for group in collective.groups:
                if len({worker // L for worker in group}) > 1:
                    assert collective.kind == "collective-permute"
                    out_of_node[group[0] // L] += collective.num_bytes
        padding = L * 4 * 20  # at most a few values per bucket
        for node, num_bytes_out in enumerate(out_of_node):
            if node in joint:
                assert num_bytes <= num_bytes_out <= num_bytes + padding
                meetings += 1
            else:
                assert num_bytes_out == 0
    # Over a period every node meets each of its log2(nodes) partners once.
    assert meetings == (N // L) * 2


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "argument",
    [
        "topology=one_peer_exponential,mixer=choco,codec=int8",
        "topology=line,mixer=deepsqueeze,codec=bfloat16",
        "topology=exponential,mixer=dcd,codec=int8",
        "topology=hypercube,mixer=beer,codec=int8",
        "topology=random_digraph,mixer=push_sum,codec=int8",
        "topology=one_peer_ring,mixer=power_gossip,rank=2",
    ],
)
def test_bytes_of_compressed_messages(folder, argument):
    plain = {"beer": 2}.get(argument.split("mixer=")[1].split(",")[0], 1)  # messages as long as the parameters
    for text, sent_N, declared_N, num_bytes in steps(folder, argument, gradients=quick_gradients):
        np.testing.assert_allclose(declared_N, sent_N, rtol=1e-12)
        shifts = sum(c.kind == "collective-permute" for c in hlo.collectives(text, N))
        assert shifts and {c.kind for c in hlo.collectives(text, N)} == {"collective-permute"}
        assert 0 < sent_N.max() < plain * num_bytes * shifts


def test_steps_without_mixing_send_nothing(folder):
    measured = steps(folder, "topology=ring", gradients=quick_gradients, every=2)
    assert [(sent_N == 0).all() for _, sent_N, _, _ in measured] == [True, False]
    assert hlo.collectives(measured[0][0], N) == []


def test_a_traced_phase_reports_the_mean_over_phases(folder):
    ((_, sent_N, declared_N, num_bytes),) = steps(
        folder, "topology=one_peer_exponential", gradients=quick_gradients, static_phase=False
    )
    np.testing.assert_allclose(declared_N, num_bytes)
    np.testing.assert_allclose(sent_N, num_bytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_exchange_sends_numbers_in_their_own_width(dtype):
    """A CPU widens floats of 16 bits in messages unless they travel as integers."""
    workers = mesh.make_workers(N)
    pairs = [(i, (i + 1) % N) for i in range(N)]
    program = workers.jit(lambda x: workers.axis.exchange(x, pairs), (0,))
    text = program.lower(workers.stack(jnp.zeros(64, dtype))).compile().as_text()
    np.testing.assert_array_equal(hlo.bytes_sent(text, N), [64 * jnp.dtype(dtype).itemsize] * N)
