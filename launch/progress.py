"""How far a run is: one live line on a terminal, a plain line now and then in a file or a pipe."""

from collections.abc import Callable
import datetime
import math
import os
import sys
import time

import rich.console
import rich.progress

from decjax import train

PERIOD_S = 10.0  # between plain lines, at least
ROOMY = 100  # columns of a terminal that hold the consensus distance as well


class Progress(train.Tracker):
    """Shows step, loss, items/s, consensus distance and time left; and evaluations, on lines of their own above the live line.

    Where no terminal is, a line comes every `PERIOD_S` at most, with the newest of both; `metrics.jsonl` has all of them.

    Args:
        start: the step it begins at.
        steps: the step it ends at.
        items: what is counted, as "tokens".
        unit: of the loss, or nothing.
        clock: in seconds.
    """

    def __init__(self, start: int, steps: int, items: str, unit: str, clock: Callable[[], float] = time.monotonic):
        self._steps, self._items, self._unit = steps, items, f" {unit}" if unit else ""
        self._clock, self._said_s, self._newest = clock, -math.inf, {"train": "", "eval": ""}
        self._first: tuple[float, int] | None = None  # when the first row came, and its step: what is before was compilation
        self._live = live = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._console = rich.console.Console(file=sys.stdout, highlight=False, soft_wrap=True, force_terminal=live)
        self._roomy = not live or self._console.width >= ROOMY
        self._line = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}/{task.total}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=self._console,
            disable=not live,
            expand=True,
            speed_estimate_period=60,
            redirect_stderr=sys.stderr.isatty(),  # Else a file that takes the errors would miss them.
        )
        self._task = self._line.add_task("train", total=steps, completed=start, numbers="compiling …")
        self._line.start()

    def close(self):
        self._line.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def step(self, step):
        self._line.update(self._task, completed=step)

    def log(self, step, kind, values):
        consensus = [f"consensus {values['consensus_distance']:.2e}"] if self._roomy else []
        if kind == "train":
            loss, rate = f"loss {values['loss']:.3f}", f"{values[f'{self._items}_per_s']:,.0f} {self._items}/s"
            self._line.update(self._task, numbers="  ".join((loss, rate, *consensus)))
            text = "  ".join((f"step {step}/{self._steps}", loss + self._unit, rate, *consensus, *self._left(step)))
        else:
            average = f"averaged model {values['loss']:.4f}{self._unit}"
            workers = [f"workers {values['loss_min']:.4f} to {values['loss_max']:.4f}"] if "loss_min" in values else []
            text = f"step {step} evaluated: {', '.join((average, *workers, *consensus))}"
        if not self._live:
            self._newest[kind] = text
            self._say_newest()
        elif kind == "eval":
            self.say(text)

    def _left(self, step: int) -> list[str]:
        """The time left, from the second row on."""
        now_s = self._clock()
        if self._first is None:
            self._first = now_s, step
            return []
        left_s = (now_s - self._first[0]) / (step - self._first[1]) * (self._steps - step)
        return [f"{datetime.timedelta(seconds=round(left_s))} left"]

    def _say_newest(self) -> None:
        if self._clock() - self._said_s >= PERIOD_S:
            self._said_s = self._clock()
            self.say("; ".join(filter(None, self._newest.values())))
            self._newest = dict.fromkeys(self._newest, "")


def of_run(run: train.Run) -> Progress:
    """The progress of a run; what the run is, and where it goes on, is said at once."""
    task = run.trainer.setup.task
    shown = Progress(run.start, run.spec.steps, task.item, task.metrics["loss"].unit)
    shown.say("\n".join(filter(None, (run.title(), run.note))))
    return shown
