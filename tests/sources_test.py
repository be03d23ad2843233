"""Where text may come from beside plain files: JSON lines, Parquet, and a source of the user's own; and tokens instead of bytes."""

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
    """The values of a field, joined by line breaks; other fields and empty lines are left out."""
    rows = [json.dumps({"text": document, "id": k}) for k, document in enumerate(DOCUMENTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n\n")
    parquet.write_table(pyarrow.table({"text": [*DOCUMENTS, None], "other": [1, 2, 3, 4, 5]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("plain")
    _, texts = sources.read(str(tmp_path))
    joined = lambda documents: "\n".join(documents).encode()
    assert texts == {"a.jsonl": joined(DOCUMENTS), "b.parquet": joined(filter(None, DOCUMENTS)), "c.txt": b"plain"}
    _, named = sources.read(str(tmp_path / "a.jsonl"), "text")
    assert list(named.values()) == [joined(DOCUMENTS)]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}', "line 2 is no JSON object with a text 'text'"),
        ("a.jsonl", "[1]", "line 1 is no JSON object"),
        ("a.jsonl", '{"text": 3}', "line 1 is no JSON object with a text"),
        ("a.jsonl", "{", "line 1 is no JSON object"),
        ("a.parquet", "no parquet", "has no column 'text' that can be read"),
        ("a.parquet", {"body": ["x"]}, "has no column 'text' that can be read"),
        ("a.parquet", {"text": [1]}, "column 'text' holds int, and text is needed"),
        ("a.jsonl", '{"text": ""}', "holds no text"),
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


def test_a_source_of_ones_own_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_texts.py").write_text(
        "import grain\n"
        f"DOCUMENTS = {DOCUMENTS!r}\n"
        "numbered = grain.MapDataset.source(DOCUMENTS).map(lambda text: text.upper())\n"
        "wrong = [b'x', 3]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, texts = sources.read("my_texts:numbered")
    assert texts == {str(k): document.upper().encode() for k, document in enumerate(DOCUMENTS) if document}
    for path, message in [
        ("my_texts:wrong", "item 1 is of type int; give a source whose items are str or bytes"),
        ("my_texts:absent", "cannot be imported"),
        ("no_such_module:texts", "cannot be imported: No module named 'no_such_module'"),
    ]:
        with pytest.raises(ValueError, match=message):
            sources.read(path)
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


@pytest.fixture(scope="module")
def tasks():
    model = registry.make("model", "decoder", vocabulary=400, context=16, width=8, hidden=8, heads=1, depth=1)
    return {name: registry.make("task", "lm", model=model, path=sources.__file__, tokenizer=name) for name in ("bytes", "bpe")}


def test_the_loss_per_byte_is_that_per_token_shared_out(tasks):
    data = tasks["bpe"].load(2, 2, 0)
    tokens_WxT1 = data.validation(0)
    predicted = data.more.decode(tokens_WxT1[:, 1:].ravel())
    found = tasks["bpe"].derived({"loss": 3.0}, data)
    assert found["perplexity"] == math.exp(3.0)
    assert found["loss_per_byte"] == pytest.approx(3.0 * tokens_WxT1[:, 1:].size / len(predicted))
    assert tasks["bytes"].derived({"loss": 3.0}, tasks["bytes"].load(2, 2, 0)) == {"perplexity": math.exp(3.0)}
    assert tasks["bytes"].derived({"loss": 1e6}, tasks["bytes"].load(2, 2, 0))["perplexity"] < math.inf


def test_units_and_samples(tasks):
    assert tasks["bytes"].metrics["loss"].unit == "nats/byte" and tasks["bpe"].metrics["loss"].unit == "nats/token"
    data, params = tasks["bpe"].load(2, 2, 0), tasks["bpe"].init(jax.random.key(0))
    shown = tasks["bpe"].show(params, (), data, jax.random.key(0))
    assert shown.startswith(data.more.decode(data.validation(1)[0]).decode(errors="replace"))


def test_unknown_tokenizers_are_refused():
    with pytest.raises(ValueError, match="tokenizer='words' is unknown; use one of bytes, bpe"):
        registry.make("task", "lm", model=models.decoder_lm(), tokenizer="words")
    with pytest.raises(ValueError, match="vocabulary=256 is less than 259, the bytes and 3 special tokens"):
        bpe.train([b"text"], 256, special=3)
