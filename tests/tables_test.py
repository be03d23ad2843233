"""Divided embedding tables: against DLRM in NumPy, error bounds of every message, bytes, resuming, and invalid configs."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import clicks
from decjax import config, mesh, train
from decjax.contrib.clicks import DividedTables, bounds
from decjax.elastic import trainer as elastic
from decjax.program import hlo
from tests.runs import run_of, trainer_of
from tests.tiny_runs import assert_equal_states, forget_after

N, STEPS = 4, 24
SIZES = "40,20,10,5,3"  # one more than workers
CODED = "bound=(0.02,1=0.05),gradient_bound=0.01,start=4,within=16"
pytestmark = pytest.mark.usefixtures("quick_compilation")


def config_of(shorthand="divided", workers=N, **fields):
    optimizer = "" if "optimizer" in shorthand else "optimizer=sgdm(momentum=0.0),"
    made = clicks.get_config(f"smoke,workers={workers},{optimizer}steps={STEPS},{shorthand}")
    made.update_from_flattened_dict({"data.tables": SIZES, "log_every": 1, "checkpoint.every": 8, "checkpoint.keep": 9} | fields)
    return made


@functools.cache
def path(shorthand, workers=N, **fields):
    """Return (trainer, the averaged model before each step and after the last, losses [steps, N], states of the source)."""
    trainer = trainer_of(config_of(shorthand, workers, **fields))
    state, models, losses, told = trainer.init(), [], [], []
    for step in range(STEPS):
        models.append(jax.tree.map(np.asarray, trainer.average(state)[0]))
        state, loss_N = trainer.step(state, trainer.batch(step), step)
        losses.append(np.asarray(loss_N))
        told.append(jax.tree.map(np.asarray, state.source))
    models.append(jax.tree.map(np.asarray, trainer.average(state)[0]))
    return trainer, models, np.array(losses), told


# -- DLRM in NumPy ----------------------------------------------------------------------------------------------------


def perceptron(layers, x, active):
    """Return its outputs, and a function from their gradient to those of the layers and of its input."""
    inputs, outs = [], []
    for number, layer in enumerate(layers, 1):
        inputs.append(x)
        x = x @ layer["kernel"] + layer["bias"]
        x = np.maximum(x, 0) if active or number < len(layers) else x
        outs.append(x)

    def backward(g):
        grads = []
        for number in range(len(layers), 0, -1):
            g = g * (outs[number - 1] > 0) if active or number < len(layers) else g
            grads.append({"kernel": inputs[number - 1].T @ g, "bias": g.sum(axis=0)})
            g = g @ layers[number - 1]["kernel"].T
        return grads[::-1], g

    return x, backward


def dlrm(params, batch):
    """Return (mean loss, its gradient), as in arXiv 1906.00091, of undivided tables and all workers' examples."""
    bottom, top = (list(params["dense"][name]["layers"].values()) for name in ("bottom", "top"))
    tables = [table["embedding"] for table in params["tables"].values()]
    own, back_bottom = perceptron(bottom, batch.numbers_BxF, True)
    vectors = [own, *(table[batch.indices_BxT[:, t]] for t, table in enumerate(tables))]
    pairs = [(s, t) for s in range(len(vectors)) for t in range(s + 1, len(vectors))]
    products = [(vectors[s] * vectors[t]).sum(axis=1) for s, t in pairs]
    logits, back_top = perceptron(top, np.concatenate([own, np.stack(products, axis=1)], axis=1), False)
    logits = logits[:, 0]
    loss = (np.logaddexp(0, logits) - batch.clicks_B * logits).mean()
    grads_top, g = back_top(((1 / (1 + np.exp(-logits)) - batch.clicks_B) / len(logits))[:, None])
    D, of = own.shape[1], [np.zeros_like(own) for _ in vectors]
    of[0] += g[:, :D]
    for (s, t), g_B in zip(pairs, g[:, D:].T, strict=True):
        of[s] += g_B[:, None] * vectors[t]
        of[t] += g_B[:, None] * vectors[s]
    grads_bottom, _ = back_bottom(of[0])
    grads_tables = [np.zeros_like(table) for table in tables]
    for t, grad in enumerate(grads_tables):
        np.add.at(grad, batch.indices_BxT[:, t], of[t + 1])
    layers = lambda grads: {"layers": dict(enumerate(grads))}
    dense = {"bottom": layers(grads_bottom), "top": layers(grads_top)}
    return loss, {"dense": dense, "tables": {t: {"embedding": grad} for t, grad in enumerate(grads_tables)}}


@pytest.mark.parametrize("place", ["simulate=false", "simulate"])
def test_it_is_dlrm_on_one_machine(place):
    trainer, models, losses, _ = path(f"divided,{place}")
    rate = trainer.setup.learning_rate
    params = jax.tree.map(np.float64, models[0])
    for step in range(STEPS):
        rows = [trainer.data.batch(worker, step) for worker in range(N)]
        loss, grads = dlrm(params, jax.tree.map(lambda *x: np.concatenate(x).astype(x[0].dtype), *rows))
        np.testing.assert_allclose(losses[step].mean(), loss, rtol=1e-5)
        params = jax.tree.map(lambda x, g: x - float(rate(step)) * g, params, grads)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6), models[step + 1], params)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), models[0], models[-1])
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize(
    "shorthand, workers, fields",
    [("simulate", N, {"clip_norm": 0.05}), ("simulate", 8, {"data.tables": "9,4"}), ("simulate,optimizer=adamw", 3, {})],
    ids=["clipped", "workers without tables", "adamw"],
)
def test_undivided_tables_take_the_same_steps(shorthand, workers, fields):
    one, whole = (path(f"{shorthand}{more}", workers, **fields) for more in (",divided", ""))
    np.testing.assert_allclose(one[2], whole[2], rtol=2e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5), one[1][-1], whole[1][-1])


# -- Bounds -----------------------------------------------------------------------------------------------------------


def test_no_value_of_any_table_is_off_by_more_than_its_bound():
    """In every step, while the bounds shrink; some errors reach the bound."""
    trainer, _, losses, told = path(f"{CODED},simulate")
    worst_SxNx2xP = np.stack([each.worst_2xP for each in told])
    assert worst_SxNx2xP.max() <= 1 and np.isfinite(losses).all()
    vectors_SxT = worst_SxNx2xP[:, :, 0].reshape(STEPS, -1)[:, [0, 2, 4, 6, 1]]  # of tables 0 to 4
    assert (vectors_SxT.max(axis=0) > 0.9).all() and (vectors_SxT > 0.3).all()
    assert told[-1].step.tolist() == [STEPS] * N and not told[-1].raw_2.any()


def test_simulated_workers_receive_the_same():
    for each in zip(path(f"{CODED},simulate")[1], path(f"{CODED},simulate=false")[1], strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), *each)


@pytest.mark.parametrize("mode", ["simulated", "devices"])
def test_what_arrives_is_within_bounds_whatever_the_values(mode):
    """Many magnitudes and bounds in one program. Values that the bits cannot represent, and NaN, are sent uncompressed."""
    workers, P, shape = mesh.make_workers(N, simulate=mode == "simulated"), 2, (16, 4)
    link = bounds.BoundedLink(bits=6, outliers=1)

    def send(x_NxPxBxD, e_NxP):
        theirs_NxP = workers.axis.all_to_all(e_NxP)
        return link.send(x_NxPxBxD, e_NxP, theirs_NxP, workers.axis)

    run, rng, seen = workers.jit(send, (0, 0)), np.random.default_rng(0), set()
    for case in range(40):
        x = rng.normal(size=(N, N, P, *shape)) * 10.0 ** rng.integers(-4, 3)
        e = np.float32(10.0 ** rng.uniform(-5, 1, size=(N, N, P)))
        if case == 7:
            x[1, 2, 0, 3, 1] = np.nan
        x = np.float32(x)
        arrived, told = jax.tree.map(np.asarray, run(x, e))
        raw = bool(told.is_raw[0])
        assert (told.is_raw == raw).all() and told.worst_P.max() <= 1
        sent = x.swapaxes(0, 1)
        off = np.abs(np.float64(arrived) - np.float64(sent)) / e.swapaxes(0, 1)[..., None, None]
        np.testing.assert_array_equal(arrived, sent) if raw else np.testing.assert_array_less(off, 1 + 1e-12)
        seen.add(raw)
    assert seen == {True, False} and run._cache_size() == 1


def test_where_bits_do_not_suffice_nothing_is_lost_and_the_bytes_are_counted():
    plain, (trainer, _, losses, told) = path("divided,simulate"), path("bound=1e-6,bits=2,simulate")
    np.testing.assert_allclose(losses, plain[2], rtol=1e-5)
    assert told[-1].raw_2.tolist() == [[STEPS, 0]] * N
    state = trainer.init()._replace(source=jax.tree.map(jnp.asarray, told[-1]))
    whole = (N - 1) * 2 * trainer.spec.batch_per_worker * 4 * 4
    coded = trainer.setup.source.num_bytes - (plain[0].setup.source.num_bytes - whole) - 2 * (N - 1) / N * 4
    assert trainer.bytes_by_usage(state) == STEPS * (whole - coded)


@pytest.mark.parametrize(
    "shape, expected",
    [
        ("stepwise", [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1]),
        ("linear", [5, 4.5, 4, 3.5, 3, 2.5, 2, 1.5, 1, 1, 1]),
        ("exponential", [*(5 ** (1 - np.arange(8) / 8)), 1, 1, 1]),
    ],
)
def test_bounds_shrink(shape, expected):
    found = [float(bounds.factor(jnp.int32(step), 5.0, 8, shape)) for step in range(11)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# -- Bytes, programs, state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shorthand", ["divided", CODED, "gradient_bound=0.01,bits=5,clip"])
def test_declared_bytes_are_those_of_the_program(shorthand):
    clip = {"clip_norm": 1.0} if "clip" in shorthand else {}
    shorthand = shorthand.removesuffix(",clip")
    trainer = trainer_of(config_of(f"{shorthand},simulate=false", **clip))
    state = trainer.abstract
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.batch(0))
    program = trainer.program(state, batch, 0)
    assert program is trainer.program(state, batch, 20), "the bounds of a later step need another program"
    declared = trainer.method.num_bytes(trainer.workers.one_device(state.params), 0)
    np.testing.assert_allclose(program.sent["worker"], declared)
    B, D, P = trainer.spec.batch_per_worker, 4, 2
    plain = DividedTables(task=trainer.setup.task, axis=trainer.workers.axis, num_workers=N, batch_size=B).num_bytes
    assert plain == (N - 1) * P * B * 4 * (1 + 2 * D)
    assert (trainer.setup.source.num_bytes == plain) == (shorthand == "divided")
    kinds = [each.kind for each in hlo.collectives(program.executables[0].as_text(), N)]
    assert kinds.count("all-to-all") == {"divided": 3, CODED: 5}.get(shorthand, 4)


def test_a_worker_holds_its_own_tables_alone():
    trainer = path(f"{CODED},simulate")[0]
    state = trainer.init()
    assert state.params["tables"].shape == (N, 43, 4)  # 40 and 3 rows, of tables 0 and 4
    whole = jax.tree.map(np.asarray, trainer.average(state)[0])
    first = jax.jit(trainer.setup.task.init)(jax.random.key(trainer.spec.seed))
    jax.tree.map(np.testing.assert_array_equal, whole, first)
    assert trainer.consensus_distance(state) == 0


def test_a_run_that_is_stopped_goes_on_bit_by_bit(tmp_path):
    """Including the bounds, which are still shrinking."""
    make = lambda: config_of(f"{CODED},simulate=false".replace("within=16", "within=20"))
    run_of(make(), tmp_path / "whole").train()
    again = forget_after(tmp_path / "whole", 8, tmp_path / "again")
    run_of(make(), again).train()
    assert_equal_states(tmp_path / "whole", again, STEPS)
    summary = json.loads((again / "summary.json").read_text())
    assert np.isfinite(summary["eval_auc"]) and summary["eval_excess"] > 0
    longer = run_of(config_of(f"{CODED},simulate=false", steps=STEPS + 2), tmp_path / "longer", resume_from=again)
    assert longer.start == STEPS and not np.asarray(longer.state.source.step).any()
    with pytest.raises(train.CheckpointError, match="tables divided among 4 workers, not 2; use workers=4") as error:
        run_of(config_of(CODED, workers=2, steps=STEPS + 2), tmp_path / "other", resume_from=again)
    assert "\n" not in str(error.value)
    with pytest.raises(train.CheckpointError, match="tables: 'divided' there, 'whole' here"):
        run_of(config_of("", steps=STEPS + 2), tmp_path / "other", resume_from=again)


# -- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shorthand, fields, message",
    [
        ("bound=0", {}, "source.forward='0': bound 0 must be positive"),
        ("bound=-0.1", {}, "bound -0.1 must be positive"),
        ("gradient_bound=nan", {}, "source.backward='nan': bound nan must be positive"),
        ("bound=inf", {}, "bound inf must be positive"),
        ("bound=small", {}, "source.forward='small' must read like '0.01' or '0.01,2=0.05'"),
        ("bound=(0.1,7=0.2)", {}, "there is no table 7; tables are numbered from 0 to 4"),
        ("bound=(0.1,-1=0.2)", {}, "there is no table -1"),
        ("bound=(0.1,2=0.2,2=0.3)", {}, "table 2 has two bounds"),
        ("bound=(0.1,0.2)", {}, "all tables have two bounds"),
        ("bound=(1=0.1)", {}, "has no bound for table 0"),
        ("bound=0.1,start=0.5", {}, "start=0.5 must be at least 1"),
        ("bound=0.1,start=4", {}, "source.start=4.0 with source.within=0: larger bounds need steps"),
        ("bound=0.1,start=four", {}, "start='four' must be a number"),
        ("bound=0.1,within=-1", {}, "within=-1 must be at least 0"),
        ("bound=0.1,start=2,within=21", {}, "source.within=21 is more than steps=20"),
        ("bound=()", {}, "source.forward=. . must read like"),
        ("divided=false,bound=0.1", {}, "divided=false with bounds"),
        ("bound=0.1,bits=1", {}, "bits=1 must be at least 2 and at most 12"),
        ("bits=6", {}, "source.bits=6 has no effect without bounds"),
        ("bound=0.1", {"source.outliers": 0}, "outliers=0"),
        ("bound=0.1", {"source.decay": "cosine"}, "decay='cosine' is unknown; use one of stepwise, linear, exponential"),
        ("bound=0.1", {"source.start": float("nan")}, "start=nan must be finite"),
        ("divided", {"source.colour": 1}, "has no option 'colour'"),
        ("divided,method=decentralized", {}, "divided tables with method 'decentralized': .* use method 'allreduce'"),
        ("divided,method=diloco", {}, "divided tables with method 'diloco'"),
        ("divided,method=allreduce,stale", {}, "divided tables with stale"),
        ("divided,optimizer=muon", {}, "optimizer 'muon' with divided tables"),
        ("divided", {"pipeline.microbatches": 2}, "pipeline.microbatches=2 with divided tables"),
        ("divided", {"consensus_every": 2}, "consensus_every=2 has no effect with method 'allreduce'"),
        (
            "divided",
            {"task": "quadratics", "data": {}, "model": None, "eval": {"num_windows": 0, "batch_size": 1}},
            "task, a Quadratics, must be a TaskWithTables",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(shorthand, fields, message):
    with pytest.raises((config.ConfigError, ValueError), match=message) as error:
        made = clicks.get_config(f"smoke,workers={N},{shorthand}").to_dict()
        made["data"]["tables"] = SIZES
        for name, value in fields.items():
            *section, field = name.split(".")
            (made[section[0]] if section else made)[field] = value
        if made["model"] is None:
            del made["model"]
        config.resolve(made, N)
    assert "\n" not in str(error.value)


def test_reducers_see_no_tables():
    """Compressed means apply to everything else."""
    plain, coded = (path(f"divided,simulate,reducer={reducer}") for reducer in ("mean", "powersgd(rank=4)"))
    assert not np.array_equal(plain[2][-1], coded[2][-1])
    np.testing.assert_allclose(coded[2].mean(axis=1), plain[2].mean(axis=1), rtol=0.05)


def test_an_elastic_run_is_refused():
    spec = config.resolve(config_of())
    with pytest.raises(config.ConfigError, match="divided tables with --elastic"):
        elastic.Trainers(spec, elastic.Group())
