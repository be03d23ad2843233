"""launch/progress.py: one live line on a terminal, a line every ten seconds in a pipe."""

import io
import os
import pty
import re
import sys
import threading

import pytest

from launch import progress

TRAIN = {"loss": 2.34567, "tokens_per_s": 12345.6, "consensus_distance": 0.0123}
EVALUATION = {"loss": 2.4, "loss_min": 2.41, "loss_max": 2.43, "consensus_distance": 0.0123}


@pytest.fixture
def piped(monkeypatch):
    """A progress display in a pipe, of 1000 steps; a manual clock; the lines since the last read."""
    now_s, pipe = [50.0], io.StringIO()

    def lines():
        new = pipe.getvalue().splitlines()
        pipe.seek(0)
        pipe.truncate()
        return new

    monkeypatch.setattr(sys, "stdout", pipe)
    shown = progress.Progress(0, 1000, "tokens", "nats/byte", clock=lambda: now_s[0])
    yield shown, now_s, lines
    shown.close()


def test_a_pipe_gets_a_line_in_ten_seconds_at_most(piped):
    """A training row every half second, an evaluation with every fifth: never two lines within ten seconds."""
    shown, now_s, lines = piped
    told = {}  # when -> what
    for row in range(100):
        shown.step(row + 1)
        shown.log(row + 1, "train", TRAIN)
        if row % 5 == 4:
            shown.log(row + 1, "eval", EVALUATION)
        if new := lines():
            (told[now_s[0]],) = new
        now_s[0] += 0.5
    assert [*told] == [50.0, 60.0, 70.0, 80.0, 90.0]
    assert told[50.0] == "step 1/1000  loss 2.346 nats/byte  12,346 tokens/s  consensus 1.23e-02"
    line, evaluation = told[60.0].split("; ")
    assert line.startswith("step 21/1000 ") and line.endswith(" 0:08:10 left")
    assert evaluation == ("step 20 evaluated: averaged model 2.4000 nats/byte, workers 2.4100 to 2.4300, consensus 1.23e-02")


def test_utilization_is_next_to_the_rate(piped):
    shown, _, lines = piped
    shown.log(1, "train", TRAIN | {"mfu": 0.4123})
    assert lines() == ["step 1/1000  loss 2.346 nats/byte  12,346 tokens/s  MFU 41.2 %  consensus 1.23e-02"]


def test_an_evaluation_that_no_row_follows_is_told_by_itself(piped):
    shown, now_s, lines = piped
    shown.log(1, "train", TRAIN)
    now_s[0] += 10
    shown.log(1, "eval", EVALUATION)
    now_s[0] += 10
    shown.log(2, "eval", {name: value for name, value in EVALUATION.items() if name not in ("loss_min", "loss_max")})
    told = lines()
    assert [line.partition("  ")[0][:18] for line in told] == ["step 1/1000", "step 1 evaluated: ", "step 2 evaluated: "]
    assert "workers" not in told[-1]


def test_colour_that_is_forced_makes_no_terminal_of_a_pipe(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = progress.Progress(0, 10, "images", "")
    shown.log(1, "train", TRAIN | {"images_per_s": 5.0})
    shown.close()
    assert capsys.readouterr().out == "step 1/10  loss 2.346  5 images/s  consensus 1.23e-02\n"


# -- On a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """Return what a terminal of some width shows of the text written to it."""

    def __init__(self, columns):
        self.columns, (self._near, far) = columns, pty.openpty()
        self.file = os.fdopen(far, "w", buffering=1)
        self._raw = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        try:
            while piece := os.read(self._near, 4096):
                self._raw += piece
        except OSError:  # the other end is closed
            return

    def rows(self):
        """Return what remains visible once nothing more is written."""
        self.file.close()
        self._reader.join()
        rows, x = [""], 0
        for code, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", self._raw.decode()):
            if code == "\r":
                x = 0
            elif code == "\n":
                rows, x = [*rows, ""], 0
            elif code == "\x1b[2K":
                rows[-1] = ""
            else:
                assert text or code[-1] in "mhl", f"unknown to this terminal: {code!r}"
            for letter in text:
                if x == self.columns:  # only the next letter moves to the next row
                    rows, x = [*rows, ""], 0
                rows[-1], x = rows[-1][:x].ljust(x) + letter + rows[-1][x + 1 :], x + 1
        return [row.rstrip() for row in rows if row.strip()]


@pytest.mark.parametrize("columns, roomy", [(80, False), (100, True)])
def test_a_terminal_has_one_live_line_that_warnings_do_not_mangle(monkeypatch, columns, roomy):
    terminal = Terminal(columns)
    for name, value in {"COLUMNS": str(columns), "LINES": "30", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, terminal.file)
    shown = progress.Progress(0, 20_000, "tokens", "nats/byte")
    shown.say("8 workers on 8 cpu devices")
    for step in range(1, 400):
        shown.step(step)
        shown.log(step, "train", TRAIN | {"tokens_per_s": 123456.7})
        if step == 100:
            print("warning: careful", file=sys.stderr)
        if step == 200:
            shown.log(step, "eval", EVALUATION)
    shown.close()
    said, warned, evaluated, live = terminal.rows()
    assert (said, warned) == ("8 workers on 8 cpu devices", "warning: careful")
    assert evaluated == "step 200 evaluated: averaged model 2.4000 nats/byte, workers 2.4100 to 2.4300" + (
        ", consensus 1.23e-02" if roomy else ""
    )
    assert re.fullmatch(r"step 399/20000 [━╸╺ ]+ loss 2\.346  123,457 tokens/s( +consensus 1\.23e-02)? \d+:\d\d:\d\d left", live)
    assert ("consensus" in live) == roomy and len(live) <= columns


def test_what_goes_to_a_file_of_errors_stays_there(monkeypatch, tmp_path):
    terminal = Terminal(80)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal.file)
    with (tmp_path / "errors").open("w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        shown = progress.Progress(0, 10, "tokens", "")
        print("warning: careful", file=sys.stderr)
        shown.close()
    assert (tmp_path / "errors").read_text() == "warning: careful\n"
    assert not [row for row in terminal.rows() if "careful" in row]
