"""Every registered task keeps the contract of `decjax.tasks.Task`, with every model that it names; and properties of each task."""

import functools
import importlib
import inspect
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decjax
from decjax import registry, tasks
from decjax.contrib.images import task as images
from decjax.contrib.quadratics import Quadratics
from decjax.tasks import lm

pytestmark = pytest.mark.usefixtures("quick_compilation")

B = 4
# Small variants of each: (task with its options, model with its options).
TINY = {
    "decoder": dict(context=8, width=8, hidden=8, heads=1, depth=1),
    "gpt2": dict(vocabulary=300, context=8, width=8, hidden=8, heads=1, depth=1),
    "llama": dict(vocabulary=300, context=8, width=8, hidden=8, heads=2, kv_heads=1, depth=1),
    "resnet": dict(width=2),
    "mlp": dict(hidden=4),
    "dlrm": dict(width=4, hidden=8),
    "translator": dict(vocabulary=260, width=4, hidden=4, heads=1, encoder=1, decoder=1, dropout=0.0),
    "quadratics": dict(dimension=5),
    "clicks": dict(tables="9,2,1", validation=40),
    "translation": dict(length=6, smoothing=0.0, test="val"),
    "lm": dict(sample_bytes=3),
    "gcn": dict(hidden=3),
    "nodes": dict(graph="blocks(communities=2,nodes=30,inside=0.3,features=3)", targets=3),
}
LARGER = {"nodes"}  # tasks whose validation examples are larger than those for training: the whole graph, and parts of it
MODELS = [(name, model) for name in registry.names("task") for model in registry.partners("task", name, "model") or (None,)]


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    """Texts, and pairs of sentences that are all longer than half of the longest."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, language in itertools.product(("train", "val"), ("de", "en")):
        words = np.random.default_rng(len(split + language)).choice(["dies", "und", "das", "nicht", "hier"], (80, 7))
        (folder / f"{split}.{language}").write_text("\n".join(map(" ".join, words)))
    TINY["translation"]["path"], TINY["lm"]["path"] = str(folder), inspect.getsourcefile(registry)


@functools.cache
def build(name, chosen=None):
    model = chosen and registry.make("model", chosen, **TINY.get(chosen, {}))
    return registry.make("task", name, model=model, **TINY.get(name, {}))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    return True


def like(tree):
    return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)


def fits(batch, told, smaller):
    """Whether a batch has the declared shapes and dtypes or, with `smaller`, as many examples of at most these sizes."""

    def at_most(x, y):
        return x.dtype == y.dtype and len(x.shape) == len(y.shape) and all(np.array(x.shape) <= y.shape) and len(x) == y.shape[0]

    return all(jax.tree.leaves(jax.tree.map(at_most, batch, told))) if smaller else like(batch) == like(told)


@pytest.mark.parametrize("name, model", MODELS)
def test_contract(name, model):
    task = build(name, model)
    data, again, other = (task.load(4, B, seed) for seed in (3, 3, 4))
    assert data.fingerprint == again.fingerprint

    # Batches are functions of (seed, worker, step), with the declared shapes.
    asked = [(worker, step) for step in (0, 1, 50) for worker in range(4)]
    batches = {key: data.batch(*key) for key in asked}
    assert all(equal(again.batch(*key), batches[key]) for key in asked[::-1])
    assert len({str(like(batch)) for batch in batches.values()}) == 1
    assert all(fits(batch, task.examples(B), name in LARGER) for batch in batches.values())
    flat = lambda batch: np.concatenate([np.ravel(x) for x in jax.tree.leaves(batch)])
    several = [flat(batches[key]) for key in asked] + [flat(other.batch(0, 0))]
    assert len({x.tobytes() for x in several}) == len(several)
    few = data.validation(3)
    assert like(few) == like(task.examples(min(3, len(jax.tree.leaves(data.validation(0))[0]))))

    # The loss is finite and differentiable; every parameter has an effect once none of them is zero.
    params, variables = jax.jit(task.init)(jax.random.key(0)), task.variables()
    params = jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(0).normal(size=x.shape).astype(x.dtype), params)
    gradient = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    (loss, seen), grads = gradient(params, variables, batches[0, 0], jax.random.key(1))
    assert loss.shape == () and loss.dtype == jnp.float32 and np.isfinite(loss)
    assert like(seen) == like(variables) and like(grads) == like(params)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in jax.tree.leaves(grads))

    # Results of single examples: sums by metric, the loss first, and weights; an example gives the same values in any batch.
    sums, weight_B = jax.jit(task.measure)(params, variables, batches[0, 0])
    assert next(iter(task.metrics)) == "loss" and sums.keys() == task.metrics.keys()
    assert weight_B.shape == (B,) and all(sum_B.shape == (B,) and np.isfinite(sum_B).all() for sum_B in sums.values())
    half, half_weight = task.measure(params, variables, jax.tree.map(lambda x: x[:2], batches[0, 0]))
    np.testing.assert_array_equal(half_weight, weight_B[:2])
    for metric in sums:
        np.testing.assert_allclose(half[metric], sums[metric][:2], rtol=1e-4, atol=1e-5)
    if not jax.tree.leaves(variables):  # with batch statistics, the training loss is another one
        np.testing.assert_allclose(sums["loss"].sum() / weight_B.sum(), loss, rtol=1e-5)

    assert isinstance(task.show(params, variables, data, jax.random.key(0)), str)
    assert all(np.isfinite(value) for value in data.facts().values())


def test_every_model_is_of_a_task():
    for model in registry.names("model"):
        found = registry.partners("model", model, "task")
        assert found and all(model in registry.partners("task", task, "model") for task in found)


@pytest.mark.parametrize(
    "task, model, options, message",
    [
        ("lm", "decoder", dict(partition="striped"), "'striped' is unknown; use one of iid, contiguous, dirichlet"),
        ("lm", "decoder", dict(sample_bytes=1000000007), "sample_bytes=1000000007 must be at least 0 and at most 100000"),
        ("lm", "decoder(vocabulary=200)", {}, "vocabulary=200 must be at least 256"),
        ("images", "mlp", dict(dataset="cifar"), "dataset='cifar' is unknown; use one of digits, cifar10"),
        ("images", "mlp", dict(smoothing=1.0), "smoothing=1.0 must be at least 0 and less than 1"),
        ("images", "mlp", dict(validation=1.0), "validation=1.0 must be more than 0 and less than 1"),
        ("images", "mlp", dict(partition="dirichlet(alpha=0)"), "alpha=0 must be more than 0"),
        ("clicks", "dlrm", dict(tables="9,x"), "tables='9,x' must read like '1000,50'"),
        ("clicks", "dlrm", dict(tables="9,0"), "the fewest categories of a feature=0 must be at least 1"),
        ("clicks", "dlrm", dict(skew=float("nan")), "skew=nan must"),
        ("clicks", "dlrm", dict(validation=0), "validation=0 must be at least 1 and"),
        ("quadratics", None, dict(dimension=0), "dimension=0 must be at least 1 and at most 1000000"),
        ("quadratics", None, dict(condition=0.5), "condition=0.5 must be at least 1 and at most 1000000"),
        ("quadratics", None, dict(noise=float("nan")), "noise=nan must"),
    ],
)
def test_impossible_tasks_are_refused(task, model, options, message):
    with pytest.raises(ValueError, match=message) as error:
        registry.make("task", task, model=model and registry.make("model", model), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "chosen, message",
    [
        ("resnet(depth=18)", "depth=18 is not 6n \\+ 2, .*; use 14"),
        ("resnet(depth=6)", "depth=6 must be at least 8"),
        ("resnet(norm=layer)", "norm='layer' is unknown; use one of batch, group"),
        ("resnet(norm=group,width=12)", "norm='group': width=12 must be a multiple of 8"),
        ("dlrm(width=0)", "width=0 must be at least 1"),
        ("dlrm(depth=-1)", "depth=-1 must be at least 0"),
        ("mlp(hidden=0)", "hidden=0 must be at least 1"),
    ],
)
def test_impossible_models_are_refused(chosen, message):
    with pytest.raises(ValueError, match=message):
        registry.make("model", chosen)


# -- Images -----------------------------------------------------------------------------------------------------------


def test_digits_are_standardized_and_held_out():
    task = build("images", "mlp")
    data, others = task.load(2, 700, 0), task.load(8, 16, 5)
    valid = data.validation(0)
    assert len(valid.labels_B) == 359 and equal(valid, others.validation(0))
    assert len(data.validation(10).labels_B) == 10
    one_epoch = [data.batch(worker, 0) for worker in range(2)]  # two short of 1438
    seen = {x.tobytes() for batch in one_epoch for x in batch.images_BxHxWxC}
    assert len(seen) > 1390 and not seen & {x.tobytes() for x in valid.images_BxHxWxC}
    images_BxHxWxC = np.concatenate([batch.images_BxHxWxC for batch in one_epoch])
    assert abs(images_BxHxWxC.mean()) < 1e-2 and abs(images_BxHxWxC.std() - 1) < 1e-2


def record(label, seed):
    return bytes([label]) + np.random.default_rng(seed).integers(0, 256, 3072, np.uint8).tobytes()


def test_cifar_is_read_from_its_binary_files(tmp_path):
    """Planes of red, green and blue become pixels; the test set is used for validation, unless a share of the others is requested."""
    for name, seeds in {"data_batch_2": (2, 3), "data_batch_1": (0, 1), "test_batch": (4, 5, 6)}.items():
        (tmp_path / f"{name}.bin").write_bytes(b"".join(record(seed, seed) for seed in seeds))
    read = images.DATASETS["cifar10"].read(str(tmp_path))
    assert read.labels_E.tolist() == list(range(7)) and read.tested == 3
    for seed in range(7):
        planes = np.frombuffer(record(seed, seed)[1:], np.uint8).reshape(3, 32, 32)
        np.testing.assert_array_equal(read.images_ExHxWxC[seed].transpose(2, 0, 1), planes)
    load = lambda **options: registry.make(
        "task", "images", model=registry.make("model", "mlp"), dataset="cifar10", path=str(tmp_path), **options
    ).load(1, 4, 0)
    assert load().validation(0).labels_B.tolist() == [4, 5, 6] and sorted(load().batch(0, 0).labels_B) == [0, 1, 2, 3]
    assert set(load(validation=0.25).validation(0).labels_B) < {0, 1, 2, 3}
    assert load(validation=0.25).fingerprint == "3+1 images, " + load().fingerprint.split(", ")[1]


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "holds no data_batch_\\*.bin and test_batch.bin"),
        ({"data_batch_1.bin": record(0, 0)}, "holds no data_batch_\\*.bin and test_batch.bin"),
        ({"data_batch_1.bin": record(0, 0)[:-1], "test_batch.bin": record(0, 0)}, "has 3072 bytes, which are not records of 3073"),
        ({"data_batch_1.bin": record(0, 0), "test_batch.bin": record(10, 0)}, "has the label 10, and CIFAR-10's are 0 to 9"),
    ],
)
def test_files_that_are_not_cifar_are_told(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        images.DATASETS["cifar10"].read(str(tmp_path))


def test_images_that_are_all_of_one_color_are_told(tmp_path):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / f"{name}.bin").write_bytes(b"".join(bytes([label, *[7] * 3072]) for label in range(4)))
    task = registry.make("task", "images", model=registry.make("model", "mlp"), dataset="cifar10", path=str(tmp_path))
    with pytest.raises(ValueError, match="has training images with a channel of one value only; give images that differ"):
        task.load(1, 1, 0)


def test_embedded_digits_have_no_path():
    task = registry.make("task", "images", model=registry.make("model", "mlp"), path="folder")
    with pytest.raises(ValueError, match="data path 'folder' is not read with dataset='digits'"):
        task.load(1, 1, 0)


def test_smoothed_labels_are_those_of_optax():
    task = registry.make("task", "images", model=registry.make("model", "mlp"), smoothing=0.1)
    batch, params = task.load(1, B, 0).batch(0, 0), jax.jit(task.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x + np.random.default_rng(0).normal(size=x.shape).astype(x.dtype), params)
    logits_BxK, _ = registry.make("model", "mlp")((8, 8, 1), 10).apply(params, (), batch.images_BxHxWxC, True)
    expected = optax.softmax_cross_entropy(logits_BxK, optax.smooth_labels(jax.nn.one_hot(batch.labels_B, 10), 0.1)).mean()
    np.testing.assert_allclose(task.loss(params, (), batch, None)[0], expected, rtol=1e-5)


def test_augmented_images_are_shifted_or_mirrored_ones():
    x_BxHxWxC = np.arange(1, 64 * 8 * 8 + 1).reshape(64, 8, 8, 1)
    change = images._augmented(0, mirrored=True)
    out = change(x_BxHxWxC, 1, 2)
    assert out.shape == x_BxHxWxC.shape and equal(out, change(x_BxHxWxC, 1, 2))
    seen = set()
    for before, after in zip(x_BxHxWxC[..., 0], out[..., 0], strict=True):
        found = []
        for mirror in (False, True):
            padded = np.pad(before, 1)
            for i in range(3):
                for j in range(3):
                    cut = padded[i : i + 8, j : j + 8]
                    found += [(mirror, i, j)] * np.array_equal(cut[:, ::-1] if mirror else cut, after)
        assert len(found) == 1
        seen |= set(found)
    assert len(seen) > 12, "not all 18 forms appear"
    moved = registry.make("task", "images", model=registry.make("model", "mlp"), augment=True).load(2, B, 0)
    plain = build("images", "mlp").load(2, B, 0)
    np.testing.assert_array_equal(moved.batch(0, 0).labels_B, plain.batch(0, 0).labels_B)
    assert not np.array_equal(moved.batch(0, 0).images_BxHxWxC, plain.batch(0, 0).images_BxHxWxC)
    assert equal(moved.validation(0), plain.validation(0))


def dense_resnet(params, variables, x_BxHxWxC, train):
    """Return (logits, next variables) of the network of depth 8 with batch norm, one pixel at a time, in float64."""

    def conv(x, kernel, stride):
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        kernel = kernel.reshape(3, 3, x.shape[-1], -1)
        out = [[np.einsum("bijc,ijcf->bf", padded[:, r : r + 3, c : c + 3], kernel) for c in range(0, x.shape[2], stride)]
               for r in range(0, x.shape[1], stride)]  # fmt: skip
        return np.moveaxis(np.array(out), 2, 0)

    def norm(x, p, v):
        own = old = v["norm"]
        if train:  # the variance is the mean of squares: no n ÷ (n − 1)
            own = dict(mean=x.mean(axis=(0, 1, 2)), var=x.var(axis=(0, 1, 2)))
            v["norm"] = {key: 0.9 * old[key] + 0.1 * own[key] for key in old}
        return (x - own["mean"]) / np.sqrt(own["var"] + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"]

    relu = lambda x: np.maximum(x, 0)
    params, variables = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, variables))
    x = relu(norm(conv(x_BxHxWxC.astype(np.float64), params["stem"]["kernel"], 1), params["stem_norm"], variables["stem_norm"]))
    for i, stride in enumerate((1, 2, 2)):
        p, v = params["blocks"][i], variables["blocks"][i]
        y = relu(norm(conv(x, p["first"]["kernel"], stride), p["first_norm"], v["first_norm"]))
        y = norm(conv(y, p["second"]["kernel"], 1), p["second_norm"], v["second_norm"])
        shortcut = x[:, ::stride, ::stride]
        x = relu(y + np.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, y.shape[-1] - x.shape[-1]))))
    return x.mean(axis=(1, 2)) @ params["head"]["kernel"] + params["head"]["bias"], variables


@pytest.mark.parametrize("train", [True, False])
def test_resnet_is_the_dense_one(train):
    """Return its logits, and the statistics of all seven norms after the batch; the latter are unchanged without training."""
    rng = np.random.default_rng(0)
    built = registry.make("model", "resnet", width=2)((8, 8, 3), 5)
    params, variables = jax.jit(built.init)(jax.random.key(0))
    params, variables = jax.tree.map(lambda x: x + rng.uniform(0.1, 0.5, x.shape).astype(x.dtype), (params, variables))
    x_BxHxWxC = rng.normal(size=(B, 8, 8, 3)).astype(np.float32)
    logits_BxK, after = jax.jit(built.apply, static_argnums=3)(params, variables, x_BxHxWxC, train)
    dense_BxK, dense_after = dense_resnet(params, variables, x_BxHxWxC, train)
    np.testing.assert_allclose(logits_BxK, dense_BxK, rtol=2e-3, atol=2e-3)
    assert len(jax.tree.leaves(after)) == 2 * 7
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), after, dense_after)
    assert train or equal(after, variables)


@pytest.mark.parametrize("stride, size", [(1, (8, 8)), (2, (8, 8)), (2, (7, 5))])
def test_both_forms_of_a_convolution_are_equal(stride, size):
    """CPUs use matrix products, other devices the convolution operation."""
    rng = np.random.default_rng(0)
    made = importlib.import_module("decjax.contrib.images.resnet").Convolution(3, 4, stride, nnx.Rngs(0))
    x_BxHxWxC, kernel_9CxF = (rng.normal(size=shape).astype(np.float32) for shape in ((2, *size, 3), (27, 4)))
    np.testing.assert_allclose(made._by_products(x_BxHxWxC, kernel_9CxF), made._by_operation(x_BxHxWxC, kernel_9CxF), atol=1e-5)


def test_group_norm_has_no_variables():
    built = registry.make("model", "resnet", norm="group", width=4)((8, 8, 1), 10)
    assert jax.eval_shape(built.init, jax.random.key(0))[1] == ()


def test_batch_statistics_stay_local_and_are_averaged():
    """Workers see their own batches only: their statistics are those of their own images."""
    task, num_workers = build("images", "resnet"), 8
    data = task.load(num_workers, B, 0)
    workers = decjax.make_workers(num_workers)
    stack = lambda tree: jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], num_workers, axis=0), tree)
    params, variables = stack(jax.jit(task.init)(jax.random.key(0))), stack(task.variables())
    batches = [data.batch(worker, 0) for worker in range(num_workers)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    step = workers.jit(lambda p, v, b: task.loss(p, v, b, jax.random.key(0)), (0, 0, 0))
    _, after = step(params, variables, stacked)
    mean_NxC = np.asarray(after["stem_norm"]["norm"]["mean"])
    one = jax.jit(task.loss)
    for worker, batch in enumerate(batches):
        _, alone = one(*jax.tree.map(lambda x: x[worker], (params, variables)), batch, jax.random.key(0))
        jax.tree.map(lambda x_N, y: np.testing.assert_allclose(x_N[worker], y, rtol=1e-4, atol=1e-5), after, alone)
    assert len({row.tobytes() for row in mean_NxC}) == num_workers
    # All images together have the average of the workers' means in the stem, whose input is not normalized.
    together = jax.tree.map(lambda x: np.concatenate(list(x)), stacked)
    _, joint = one(*jax.tree.map(lambda x: x[0], (params, variables)), together, jax.random.key(0))
    np.testing.assert_allclose(mean_NxC.mean(axis=0), joint["stem_norm"]["norm"]["mean"], rtol=1e-4, atol=1e-5)


# -- Quadratics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_quadratics_are_what_their_options_say(num_workers):
    zeta, sigma, kappa, P = 2.0, 3.0, 7.0, 6
    task = Quadratics(dimension=P, heterogeneity=zeta, noise=sigma, condition=kappa)
    data = task.load(num_workers, 20_000, 0)
    (h_P,), (optimum_P,) = data.validation(0)
    assert h_P.max() / h_P.min() == pytest.approx(kappa)
    batches = [data.batch(worker, 0) for worker in range(num_workers)]
    at = lambda x_P: np.array([(b.curvature_BxP * (x_P - b.target_BxP)) for b in batches])  # gradients_NxBxP
    own_NxP = at(optimum_P).mean(axis=1)
    expected = 0.0 if num_workers == 1 else zeta
    assert np.sqrt((own_NxP**2).sum(axis=1).mean()) == pytest.approx(expected, abs=0.1)
    assert np.abs(own_NxP.mean(axis=0)).max() < 0.1, "the optimum is not where the mean of the gradients is zero"
    noise = at(optimum_P) - own_NxP[:, None]
    assert np.sqrt((noise**2).sum(axis=-1).mean()) == pytest.approx(sigma, rel=0.02)
    # f is the mean of the workers' functions, up to a constant; the task's gradient is the one above.
    x_P = np.random.default_rng(1).normal(size=P).astype(np.float32)
    np.testing.assert_allclose(at(x_P).mean(axis=(0, 1)), h_P * (x_P - optimum_P), atol=0.15)
    grads = jax.grad(lambda params: task.loss(params, (), batches[0], None)[0])({"x": jnp.asarray(x_P)})
    np.testing.assert_allclose(grads["x"], at(x_P)[0].mean(axis=0), rtol=1e-3, atol=1e-3)
    sums, _ = task.measure({"x": x_P}, (), data.validation(0))
    np.testing.assert_allclose(sums["loss"], 0.5 * (h_P * (x_P - optimum_P) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["distance"], ((x_P - optimum_P) ** 2).sum(), rtol=1e-5)


def test_quadratics_keep_their_optimum_when_workers_join():
    two, five = (build("quadratics").load(n, B, 0) for n in (2, 5))
    assert equal(two.validation(0), five.validation(0)) and two.fingerprint == five.fingerprint
    assert not np.array_equal(two.batch(0, 0).target_BxP, five.batch(0, 0).target_BxP)
    assert build("quadratics").load(2, B, 1).fingerprint != two.fingerprint


def test_a_sample_continues_the_text():
    task = build("lm", "decoder")
    data = task.load(2, B, 0)
    text = task.show(jax.jit(task.init)(jax.random.key(0)), (), data, jax.random.key(0))
    prompt = bytes(data.validation(1)[0, : lm.PROMPT].astype(np.uint8)).decode()
    assert text.startswith(prompt) and len(prompt) < len(text) <= len(prompt) + 3  # bytes, several of which may form one letter
    silent = registry.make("task", "lm", model=registry.make("model", "decoder"), sample_bytes=0)
    assert not silent.show((), (), data, jax.random.key(0))


def test_spaced():
    assert tasks.task.spaced(10, 0).tolist() == list(range(10))
    assert tasks.task.spaced(10, 3).tolist() == [0, 3, 6] and tasks.task.spaced(2, 5).tolist() == [0, 1]
