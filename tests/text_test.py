"""Texts and their batches: what is read, how it is split, and that a batch depends on (seed, worker, step) only."""

import collections
import math
import os
import sysconfig
import zlib

import grain
from hypothesis import example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from decjax.tasks import sources
from decjax.tasks import text as data

# Every window starts with a different value, so that a batch identifies its windows.
CONTEXT = 4
WINDOWS = 29
TEXT = np.arange(WINDOWS * CONTEXT + 1, dtype=np.uint8)
PARTITIONS = ("iid", "contiguous")


def corpus_of(text, starts=(0,)):
    return data.Corpus(text, text[:0], np.array(starts))


def text_of(corpus):
    return corpus.train.tobytes(), corpus.valid.tobytes()


# -- Corpora ----------------------------------------------------------------------------------------------------------


def test_embedded_corpus_is_the_same_every_time():
    first, second = data.load_corpus(), data.load_corpus()
    assert text_of(first) == text_of(second)
    assert first.train.dtype == first.valid.dtype == np.uint8
    assert len(first.train) > 1_000_000 and 0 < len(first.valid) < len(first.train) / 20
    assert b"\0" not in first.train.tobytes()
    # Whole files: a module of the standard library is entirely in one of the two.
    for name in ("json/decoder.py", "heapq.py", "argparse.py", "textwrap.py"):
        with open(f"{sysconfig.get_path('stdlib')}/{name}", "rb") as file:
            text = file.read()
        assert [text in part for part in text_of(first)] in ([True, False], [False, True])


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def test_folder_is_split_by_file(tmp_path):
    files = {f"part{i % 7}/{i:03}.txt": f"<file {i:03}>".encode() for i in range(300)}
    write(tmp_path, files)
    corpus = data.load_corpus(str(tmp_path))
    in_train, in_valid = ({name for name, text in files.items() if text in part} for part in text_of(corpus))
    assert in_train | in_valid == set(files) and not in_train & in_valid
    assert in_valid == {name for name in files if zlib.crc32(name.encode()) / 2**32 < data.VALIDATION_SHARE} != set()
    assert len(corpus.train) + len(corpus.valid) == sum(map(len, files.values()))
    assert corpus.train.tobytes() == b"".join(files[name] for name in sorted(in_train))  # sorted by name


def test_split_does_not_depend_on_where_the_folder_is_or_on_other_files(tmp_path):
    files = {f"{i:03}.txt": f"<file {i:03}>".encode() for i in range(300)}
    write(tmp_path / "a", files)
    write(tmp_path / ".cache" / "b", dict(list(files.items())[:200]))
    _, valid = text_of(data.load_corpus(str(tmp_path / "a")))
    _, valid_of_fewer = text_of(data.load_corpus(str(tmp_path / ".cache" / "b")))
    assert valid_of_fewer and valid.startswith(valid_of_fewer)


def test_hidden_and_binary_files_are_passed_over(tmp_path):
    write(
        tmp_path,
        {
            "a.txt": b"A" * 200,
            "sub/b.txt": b"B" * 200,
            ".hidden": b"h",
            ".git/config": b"g",
            "sub/.x/y.txt": b"x",
            "image.png": b"\x89PNG\0data",
            "empty.txt": b"",
        },
    )
    assert set(b"".join(text_of(data.load_corpus(str(tmp_path))))) == set(b"AB")


def test_single_file_gives_its_tail_to_validation(tmp_path):
    path = tmp_path / "text"
    text = np.random.default_rng(0).integers(1, 256, 2560, np.uint8).tobytes()
    path.write_bytes(text)
    train, valid = text_of(data.load_corpus(str(path)))
    assert train + valid == text
    assert len(valid) == pytest.approx(len(text) * data.VALIDATION_SHARE, abs=1.01)
    write(tmp_path / "folder", {"text": text, "image.png": b"\0"})
    assert text_of(data.load_corpus(str(tmp_path / "folder"))) == (train, valid)


def test_folder_without_validation_file_gives_its_tail(tmp_path):
    files = {name: name.encode() * 100 for name in ("a", "b", "c")}
    assert all(zlib.crc32(name.encode()) / 2**32 >= data.VALIDATION_SHARE for name in files)
    write(tmp_path, files)
    train, valid = text_of(data.load_corpus(str(tmp_path)))
    assert train + valid == b"".join(files.values()) and set(valid) == set(b"c")


def test_validation_takes_more_of_a_short_text(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 100)
    assert [len(part) for part in text_of(data.load_corpus(str(tmp_path / "text"), min_bytes=33))] == [67, 33]
    with pytest.raises(ValueError, match="100 bytes.* at least 51 each; use more text or a shorter context"):
        data.load_corpus(str(tmp_path / "text"), min_bytes=51)


@pytest.mark.parametrize(
    "files, path",
    [
        ({}, "absent"),
        ({"empty": b""}, "empty"),
        ({"empty": b""}, "."),
        ({"binary": b"a\0b"}, "binary"),
        ({}, "."),
        ({".hidden": b"text"}, "."),
        ({}, "~no_such_user/text"),
        ({}, "a" * 5000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_unusable_paths_are_named(tmp_path, files, path):
    write(tmp_path, files)
    given_path = path if path.startswith("~") else str(tmp_path / path)
    with pytest.raises(ValueError, match="data path") as error:
        data.load_corpus(given_path)
    assert given_path in str(error.value) and "\n" not in str(error.value)
    assert "give a" in str(error.value) or "cannot be read" in str(error.value)


@pytest.mark.parametrize("path", ["~", "~/", "/", "{home}/sub/..", "{link}"])
def test_home_and_root_are_no_corpus(tmp_path, monkeypatch, path):
    home, link = tmp_path / "home", tmp_path / "link"
    write(home, {"secret.txt": b"text", "sub/text.txt": b"more text"})
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ValueError, match=r"^data path '.*' is a whole home or root folder; give a folder .*$"):
        data.load_corpus(path.format(home=home, link=link))
    assert text_of(data.load_corpus("~/sub")) == (b"more tex", b"t")
    assert text_of(data.load_corpus("~/secret.txt")) == (b"tex", b"t")


def test_a_corpus_that_does_not_fit_is_refused_unread(tmp_path):
    with open(tmp_path / "holes.txt", "wb") as file:
        file.truncate(sources.MAX_BYTES + 2**30)  # takes no disk space
    with pytest.raises(ValueError, match=r"holds 5\.0 GiB, and at most 4 GiB fit; give a smaller"):
        data.load_corpus(str(tmp_path))


def test_file_names_may_be_any_bytes(tmp_path):
    for name in (b"caf\xe9.txt", b"line\nbreak.txt", "π.txt".encode()):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"text" * 50)
    assert len(b"".join(text_of(data.load_corpus(str(tmp_path))))) == 600


def test_where_files_begin(tmp_path):
    files = {f"{i:03}.txt": b"x" * (100 + i) for i in range(300)}
    write(tmp_path, files)
    corpus = data.load_corpus(str(tmp_path))
    kept = [len(text) for name, text in files.items() if zlib.crc32(name.encode()) / 2**32 >= data.VALIDATION_SHARE]
    np.testing.assert_array_equal(corpus.starts, np.cumsum([0, *kept[:-1]]))
    tail = data.load_corpus(str(tmp_path), min_bytes=4000)  # files used entirely for validation are not among them
    assert tail.starts.max() < len(tail.train) and len(tail.train) + len(tail.valid) == sum(map(len, files.values()))


@pytest.mark.parametrize("length", [0, 1, CONTEXT])
def test_too_short_text_names_its_length_and_the_need(length):
    short = TEXT[:length]
    for use in (
        lambda: data.validation_windows(short, context=CONTEXT),
        lambda: data.batches(corpus_of(short), context=CONTEXT, batch_size=1, num_workers=1, seed=0),
    ):
        with pytest.raises(ValueError, match=rf"{length} bytes.* {CONTEXT + 1}; use more text or a shorter context"):
            use()
    assert data.num_windows(TEXT[: CONTEXT + 1], CONTEXT) == 1


# -- Entropy ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=2, max_size=80))
@example(b"\xff\xff\x00\xff")
def test_order1_entropy_is_the_bigram_cross_entropy_of_the_text_itself(text):
    pairs, firsts = collections.Counter(zip(text, text[1:])), collections.Counter(text[:-1])
    loss = -sum(math.log(pairs[a, b] / firsts[a]) for a, b in zip(text, text[1:])) / (len(text) - 1)
    assert data.order1_entropy(np.frombuffer(text, np.uint8)) == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize(
    "text, entropy",
    [
        (b"aaaa", 0.0),
        (b"abababab", 0.0),
        (b"aabba", math.log(2)),  # pairs aa, ab, bb, ba: the next byte is a fair coin
        (bytes([0, 0, 1, 1, 2, 2, 0, 2, 1, 0]), math.log(3)),  # a de Bruijn cycle: each of nine pairs once
    ],
    ids=["constant", "alternating", "coin", "three"],
)
def test_order1_entropy_of_known_texts(text, entropy):
    assert data.order1_entropy(np.frombuffer(text, np.uint8)) == pytest.approx(entropy, abs=1e-12)


# -- Batches ----------------------------------------------------------------------------------------------------------


def make(num_workers=3, batch_size=2, seed=0, partition="iid"):
    return data.batches(
        corpus_of(TEXT), context=CONTEXT, batch_size=batch_size, num_workers=num_workers, seed=seed, partition=partition
    )


def window_ids(tokens_BxT1):
    """Return the windows of a batch; check that they are windows."""
    for tokens in tokens_BxT1:
        np.testing.assert_array_equal(tokens, TEXT[tokens[0] : tokens[0] + CONTEXT + 1])
    return (tokens_BxT1[:, 0] // CONTEXT).tolist()


def stream(batch, worker, count):
    """Return the first `count` windows of a worker."""
    ids, step = [], 0
    while len(ids) < count:
        ids += window_ids(batch(worker, step))
        step += 1
    return ids[:count]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_batch_is_a_function_of_worker_and_step(partition):
    batch, again = make(partition=partition), make(partition=partition)
    asked = [(worker, step) for step in range(8) for worker in range(3)]
    expected = {key: batch(*key) for key in asked}
    assert expected[0, 0].shape == (2, CONTEXT + 1) and expected[0, 0].dtype == np.int32
    for key in np.random.default_rng(0).permutation(asked).tolist():
        np.testing.assert_array_equal(again(*key), expected[tuple(key)])
    assert window_ids(batch(2, 10**6))  # random access, far beyond the first epoch


@pytest.mark.parametrize("num_workers", [1, 3, 8, WINDOWS])
def test_iid_shards_are_disjoint_and_cover_every_epoch(num_workers):
    batch = make(num_workers)
    rounds = -(-2 * WINDOWS // num_workers)  # one window per worker: two epochs
    dealt = np.array([stream(batch, worker, rounds) for worker in range(num_workers)]).T.ravel()
    first, second = dealt[:WINDOWS], dealt[WINDOWS : 2 * WINDOWS]
    assert sorted(first) == sorted(second) == list(range(WINDOWS))
    assert list(first) != list(second), "both epochs have the same order"
    assert list(first) != list(range(WINDOWS)), "not shuffled"


def test_a_change_of_n_deals_the_same_global_batches():
    one, two, six = make(1, 6), make(2, 3), make(6, 1)
    for step in range(2 * WINDOWS // 6):
        union = [
            sorted(sum((window_ids(batch(worker, step)) for worker in range(n)), [])) for batch, n in ((one, 1), (two, 2), (six, 6))
        ]
        assert union[0] == union[1] == union[2]


@pytest.mark.parametrize("num_workers", [1, 3, 8, WINDOWS])
def test_contiguous_shards_are_disjoint_stretches_of_the_text(num_workers):
    batch = make(num_workers, partition="contiguous")
    after = 0
    for worker in range(num_workers):
        epoch = stream(batch, worker, 2 * -(-WINDOWS // num_workers))
        size = len(set(epoch))
        assert size in (WINDOWS // num_workers, -(-WINDOWS // num_workers))
        assert sorted(epoch[:size]) == list(range(after, after + size)), "an epoch is every own window once"
        after += size
    assert after == WINDOWS


@pytest.mark.parametrize("partition", PARTITIONS)
def test_seeds_and_epochs_shuffle_differently(partition):
    streams = [stream(make(1, seed=seed, partition=partition), 0, 2 * WINDOWS) for seed in (0, 1, 2)]
    orders = [tuple(s[:WINDOWS]) for s in streams] + [tuple(s[WINDOWS:]) for s in streams]
    assert len(set(orders)) == 6 and all(sorted(order) == list(range(WINDOWS)) for order in orders)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_batches_are_those_of_grain_on_the_windows_themselves(partition):
    """Runs continue bit by bit: these pipelines are the ones that text was first distributed by."""
    windows = grain.MapDataset.source([TEXT[i * CONTEXT :][: CONTEXT + 1].astype(np.int32) for i in range(WINDOWS)])
    cuts = [worker * WINDOWS // 3 for worker in range(4)]
    for worker in range(3):
        if partition == "iid":
            shard = windows.seed(7).shuffle().repeat()[worker::3]
        else:
            shard = windows[cuts[worker] : cuts[worker + 1]].seed(7 + worker).shuffle().repeat()
        for step in range(20):
            np.testing.assert_array_equal(make(seed=7, partition=partition)(worker, step), shard.batch(2)[step])


def test_dirichlet_divides_files():
    """Four files of seven windows each: similar for a large α, different for a small one."""
    starts = np.arange(4) * 7 * CONTEXT
    corpus = corpus_of(TEXT[: 28 * CONTEXT + 1], starts)

    def largest(alpha):
        sizes = dict(context=CONTEXT, batch_size=7, num_workers=4)
        batch = data.batches(corpus, **sizes, seed=1, partition=f"dirichlet(alpha={alpha})")
        own = np.array([np.bincount(np.array(window_ids(batch(worker, 0))) // 7, minlength=4) for worker in range(4)])
        assert (own.sum(axis=0) == 7).all()  # one epoch
        return own.max(axis=1).mean()

    assert largest(1e-4) >= 4 > 3 >= largest(1e6)
    with pytest.raises(ValueError, match="all data is of one; use iid or contiguous"):
        make(partition="dirichlet")


def test_refused_partitions():
    with pytest.raises(ValueError, match=f"{WINDOWS} .* {WINDOWS + 1} workers; use more data or fewer workers"):
        make(WINDOWS + 1)
    with pytest.raises(ValueError, match="'striped' is unknown; use one of iid, contiguous"):
        make(partition="striped")


# -- Validation -------------------------------------------------------------------------------------------------------


def test_validation_windows_predict_every_byte_once():
    tokens_WxT1 = data.validation_windows(TEXT, context=CONTEXT)
    assert tokens_WxT1.shape == (WINDOWS, CONTEXT + 1) and tokens_WxT1.dtype == np.int32
    np.testing.assert_array_equal(tokens_WxT1[:, 1:].ravel(), TEXT[1:])
    np.testing.assert_array_equal(tokens_WxT1[:, :-1].ravel(), TEXT[:-1])
    # Bytes that fill no window are left out.
    assert len(data.validation_windows(TEXT[:-1], context=CONTEXT)) == WINDOWS - 1


@pytest.mark.parametrize("limit", [1, 2, 5, 28, 29, 100])
def test_limited_validation_windows_are_evenly_spaced(limit):
    ids = window_ids(data.validation_windows(TEXT, context=CONTEXT, limit=limit))
    assert len(ids) == min(limit, WINDOWS)
    gaps = np.diff([*ids, WINDOWS])
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1
