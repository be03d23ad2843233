"""Terminal output: control characters of data and models are escaped, no terminal encoding ends a command; and unusual inputs."""

import os
import subprocess
import sys

import numpy as np
import pytest

from decjax import costmodel, mesh
from decjax.contrib import placement
from decjax.tasks import bpe
from launch import command


def test_control_characters_are_escaped():
    text = "a\tb\n" + "".join(map(chr, range(32))).replace("\t", "").replace("\n", "") + "\x7f\x9b31m\u202e\ud800é→"
    shown = command.printable(text)
    assert shown.startswith("a\tb\n\\x00\\x01") and shown.endswith("\\x1f\\x7f\\x9b31m\\u202e\\ud800é→")
    assert all(char.isprintable() or char in "\t\n" for char in shown)


def test_an_error_shows_no_control_characters(capsys):
    with pytest.raises(SystemExit):
        command.fail("unknown field '\x1b[2J'\nand more")
    assert capsys.readouterr().err == "error: unknown field '\\x1b[2J' and more\n"


def test_output_that_a_terminal_cannot_encode_does_not_end_a_command():
    code = "from launch import command; command.run(lambda argv: print('2 → 3'))"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2 \\u2192 3\n", "")


def test_names_in_files_have_no_control_characters():
    matrices = np.zeros((2, 2)), np.ones((2, 2))
    with pytest.raises(ValueError, match="devices='.*x1b.* must be text without control characters"):
        placement.Links(*matrices, names=("a\x1b[2J", "b"))
    link = costmodel.Link(1e-3, 1e6)
    with pytest.raises(ValueError, match="name='.*x1b.* must be text without control characters"):
        costmodel.Cluster("a\x1b[2J", 2, 1, link, link)


def test_unlike_batches_name_the_worker():
    workers = mesh.make_workers(4, simulate=True)
    with pytest.raises(ValueError, match=r"worker 2: array \['x'\] is \(2, 3\) of float32, and \(3, 3\) of float32 on worker 0"):
        workers.build(lambda worker: {"x": np.zeros((3 - (worker == 2), 3), np.float32)})
    with pytest.raises(ValueError, match=r"worker 1: array is \(2,\) of int32, and \(2,\) of float32 on worker 0"):
        workers.build(lambda worker: np.zeros(2, np.int32 if worker else np.float32))
    with pytest.raises(ValueError, match=r"worker 1: array \['y'\] is missing, and \(2,\) of float32 on worker 0"):
        workers.build(lambda worker: dict.fromkeys("xy" if not worker else "x", np.zeros(2, np.float32)))


def test_a_word_without_end_is_cut():
    """Training time grew with the square of a word's length: a line of 100,000 letters took 7 s."""
    line = bytes(np.random.default_rng(0).choice(np.frombuffer(b"abcdefgh", np.uint8), 5000))
    coder = bpe.train([line], 300)
    words = coder.tokenizer.pre_tokenizer.pre_tokenize_str(line.decode())
    assert [len(word) for word, _ in words] == [1024] * 4 + [5000 - 4096]
    assert coder.decode(np.concatenate(coder.encode([line]))) == line


def test_links_that_are_arrays_are_taken_as_such(monkeypatch):
    """4,000 connections took 25 s: their matrices were converted to lists of Python numbers."""
    matrix = np.ones((64, 64))
    monkeypatch.setattr(np, "array", lambda *args, **options: pytest.fail("an array was walked through"))
    links = placement.Links(matrix, matrix)
    assert (links.latency_s.diagonal() == 0).all() and (matrix == 1).all()
