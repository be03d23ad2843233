"""Tokens in files: what launch.tokenize writes, batches of mapped files, size limits, runs, one-line errors."""

import json
import os
import pathlib
import subprocess
import sys
import zlib

import numpy as np
import pytest
import tokenizers

from configs import llama
from decjax import registry
from decjax.tasks import shards, text
from tests import commands, runs

TEXT = b"the cat and the dog saw a bird in the tree.\n" * 3000
CONTEXT = 8


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number:03}.txt").write_bytes(f"<file {number}>\n".encode() + TEXT[: 44 * (1 + number % 7)])
    return folder


def task_of(path, vocabulary=256, **options):
    model = registry.make("model", "decoder", vocabulary=vocabulary, context=CONTEXT, width=8, hidden=8, heads=1, depth=1)
    return registry.make("task", "lm", model=model, path=str(path), tokenizer="shards", **options)


def tokens_in(folder, part):
    index = json.loads((folder / "index.json").read_text())
    tokens = np.fromfile(folder / f"{part}.bin", index["dtype"])
    assert len(tokens) == index[part]["tokens"] and f"{zlib.crc32(tokens.tobytes()):08x}" == index[part]["checksum"]
    return tokens


# -- Writing ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_text_in_the_same_division(corpus, tmp_path):
    index = shards.write(str(corpus), tmp_path / "tokens")
    expected = text.load_corpus(str(corpus))
    np.testing.assert_array_equal(tokens_in(tmp_path / "tokens", "train"), expected.train)
    np.testing.assert_array_equal(tokens_in(tmp_path / "tokens", "valid"), expected.valid)
    assert (index["dtype"], index["vocabulary"], index["train"]["bytes"]) == ("uint16", 256, len(expected.train))
    assert not (tmp_path / "tokens/tokenizer.json").exists()


def test_byte_pairs_come_back_as_the_text(corpus, tmp_path):
    shards.write(str(corpus), tmp_path / "tokens", tokenizer="bpe", vocabulary=300)
    stored = shards.load(str(tmp_path / "tokens"), 300)
    expected = text.load_corpus(str(corpus))
    assert stored.coder.decode(stored.corpus.train) == expected.train.tobytes()
    assert stored.coder.decode([*stored.corpus.valid, 299, 300, 10**6]).startswith(expected.valid.tobytes())
    assert stored.coder.bytes_per_token(stored.corpus.valid) == len(expected.valid) / len(stored.corpus.valid) > 2


def test_the_tokenizer_of_another_model(corpus, tmp_path):
    other = tokenizers.ByteLevelBPETokenizer()
    other.train_from_iterator([TEXT.decode(), "Mädchen"], vocab_size=300)
    other.save(str(tmp_path / "tokenizer.json"))
    shards.write(str(corpus), tmp_path / "tokens", tokenizer=str(tmp_path / "tokenizer.json"))
    stored = shards.load(str(tmp_path / "tokens"), 300)
    assert stored.coder.decode(stored.corpus.train) == text.load_corpus(str(corpus)).train.tobytes()
    document = (corpus / "000.txt").read_bytes().decode()
    np.testing.assert_array_equal(stored.corpus.train[: len(other.encode(document).ids)], other.encode(document).ids)


def test_the_tokenizer_of_other_tokens(tmp_path):
    (path := tmp_path / "text.txt").write_bytes(bytes(range(1, 256)) * 100)
    shards.write(str(path), tmp_path / "first", tokenizer="bpe", vocabulary=300)
    for name, tokenizer in {"second": tmp_path / "first", "third": tmp_path / "second/tokenizer.json"}.items():
        shards.write(str(path), tmp_path / name, tokenizer=str(tokenizer))
        assert (tmp_path / name / "index.json").read_bytes() == (tmp_path / "first/index.json").read_bytes()
    shards.write(str(path), tmp_path / "bytes")
    shards.write(str(path), tmp_path / "again", tokenizer=str(tmp_path / "bytes"))
    assert (tmp_path / "again/index.json").read_bytes() == (tmp_path / "bytes/index.json").read_bytes()


def test_large_documents_are_read_in_pieces_and_the_end_of_a_small_one_is_held_out(tmp_path):
    (path := tmp_path / "text.txt").write_bytes(TEXT * 40)  # five pieces, of which none is held out
    shards.write(str(path), tmp_path / "tokens")
    train, valid = (tokens_in(tmp_path / "tokens", part) for part in ("train", "valid"))
    assert np.concatenate([train, valid]).astype(np.uint8).tobytes() == TEXT * 40
    assert len(valid) == len(TEXT) * 40 // 128


def test_json_lines_are_documents(tmp_path):
    (path := tmp_path / "text.jsonl").write_text("".join(json.dumps({"body": f"line {number}"}) + "\n" for number in range(1000)))
    shards.write(str(path), tmp_path / "tokens", field="body")
    train, valid = (tokens_in(tmp_path / "tokens", part).astype(np.uint8).tobytes() for part in ("train", "valid"))
    lines = [f"line {number}".encode() for number in range(1000)]
    assert sorted(train.splitlines() + valid.splitlines()) == sorted(lines) and 0 < len(valid.splitlines()) < 30


# -- Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["iid", "contiguous"])
def test_batches_are_those_of_the_text_in_memory(corpus, tmp_path, partition):
    shards.write(str(corpus), tmp_path / "tokens")
    data = task_of(tmp_path / "tokens", partition=partition).load(4, 3, 7)
    task = registry.make("task", "lm", model=task_of("").model, path=str(corpus), partition=partition)
    expected = task.load(4, 3, 7)
    for worker, step in [(0, 0), (3, 5), (1, 1000)]:
        batch = data.batch(worker, step)
        np.testing.assert_array_equal(batch, expected.batch(worker, step))
        assert type(batch) is np.ndarray and batch.dtype == np.int32 and batch.shape == (3, CONTEXT + 1)
    np.testing.assert_array_equal(data.validation(5), expected.validation(5))
    assert data.facts() == {"bytes_per_token": 1.0} and data.fingerprint == task_of(tmp_path / "tokens").load(2, 1, 0).fingerprint


MEASURED = """
import resource, sys, time
from decjax.tasks import shards, text
pages = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, started = pages(), time.process_time()
stored = shards.load(sys.argv[1], 256)
dealt = [text.batches(stored.corpus, context=128, batch_size=4, num_workers=8, seed=0, partition=p) for p in ("iid", "contiguous")]
print(time.process_time() - started)
for step in range(50):
    assert [batch(step % 8, step).shape for batch in dealt] == [(4, 129)] * 2
print((pages() - before) / 2**20, pages() / 2**20)
"""


def test_ten_gigabytes_open_at_once_and_stay_on_disk(corpus, tmp_path):
    index = shards.write(str(corpus), tmp_path / "tokens")
    os.truncate(tmp_path / "tokens/train.bin", 10 * 2**30)  # a sparse file
    index["train"]["tokens"] = 5 * 2**30
    (tmp_path / "tokens/index.json").write_text(json.dumps(index))
    line = [sys.executable, "-c", MEASURED, str(tmp_path / "tokens")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=commands.ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    seconds, added_mb, total_mb = map(float, done.stdout.split())
    assert seconds < 1 and added_mb < 50 and total_mb < 300, done.stdout


def test_a_run_trains_and_continues_on_the_same_data_only(corpus, tmp_path):
    shards.write(str(corpus), tmp_path / "tokens", tokenizer="bpe", vocabulary=300)

    def config(steps):
        made = llama.get_config(f"smoke,workers=2,simulate,steps={steps},method=allreduce")
        made.data.update(path=str(tmp_path / "tokens"), tokenizer="shards")
        made.model.vocabulary = 300
        return made

    run = runs.run_of(config(6), tmp_path / "run")
    outcome = run.train()
    assert {"eval_loss_per_byte", "eval_perplexity", "bytes_per_token"} <= outcome.summary.keys()
    index = json.loads((tmp_path / "tokens/index.json").read_text())
    index["train"]["checksum"] = "00000000"
    (tmp_path / "tokens/index.json").write_text(json.dumps(index))
    runs.forget()
    with pytest.raises(Exception, match="the data have changed since step 6"):
        runs.run_of(config(6), tmp_path / "run")


# -- What is refused --------------------------------------------------------------------------------------------------


def problem_of(folder, vocabulary=256):
    with pytest.raises(ValueError) as error:
        shards.load(str(folder), vocabulary)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"data path {str(folder)!r} ")
    return str(error.value)


@pytest.fixture
def written(corpus, tmp_path):
    shards.write(str(corpus), tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.mark.parametrize(
    "fields, problem",
    [
        (dict(vocabulary=50257), "has a vocabulary of 50257 tokens, and model.vocabulary=256; use --config.model.vocabulary=50257"),
        (dict(vocabulary=90), "has token 11"),
        (dict(vocabulary=10**6), "has a vocabulary of 1000000 in tokens of dtype uint16; run launch.tokenize again"),
        (dict(dtype="uint32"), "and index.json says"),
        (dict(dtype="float32"), "has tokens of dtype 'float32'; use one of uint16, uint32"),
        (dict(dtype=["uint16"]), "has tokens of dtype"),
        (dict(format="text"), "has an index.json of another format or version"),
        (dict(version=2), "has an index.json of another format or version"),
        (dict(train=None), "has a damaged index.json: TypeError"),
        (dict(valid={}), "has a damaged index.json: KeyError"),
        (dict(tokenizer={"kind": "bpe"}), "tokenizer.json"),
    ],
)
def test_indexes_that_do_not_fit_are_refused(written, fields, problem):
    index = json.loads((written / "index.json").read_text()) | fields
    (written / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError) as error:
        shards.load(str(written), 256)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_damaged_files_are_refused(written, tmp_path):
    size = (written / "train.bin").stat().st_size
    os.truncate(written / "train.bin", size - 2)
    assert f"has {size - 2} bytes in train.bin, and index.json says {size}: it is truncated, or of another dtype" in problem_of(
        written
    )
    (written / "train.bin").unlink()
    assert "has no readable train.bin: No such file or directory" in problem_of(written)
    os.mkfifo(written / "train.bin")
    assert "has no readable train.bin: it is a pipe or a device" in problem_of(written)
    (written / "index.json").write_text("[")
    assert "has no readable index.json (Expecting value" in problem_of(written)
    assert "has no readable index.json (No such file or directory); give a folder" in problem_of(tmp_path)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--data=none_here"], "data path 'none_here' does not exist"),
        (["--data=docs", "--tokenizer=bpe"], "--tokenizer=bpe needs --vocabulary; use --vocabulary=4000"),
        (["--data=docs", "--vocabulary=300"], "--vocabulary has no effect with --tokenizer=bytes; leave it out"),
        (["--data=docs", "--tokenizer=README.md"], "'README.md' is not a tokenizer"),
        (
            ["--data=docs", "--tokenizer=words"],
            "'words' is not a tokenizer: No such file or directory; give the tokenizer.json of a model",
        ),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, arguments, problem):
    done = commands.run("launch.tokenize", *arguments, f"--out={tmp_path / 'tokens'}")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and problem in line


def test_the_command_writes_a_folder_once(corpus, tmp_path):
    line = ["launch.tokenize", f"--data={corpus}", f"--out={tmp_path / 'tokens'}", "--tokenizer=bpe", "--vocabulary=300"]
    done = commands.run(*line)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens for training" in done.stdout and "uint16 in" in done.stdout
    assert pathlib.Path(tmp_path / "tokens/tokenizer.json").exists()
    assert "has an index.json already; choose another --out" in commands.run(*line).stderr
