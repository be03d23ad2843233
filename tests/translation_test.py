"""The task "translation": its batches, masks and shift, its cache, its beam search, and BLEU."""

import collections
from collections.abc import Callable
import gzip
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sacrebleu

from decjax import registry
from decjax.contrib.translation import beam, parallel
from decjax.contrib.translation import task as translation
from decjax.contrib.translation.model import BOS, EOS, PAD, Cache

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = "a the cat dog man woman red green sits runs jumps on under mat tree street and big small old young".split()
V = 300


def sentences(count, seed):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 12))).encode() for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    for seed, (split, count) in enumerate(dict(train=300, val=20, test=10).items()):
        text = sentences(count, seed)
        (root / f"{split}.de").write_bytes(b"\n".join(text) + b"\n")
        with gzip.open(root / f"{split}.en.gz", "wb") as file:
            file.write(b"\n".join(line[::-1] for line in text) + b"\n")
    return str(root)


def make(folder, **options):
    model = registry.make(
        "model", "translator", vocabulary=V, width=16, hidden=16, heads=2, encoder=1, decoder=2, dropout=options.pop("dropout", 0.0)
    )
    task = registry.make("task", "translation", model=model, path=folder, **dict(test="test", length=24) | options)
    return model, task


@pytest.fixture(scope="module")
def made(folder):
    model, task = make(folder)
    object.__setattr__(task, "measure", jax.jit(task.measure))
    return compiled(model), task, jax.jit(task.init)(jax.random.key(0)), task.load(4, 4, 0)


def compiled(model):
    for name in ("logits", "follow"):
        object.__setattr__(model, name, jax.jit(getattr(model, name)))
    return model


# -- Data -------------------------------------------------------------------------------------------------------------


def test_batches_have_few_lengths_and_as_many_tokens(made):
    """In a step all workers have one length; the padded tokens of their batches differ by less than a sentence."""
    _, _, _, data = made
    shapes = {step: {data.batch(worker, step).source_BxS.shape for worker in range(4)} for step in range(40)}
    assert all(len(found) == 1 for found in shapes.values())
    known = {shape for found in shapes.values() for shape in found}
    assert known == {(12, 8), (8, 12), (4, 24)}
    assert {data.batch(0, step).target_BxT1.shape for step in range(40)} == {(B, L + 1) for B, L in known}


def test_only_a_line_feed_ends_a_sentence(tmp_path):
    """A stray carriage return would shift all later pairs; at a line's end it belongs to the line break."""
    (tmp_path / "train.de").write_bytes("eins\rzwei\r\ndrei\u2028\x0cvier\x85\n\nacht".encode())
    (tmp_path / "train.en").write_bytes(b"one two\nthree four\n\neight\n")
    german, english = parallel.read(str(tmp_path), "train", ("de", "en"))
    assert [line.decode() for line in german] == ["eins\rzwei", "drei\u2028\x0cvier\x85", "", "acht"]
    assert english == [b"one two", b"three four", b"", b"eight"]


def test_a_pass_takes_every_pair_once(made, folder):
    """Pairs of a length repeat only after all others of that length, even where a step has more places than there are pairs."""
    _, _, _, data = made
    sentences, _ = parallel.read(folder, "train", ("de", "en"))
    copies = collections.Counter(tuple(tokens[:23]) for tokens in data.more.coder.encode(sentences))
    seen = collections.defaultdict(collections.Counter)
    for step, worker in itertools.product(range(60), range(4)):
        source_BxS = data.batch(worker, step).source_BxS
        seen[source_BxS.shape[1]].update(tuple(source_S[source_S > EOS]) for source_S in source_BxS)
    assert sum(len(found) for found in seen.values()) == len(copies)
    for found in seen.values():
        passes = found.total() // sum(copies[source] for source in found)
        assert passes and all(passes * copies[source] <= found[source] <= (passes + 1) * copies[source] for source in found)


def test_sentences_are_laid_out_with_their_ends():
    pairs = parallel.lay_out([np.array([5, 6])], [np.array([7, 8, 9, 10, 11])], 4)
    np.testing.assert_array_equal(pairs.source_BxS, [[5, 6, EOS, PAD]])
    np.testing.assert_array_equal(pairs.target_BxT1, [[BOS, 7, 8, 9, EOS]])


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "has neither train.de nor train.de.gz"),
        ({"train.de": b"a\nb\n", "train.en": b"a\n"}, "train.de has 2 and train.en has 1 lines"),
        ({"train.de": b"", "train.en": b""}, "has no sentence in train.de; give files of one sentence a line"),
        ({"train.de": "eins\n".encode("utf-16"), "train.en": b"a\n"}, "train.de' holds no text .it has a zero byte"),
        ({"train.de.gz": gzip.compress(b"a\0b\n"), "train.en": b"a\n"}, "train.de.gz' holds no text .it has a zero byte"),
        ({"train.de": np.random.default_rng(0).bytes(4096), "train.en": b"a\n"}, "train.de' holds no text"),
        (
            {"train.de": b"a\n" + b"b" * 9_000_000, "train.en": b"a\nb\n"},
            "train.de' has 9000000 bytes in line 2, .* may have 65536",
        ),
        ({"train.de": b"\n \n", "train.en": b"a\nb\n"}, "has no sentence in train.de; give files of one sentence a line"),
        ({"train.de.gz": b"no gzip", "train.en": b"a\n"}, "train.de.gz' is damaged: BadGzipFile: Not a gzipped file"),
        (
            {"train.de.gz": gzip.compress(b"a\n" * 999)[:30], "train.en": b"a\n"},
            "train.de.gz' is damaged: EOFError: Compressed file ended",
        ),
        ({"train.de": None}, "train.de' cannot be read: Is a directory; give data that you may read"),
        (
            {f"{split}.{tongue}": b"a\n" for split in ("train", "val", "test") for tongue in ("de", "en")},
            "1 pairs .* for 2 workers",
        ),
    ],
)
def test_unusable_files_are_told_in_one_line(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).mkdir() if text is None else (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=message) as error:
        make(str(tmp_path))[1].load(2, 1, 0)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("counts", [(100, 2, 3), (100, 50, 3), (5, 5, 0), (9, 0, 3), (0, 0, 8), (3, 3, 3), (0, 30, 1)])
def test_no_pair_is_lost_where_a_length_has_few(counts):
    """With lengths 8, 12 and 24: every pair is untruncated, and each worker has its own pairs of every length."""
    sizes = np.repeat([5, 10, 20], counts)
    pairs = [np.full(size, 3 + k) for k, size in enumerate(sizes)]
    batch = parallel.batches(pairs, pairs, longest=24, batch_size=2, num_workers=8, seed=0)
    seen = {}
    for step, worker in itertools.product(range(16), range(8)):
        for row in batch(worker, step).source_BxS:
            assert (row == row[0]).sum() == sizes[row[0] - 3] and row[sizes[row[0] - 3]] == EOS
            seen.setdefault(len(row), set()).add(int(row[0]))
    assert set().union(*seen.values()) == set(range(3, 3 + sum(counts))) and all(len(found) >= 8 for found in seen.values())
    if counts == (100, 50, 3):
        assert [len(seen[length]) for length in (8, 12, 24)] == [100, 45, 8]  # missing ones come from the next shorter length


def test_the_fingerprint_is_of_text_and_tokens(folder):
    prints = {}
    for vocabulary in (290, 290, 300):
        model = registry.make("model", "translator", vocabulary=vocabulary, width=4, hidden=4, heads=1, encoder=1, decoder=1)
        task = registry.make("task", "translation", model=model, path=folder, test="test", length=24)
        prints.setdefault(vocabulary, set()).add(task.load(4, 4, 0).fingerprint)
    assert len(prints[290]) == 1 and prints[290] != prints[300]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(length=3), "length=3 must be at least 6 and at most 1024"),
        (dict(smoothing=1.0), "smoothing=1.0 must be at least 0 and less than 1"),
        (dict(beams=0), "beams=0 must be at least 1 and at most 64"),
        (dict(alpha=-1.0), "alpha=-1.0 must be at least 0 and at most 10"),
        (dict(partition="dirichlet"), "without classes, since sentences have none, got partition 'dirichlet'"),
        (dict(source="de", target="de"), "source='de' and target='de' are the same language"),
    ],
)
def test_impossible_options_are_refused(options, message, folder):
    with pytest.raises(ValueError, match=message):
        make(folder, **options)


# -- Model ------------------------------------------------------------------------------------------------------------


def shift(made, change):
    """Return (logits before, logits after) a change of (source, target)."""
    model, _, params, data = made
    params = jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(0).normal(size=x.shape).astype(np.float32), params)
    pairs = data.batch(0, 0)
    source, target = pairs.source_BxS.copy(), pairs.target_BxT1[:, :-1].copy()
    before = np.asarray(model.logits(params, source, target, None))  # it may share memory with the array changed now
    return before, model.logits(params, *change(source, target), None)


def test_a_token_is_seen_by_the_later_ones_only(made):
    def change(source, target):
        target[:, 3] = np.where(target[:, 3] == 7, 8, 7)
        return source, target

    before, after = shift(made, change)
    np.testing.assert_allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert (np.abs(before - after)[:, 3:].max(axis=2) > 1e-4).all()


def test_every_token_of_the_source_is_seen_and_no_padding(made):
    def change(source, target):
        source[:, 0] = np.where(source[:, 0] == 7, 8, 7)
        return source, target

    before, after = shift(made, change)
    assert (np.abs(before - after).max(axis=2) > 1e-4).all()
    before, after = shift(made, lambda source, target: (np.pad(source, ((0, 0), (0, 5)), constant_values=PAD), target))
    np.testing.assert_allclose(before, after, atol=1e-5)


def test_the_loss_counts_the_next_tokens_that_are_no_padding(made, folder):
    """The dense loss in NumPy, with and without smoothing (`optax.smooth_labels`)."""
    model, task, params, data = made
    pairs = data.batch(0, 1)
    labels = pairs.target_BxT1[:, 1:]
    log_p = jax.nn.log_softmax(model.logits(params, pairs.source_BxS, pairs.target_BxT1[:, :-1], None))
    real = labels != PAD
    for smoothing in (0.0, 0.1):
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, V), smoothing)
        expected = -(smooth * log_p).sum(axis=-1)[real].mean()
        loss, _ = jax.jit(make(folder, smoothing=smoothing)[1].loss)(params, (), pairs, jax.random.key(0))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    sums, weight_B = task.measure(params, (), pairs)
    np.testing.assert_array_equal(weight_B, real.sum(axis=1))
    np.testing.assert_allclose(sums["loss"], -(jax.nn.one_hot(labels, V) * log_p).sum(axis=-1).sum(axis=1, where=real), rtol=1e-5)


def test_dropout_is_drawn_by_the_key(made, folder):
    plain, _, params, data = made
    model, pairs = compiled(make(folder, dropout=0.5)[0]), data.batch(0, 0)
    logits = lambda model, key: np.asarray(model.logits(params, pairs.source_BxS, pairs.target_BxT1[:, :-1], key))
    one, again, other = (logits(model, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_allclose(one, again, atol=1e-6)
    assert (np.abs(one - other) > 0.01).any()
    without = logits(model, None)
    assert (np.abs(without - one) > 0.01).any()
    np.testing.assert_allclose(without, logits(plain, jax.random.key(0)), atol=1e-5)


def test_masks_of_dropout_are_independent(folder):
    """At all sites of one key: the embeddings, and each branch of three layers."""
    draws = make(folder, dropout=0.5)[0]._drop
    sites = [(0, 0), (0, 1), *itertools.product(range(1, 4), range(3))]
    masks = [draws(jax.random.key(0), layer)(jnp.ones(200_000), site) > 0 for layer, site in sites]
    correlation = np.corrcoef(np.array(masks, np.float32)) - np.eye(len(sites))
    assert np.abs(correlation).max() < 0.02 and abs(np.mean(masks) - 0.5) < 0.01


def test_following_token_by_token_gives_the_logits_of_the_whole(made):
    model, _, params, data = made
    pairs = data.batch(1, 0)
    inputs_BxT = pairs.target_BxT1[:, :-1]
    whole = model.logits(params, pairs.source_BxS, inputs_BxT, None)
    memory, follow = jax.jit(model.begin, static_argnums=2)(params, pairs.source_BxS, inputs_BxT.shape[1]), model.follow
    for position in range(inputs_BxT.shape[1]):
        logits, memory = follow(params, memory, inputs_BxT[:, position], position)
        np.testing.assert_allclose(logits, whole[:, position], atol=1e-5)


# -- Beam search ------------------------------------------------------------------------------------------------------


class Markov(NamedTuple):
    begin: Callable
    follow: Callable
    vocabulary: int


def markov(table_TxVxV):
    """A model whose next token depends on the position and the last token: logits = table[position, last]."""

    def begin(params, source_BxS, length):
        empty = jnp.zeros((1, len(source_BxS), 1))
        return Cache((empty, empty), (empty, empty), empty)

    def follow(params, memory, tokens_R, position):
        return jnp.asarray(table_TxVxV)[position, tokens_R], memory

    return Markov(begin, follow, table_TxVxV.shape[-1])


def best(table_TxVxV, alpha):
    """The best of all sequences, by hand; sequences that do not end within T tokens do not count."""
    T, V_, _ = table_TxVxV.shape
    banned = np.zeros(V_)
    banned[[PAD, BOS]] = -np.inf
    log_p = table_TxVxV - np.log(np.exp(table_TxVxV).sum(axis=-1, keepdims=True)) + banned
    found = []
    for length in range(1, T + 1):
        for middle in itertools.product(range(EOS + 1, V_), repeat=length - 1):
            tokens = (*middle, EOS)
            total = sum(log_p[t, before, now] for t, (before, now) in enumerate(itertools.pairwise((BOS, *tokens))))
            found.append((total / ((5 + length) / 6) ** alpha, tokens))
    return max(found)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_with_enough_beams_it_finds_the_best_of_all(alpha):
    for seed in range(5):
        table = 2 * np.random.default_rng(seed).normal(size=(4, 6, 6)).astype(np.float32)
        found = beam.search(markov(table), None, jnp.zeros((1, 1), int), beams=27, alpha=alpha, length=4)
        score, tokens = best(table, alpha)
        assert tuple(np.asarray(found)[0][: len(tokens)]) == tokens
        assert (np.asarray(found)[0][len(tokens) :] == PAD).all() and math.isfinite(score)


def test_one_beam_is_greedy_and_two_see_further():
    """Token 3 is likelier at first, but every continuation is unlikely: 0.6 · 0.3 · … against 0.4 · 0.9 · …"""
    p = np.full((3, 6, 6), 1e-9, np.float32)
    p[0, BOS, [3, 4]] = 0.6, 0.4
    p[1, 3, [3, 4, 5]] = 0.35, 0.35, 0.3
    p[1, 4, 5] = 1.0
    p[2, :, EOS] = 1.0
    search = lambda beams: np.asarray(
        beam.search(markov(np.log(p)), None, jnp.zeros((2, 1), int), beams=beams, alpha=0.0, length=3)
    )
    assert search(1)[0, 0] == 3 and (search(1)[0] == search(1)[1]).all()
    assert search(2)[0].tolist() == [4, 5, EOS]


def test_what_does_not_end_is_cut():
    p = np.full((3, 5, 5), 1e-9, np.float32)
    p[:, :, 3] = 1.0
    found = np.asarray(beam.search(markov(np.log(p)), None, jnp.zeros((1, 1), int), beams=1, alpha=0.6, length=3))
    assert found.tolist() == [[3, 3, 3]] and beam.cut(found[0]) == [3, 3, 3]
    assert beam.cut(np.array([3, 4, EOS, PAD])) == [3, 4] and beam.cut(np.array([EOS, PAD])) == []


def test_greedy_search_takes_what_the_whole_sequence_finds_likeliest(made):
    model, _, params, data = made
    params = jax.tree.map(lambda x: x + 0.3 * np.random.default_rng(1).normal(size=x.shape).astype(np.float32), params)
    source = jnp.asarray(data.batch(0, 0).source_BxS)
    greedy = np.asarray(beam.search(model, params, source, beams=1, alpha=0.0, length=6))
    inputs = np.concatenate([np.full((len(greedy), 1), BOS), greedy[:, :-1]], axis=1)
    logits = np.array(model.logits(params, source, inputs, None))
    logits[..., [PAD, BOS]] = -np.inf
    real = np.cumsum(np.pad(greedy == EOS, ((0, 0), (1, 0)))[:, :-1], axis=1) == 0
    np.testing.assert_array_equal(logits.argmax(axis=-1)[real], greedy[real])


def test_hypotheses_have_the_scores_of_the_whole_sequence(made):
    """Three beams of a real model: keys and values follow their hypotheses."""
    model, _, params, data = made
    params = jax.tree.map(lambda x: x + 0.3 * np.random.default_rng(2).normal(size=x.shape).astype(np.float32), params)
    table = np.array(params["embedding"]["embedding"])
    table[EOS] *= 3  # so that some end
    params = params | {"embedding": {"embedding": table}}
    source, K, T, alpha = jnp.asarray(data.batch(0, 0).source_BxS), 3, 8, 0.6
    found = jax.jit(beam.hypotheses, static_argnums=(0, 3, 4, 5))(model, params, source, K, alpha, T)
    written = int(found.position)

    def log_p(tokens_BxT):
        inputs = np.concatenate([np.full((len(source), 1), BOS), tokens_BxT[:, :-1]], axis=1)
        each = jax.nn.log_softmax(model.logits(params, source, inputs, None))
        real = tokens_BxT != PAD
        return np.where(real, np.take_along_axis(np.asarray(each), tokens_BxT[..., None], axis=-1)[..., 0], 0).sum(
            axis=1
        ), real.sum(axis=1)

    ended = np.asarray(found.done_BxK) > beam.NEVER
    assert ended.any() and written > 2
    for k in range(K):
        total, length = log_p(np.asarray(found.alive_BxKxT)[:, k])
        np.testing.assert_allclose(found.alive_BxK[:, k], total, rtol=1e-4, atol=1e-4)
        assert (length == written).all()
        total, length = log_p(np.asarray(found.done_BxKxT)[:, k])
        np.testing.assert_allclose(
            np.asarray(found.done_BxK)[:, k][ended[:, k]], (total / ((5 + length) / 6) ** alpha)[ended[:, k]], rtol=1e-4
        )
    best = np.asarray(beam.search(model, params, source, beams=K, alpha=alpha, length=T))
    np.testing.assert_array_equal(best, np.where(ended[:, :1], found.done_BxKxT[:, 0], found.alive_BxKxT[:, 0]))


# -- BLEU -------------------------------------------------------------------------------------------------------------


def test_bleu_is_that_of_sacrebleu_on_the_test_sentences(made, monkeypatch):
    """Translations are returned in the order of the references; a perfect one scores 100."""
    _, task, params, data = made
    written = {source: target.decode() for source, target in zip(data.more.sources, data.more.targets, strict=True)}
    monkeypatch.setattr(translation.Translation, "translate", lambda self, params, data, texts: [written[text] for text in texts])
    assert task.score(params, (), data) == {"bleu": pytest.approx(100)}
    for source in written:
        written[source] = " ".join(written[source].split()[:-1])
    expected = sacrebleu.corpus_bleu([written[s] for s in data.more.sources], [[t.decode() for t in data.more.targets]]).score
    assert task.score(params, (), data) == {"bleu": expected} and 0 < expected < 100


@pytest.mark.parametrize(
    "written, references, product, penalty",
    [
        (["a b c d e"], ["a b c d f"], 4 / 5 * 3 / 4 * 2 / 3 * 1 / 2, 1),  # 66.87
        (["a a b c d e"], ["a b c d e f"], 5 / 6 * 4 / 5 * 3 / 4 * 2 / 3, 1),  # the second "a" has no match
        (["a b c d e"], ["a b c d f g h"], 4 / 5 * 3 / 4 * 2 / 3 * 1 / 2, math.exp(1 - 7 / 5)),
        (["a b c d e f", "a b c d e"], ["a b c d e", "a b c d e f"], 10 / 11 * 8 / 9 * 6 / 7 * 4 / 5, 1),
        (["a b c d e", "f g h i"], ["a b c d f", "f g h i j k"], 8 / 9 * 6 / 7 * 4 / 5 * 2 / 3, math.exp(1 - 11 / 9)),
    ],
    ids=["5_words", "a_word_twice", "brevity", "2_sentences", "2_sentences_brevity"],
)
def test_bleu_is_that_of_counts_by_hand(written, references, product, penalty, made, monkeypatch):
    """The geometric mean of four precisions and the brevity penalty, both from counts and lengths summed over all sentences."""
    _, task, _, data = made
    monkeypatch.setattr(translation.Translation, "translate", lambda self, params, data, texts: [text.decode() for text in texts])
    encoded = [[text.encode() for text in texts] for texts in (written, references)]
    data = data._replace(more=translation._Test(data.more.coder, *encoded))
    assert task.score((), (), data) == {"bleu": pytest.approx(100 * penalty * product**0.25)}


def test_untrained_translations_are_text(made):
    _, task, params, data = made
    assert 0 <= task.score(params, (), data)["bleu"] <= 100
    assert task.show(params, (), data, jax.random.key(0)).count("→") == 3
