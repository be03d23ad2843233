"""Partitions: every example has one owner, sizes are equal, and α controls how different the workers are."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from decjax.tasks import partition

LABELS = np.random.default_rng(0).integers(0, 10, 1437)
ALL = ("iid", "contiguous", "dirichlet", "dirichlet(alpha=1e-9)", "dirichlet(alpha=1000000000)")


def split(chosen, labels, num_workers, seed):
    """Return the examples of each worker; for an iid partition those of its first epoch, taken as one batch."""
    name, alpha = partition.parse(chosen)
    if name != "iid":
        return partition.split(alpha, labels, num_workers, seed)
    sizes = [len(range(worker, len(labels), num_workers)) for worker in range(num_workers)]
    epochs = {size: partition.deal(chosen, labels, num_workers, size, seed) for size in set(sizes)}
    return [epochs[size](worker, 0) for worker, size in enumerate(sizes)]


def table(labels, parts):
    """Return the number of examples of each class on each worker, counts_NxK."""
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


@pytest.mark.parametrize("chosen", ALL)
@pytest.mark.parametrize("num_workers", [1, 2, 7, 64])
def test_parts_are_equal_disjoint_and_functions_of_seed_and_n(chosen, num_workers):
    parts = split(chosen, LABELS, num_workers, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    sizes = [len(part) for part in parts]
    assert len(sizes) == num_workers and max(sizes) - min(sizes) <= 1
    again, other = (split(chosen, LABELS, num_workers, seed) for seed in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if num_workers > 1 and chosen != "contiguous":
        assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    counts_NxK = table(LABELS, parts)
    np.testing.assert_array_equal(counts_NxK.sum(axis=0), np.bincount(LABELS))
    np.testing.assert_array_equal(counts_NxK.sum(axis=1), sizes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=60),
    st.integers(1, 8),
    st.floats(1e-300, 1e300) | st.floats(0.01, 100),
    st.integers(0, 2**32 - 1),
)
def test_any_dirichlet_gives_every_example_once(labels, num_workers, alpha, seed):
    labels = np.array(labels)
    if len(labels) < num_workers or len(set(labels.tolist())) < 2:
        return
    parts = split(f"dirichlet(alpha={alpha})", labels, num_workers, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alpha_goes_from_one_class_each_to_all_alike():
    def unlike(alpha):
        """Return the mean total variation between a worker's class distribution and the global one, over ten seeds."""
        distances = []
        for seed in range(10):
            shares_NxK = table(LABELS, split(f"dirichlet(alpha={alpha})", LABELS, 10, seed)) / 143.7
            distances.append(0.5 * np.abs(shares_NxK - shares_NxK.mean(axis=0)).sum(axis=1).mean())
        return np.mean(distances)

    found = [unlike(alpha) for alpha in (1e-4, 0.1, 1, 10, 1e6)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.6 and found[-1] < 0.05  # 0.9 is one class each


@pytest.mark.parametrize("chosen", ALL)
def test_batches_hold_own_examples_and_an_epoch_holds_each_once(chosen):
    parts, indices = (make(chosen, LABELS[:60], 3, seed=1) for make in (split, deal))
    for worker, part in enumerate(parts):
        epoch = np.concatenate([indices(worker, step) for step in range(5)])
        assert sorted(epoch.tolist()) == sorted(part.tolist())
        following = np.concatenate([indices(worker, step) for step in range(5, 10)])
        assert following.tolist() != epoch.tolist()


def deal(chosen, labels, num_workers, seed):
    return partition.deal(chosen, labels, num_workers, batch_size=4, seed=seed)


@pytest.mark.parametrize(
    "chosen, message",
    [
        ("striped", "'striped' is unknown; use one of iid, contiguous, dirichlet"),
        ("dirichlet(alpha=0)", "alpha=0 must be more than 0"),
        ("dirichlet(alpha=-1)", "alpha=-1 must be more than 0"),
        ("dirichlet(alpha=1e999)", "alpha=inf must be finite"),
        ("dirichlet(alpha=True)", "alpha=True must be a number"),
        ("dirichlet(alpha=much)", "alpha='much' must be a number"),
        ("dirichlet(beta=1)", "no option 'beta'; use alpha"),
        ("iid(seed=1)", "has no option 'seed'; leave it out, it has no options"),
        ("dirichlet(alpha=0.1", "must read like"),
        ("", "must read like"),
    ],
)
def test_refused_partitions(chosen, message):
    for use in (partition.parse, lambda chosen: deal(chosen, LABELS, 2, 0)):
        with pytest.raises(ValueError, match=message) as error:
            use(chosen)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("chosen", ALL)
def test_every_worker_needs_an_example(chosen):
    with pytest.raises(ValueError, match="3 training examples for 4 workers; use more data or fewer workers"):
        deal(chosen, LABELS[:3], 4, seed=0)


def test_one_class_cannot_be_divided():
    with pytest.raises(ValueError, match="all data is of one; use iid or contiguous"):
        deal("dirichlet", np.zeros(20, int), 2, 0)
