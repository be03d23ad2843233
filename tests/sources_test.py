"""Sources of text other than plain files: JSON lines, Parquet, and a user's own source; and tokens instead of bytes."""

import gzip
import json
import math
import sys

import jax
import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from decjax import models, registry
from decjax.tasks import bpe, sources, text

DOCUMENTS = ["The first.", "Zwei Mädchen\nlesen.", "", "and a third"]


def test_json_lines_and_parquet_are_read_alike(tmp_path):
    """The values of a field, joined by line breaks; other fields and empty lines are skipped."""
    rows = [json.dumps({"text": document, "id": k}) for k, document in enumerate(DOCUMENTS)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, '{"text": null}']) + "\n\n")
    parquet.write_table(pyarrow.table({"text": [*DOCUMENTS, None], "other": [1, 2, 3, 4, 5]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("plain")
    _, texts = sources.read(str(tmp_path))
    joined = lambda documents: "\n".join(documents).encode()
    assert texts == {"a.jsonl": joined(DOCUMENTS), "b.parquet": joined(filter(None, DOCUMENTS)), "c.txt": b"plain"}
    _, named = sources.read(str(tmp_path / "a.jsonl"), "text")
    assert list(named.values()) == [joined(DOCUMENTS)]
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "a\0b"}))  # in a plain file, a zero byte would mark it as binary
    assert sources.read(str(tmp_path))[1]["d.jsonl"] == b"a\0b"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}', "has in line 2 no JSON object with a string 'text'"),
        ("a.jsonl", "[1]", "has in line 1 no JSON object"),
        ("a.jsonl", '{"text": 3}', "has in line 1 no JSON object with a string"),
        ("a.jsonl", "{", "has in line 1 no JSON object"),
        ("a.jsonl", "[" * 100_000, "has in line 1 no JSON object"),
        ("a.jsonl", '{"body": null}', "has in line 1 no JSON object"),
        ("a.jsonl", '{"text": null}', "holds no text"),
        ("a.parquet", "no parquet", "a.parquet' is not a Parquet file, or is damaged: .*; give another file"),
        ("a.parquet", {"body": ["x"]}, "must have one column 'text', and its columns are body; give another --config.data.field"),
        ("a.parquet", {"text": [1]}, "holds int instead of text in column 'text'"),
        ("a.jsonl", '{"text": ""}', "holds no text"),
        ("a.txt", "a\0b", "holds no text .a file with a zero byte counts as binary"),
    ],
)
def test_what_holds_no_text_is_told_in_one_line(name, content, message, tmp_path):
    if isinstance(content, dict):
        parquet.write_table(pyarrow.table(content), tmp_path / name)
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        sources.read(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: whole[:4] + b"\xff" * 40 + whole[44:]])
def test_a_damaged_parquet_file_is_told(damage, tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [str(number) for number in range(500)]}), file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="a.parquet' is not a Parquet file, or is damaged: .*; give another file") as error:
        sources.read(str(file))
    assert "\n" not in str(error.value)


def test_the_text_of_a_small_parquet_file_may_be_too_large(tmp_path, monkeypatch):
    """Equal values take hardly any disk space."""
    documents, file = ["x" * 500, "y" * 500] * 2500, tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": documents}), file)
    assert sources.read(str(file))[1] == {".": "\n".join(documents).encode()}
    monkeypatch.setattr(sources, "MAX_BYTES", 2**20)
    assert file.stat().st_size < 2**20
    with pytest.raises(ValueError, match=r"holds more than 0 GiB of text, and at most 0 GiB fit; give a smaller file"):
        sources.read(str(file))
    parquet.write_table(pyarrow.table({"text": documents[:2000]}), file)
    assert len(sources.read(str(file))[1]["."]) < 2**20
    (tmp_path / "b.parquet").write_bytes(file.read_bytes())  # each fits by itself
    with pytest.raises(ValueError, match="holds more than 0 GiB of text"):
        sources.read(str(tmp_path))


def test_compressed_text_is_told(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text " * 99))
    with pytest.raises(ValueError, match="a.txt.gz' is compressed; unpack it"):
        sources.read(str(tmp_path / "a.txt.gz"))
    (tmp_path / "b.txt").write_text("text")
    assert sources.read(str(tmp_path))[1] == {"b.txt": b"text"}


def test_a_source_of_ones_own_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_texts.py").write_text(
        "import grain\n"
        f"DOCUMENTS = {DOCUMENTS!r}\n"
        "numbered = grain.MapDataset.source(DOCUMENTS).map(lambda text: text.upper())\n"
        "wrong, ended = [b'x', 3], ['a\\n', b'b']\n"
        "iterator, number, nothing = iter(DOCUMENTS), 3, None\n"
        "class Broken(list):\n"
        "  def __getitem__(self, number): raise RuntimeError('first\\nsecond')\n"
        "broken = Broken('ab')\n"
        "single, endless = 'one text', numbered.repeat()\n"
    )
    for name, content in {"raises": "1 / 0", "exits": "raise SystemExit(3)", "no_python": "def"}.items():
        (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, texts = sources.read("my_texts:numbered")
    assert texts == {str(k): document.upper().encode() + b"\n" for k, document in enumerate(DOCUMENTS) if document}
    assert sources.read("my_texts:ended")[1] == {"0": b"a\n", "1": b"b\n"}  # one line break is enough
    for path, message in [
        ("my_texts:wrong", "has an item 1 of type int; give a source whose items are str or bytes"),
        ("my_texts:absent", "cannot be imported"),
        ("my_texts:iterator", "is of type list_iterator, which has no length or no items by number"),
        ("my_texts:number", "is of type int, which has no length"),
        ("my_texts:nothing", "is of type NoneType, which has no length"),
        ("my_texts:broken", "has an item 0 that cannot be read: RuntimeError: first second; fix the source"),
        ("my_texts:single", "is a single text, and its items would be letters; give a list of texts"),
        ("my_texts:endless", "has [0-9]* items, and at most 4294967296 fit; leave out repeat"),
        ("no_such_module:texts", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raises:texts", "cannot be imported: ZeroDivisionError: division by zero; give"),
        ("exits:texts", "cannot be imported: SystemExit: 3; give"),
        ("no_python:texts", "cannot be imported: SyntaxError: "),
    ]:
        with pytest.raises(ValueError, match=f"data path '{path}'.*{message}") as error:
            sources.read(path)
        assert "\n" not in str(error.value)
    sys.modules.pop("my_texts", None)


# -- Tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_bytes():
    """Encoded text decodes to the same bytes, in both parts; files begin at their first token."""
    whole = b"one two three\n" * 40 + b"four five six\n" * 40 + b"\n  seven"
    corpus = text.Corpus(*(np.frombuffer(part, np.uint8) for part in (whole, whole[:100])), np.array([0, 14 * 40]))
    coder = bpe.train(text.lines(corpus.train), 300)
    coded = text.encoded(corpus, coder)
    assert coder.decode(coded.train) == whole and coder.decode(coded.valid) == whole[:100]
    assert coder.decode(coded.train[coded.starts[1] :]).startswith(b"four")
    assert len(coded.train) < len(whole) / 2 and coded.fingerprint != corpus.fingerprint


@pytest.mark.parametrize("at_once", [1, 50, 2**20])
def test_files_without_a_last_line_break_are_encoded_one_by_one(tmp_path, monkeypatch, at_once):
    """Their bytes are concatenated, their tokens are not, however many are encoded at once."""
    monkeypatch.setattr(text, "AT_ONCE", at_once)
    files = [f"file {k} has lines\nand{k % 3 * chr(10)} an end, number {k}".encode() for k in range(300)]
    for k, content in enumerate(files):
        (tmp_path / f"{k:03}").write_bytes(content)
    corpus = text.load_corpus(str(tmp_path))
    coder = bpe.train(text.lines(corpus.train, corpus.starts), 400)
    coded = text.encoded(corpus, coder)
    held_out = set()
    for tokens, starts in ((coded.train, coded.starts), (coded.valid, coded.valid_starts)):
        parts = [coder.decode(part) for part in np.split(tokens, starts[1:])]
        assert len(np.unique(starts)) == len(parts) > 1 and set(parts) <= set(files)
        held_out ^= set(parts)
    assert held_out == set(files)
    assert corpus.train.tobytes() == coder.decode(coded.train) and corpus.valid.tobytes() == coder.decode(coded.valid)


def test_a_text_that_is_cut_for_validation_goes_on_there(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 100)
    corpus = text.load_corpus(str(tmp_path), min_bytes=150)
    assert corpus.starts.tolist() == [0, 100] and list(corpus.valid_starts) == [0, 50]


def test_documents_of_ones_own_are_divided_by_dirichlet(tmp_path, monkeypatch):
    """Items without line breaks begin at their own tokens, so workers can have unequal shares of them."""
    (tmp_path / "many_texts.py").write_text("articles = [f'{k} ' + 'once upon a time ' * (2 + k % 5) for k in range(300)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = registry.make("model", "decoder", vocabulary=300, context=8, width=8, hidden=8, heads=1, depth=1)
    options = dict(model=model, path="many_texts:articles", tokenizer="bpe")
    corpus = text.load_corpus("many_texts:articles")
    coded = text.encoded(corpus, bpe.train(text.lines(corpus.train, corpus.starts), 300))
    count = corpus.train.tobytes().count(b"\n")
    assert 290 < count < 300 and len(np.unique(coded.starts)) == count
    data, iid = (registry.make("task", "lm", partition=name, **options).load(4, 2, 0) for name in ("dirichlet(alpha=0.1)", "iid"))
    assert data.batch(3, 0).shape == (2, 9) and not np.array_equal(data.batch(3, 0), iid.batch(3, 0))
    assert data.fingerprint == coded.fingerprint
    sys.modules.pop("many_texts", None)


@pytest.fixture(scope="module")
def tasks():
    model = registry.make("model", "decoder", vocabulary=400, context=16, width=8, hidden=8, heads=1, depth=1)
    return {name: registry.make("task", "lm", model=model, path=sources.__file__, tokenizer=name) for name in ("bytes", "bpe")}


def test_the_loss_per_byte_is_that_per_token_shared_out(tasks):
    data = tasks["bpe"].load(2, 2, 0)
    tokens_WxT1 = data.validation(0)
    predicted = data.more.decode(tokens_WxT1[:, 1:].ravel())
    found = tasks["bpe"].derived({"loss": 3.0}, data, 0)
    assert found["perplexity"] == math.exp(3.0)
    assert found["loss_per_byte"] == pytest.approx(3.0 * tokens_WxT1[:, 1:].size / len(predicted))
    one = data.more.decode(data.validation(1)[:, 1:].ravel())
    assert tasks["bpe"].derived({"loss": 3.0}, data, 1)["loss_per_byte"] == pytest.approx(3.0 * 16 / len(one))
    assert tasks["bytes"].derived({"loss": 3.0}, tasks["bytes"].load(2, 2, 0), 0) == {"perplexity": math.exp(3.0)}
    assert tasks["bytes"].derived({"loss": 1e6}, tasks["bytes"].load(2, 2, 0), 0)["perplexity"] < math.inf


def test_units_and_samples(tasks):
    assert tasks["bytes"].metrics["loss"] == "nats/byte" and tasks["bpe"].metrics["loss"] == "nats/token"
    data, params = tasks["bpe"].load(2, 2, 0), tasks["bpe"].init(jax.random.key(0))
    shown = tasks["bpe"].show(params, (), data, jax.random.key(0))
    assert shown.startswith(data.more.decode(data.validation(1)[0]).decode(errors="replace"))


def test_unknown_tokenizers_are_refused():
    with pytest.raises(ValueError, match="tokenizer='words' is unknown; use one of bytes, bpe"):
        registry.make("task", "lm", model=models.decoder_lm(), tokenizer="words")


def test_too_few_tokens_are_told_when_the_text_is_read(tmp_path):
    (tmp_path / "short.txt").write_text("the cat sat " * 100)
    model = registry.make("model", "decoder", vocabulary=400, context=16, width=8, hidden=8, heads=1, depth=1)
    task = registry.make("task", "lm", model=model, path=str(tmp_path / "short.txt"), tokenizer="bpe")
    with pytest.raises(
        ValueError, match=r"short.txt' has \d tokens in the text for validation, but .* context \+ 1 = 17; use more"
    ):
        task.load(1, 1, 0)
