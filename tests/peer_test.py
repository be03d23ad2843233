"""experiments/bench/timing: another interpreter answers requests, or explains on one line why not."""

import os
import pathlib
import sys

import pytest

from experiments.bench.timing import Peer
from launch import command

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAND_IN = """
import sys
from experiments.bench.cluster.serve import serve
serve({"version": lambda: sys.argv[1], "repeat": lambda text, count: count * text, "leave": sys.exit})
"""


def test_a_peer_answers_until_it_leaves(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT))))
    peer = Peer(sys.executable, "stand_in", "2.13")
    assert peer.version == "2.13" and peer.ask("repeat", text="ab", count=2) == "abab"
    for _ in range(2):  # while it exits, and after it has
        with pytest.raises(command.UserError, match=f"--peers={sys.executable}: no answer; give an interpreter with the packages"):
            peer.ask("leave")


def test_an_interpreter_that_is_not_there_is_told():
    with pytest.raises(command.UserError, match="--peers=/no/such/python: No such file or directory; give an interpreter"):
        Peer("/no/such/python", "stand_in")
