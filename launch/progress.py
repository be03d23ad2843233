"""Progress of a run: a live line in a terminal, or plain lines in a file or pipe."""

from collections.abc import Callable
import datetime
import math
import os
import sys
import time

import rich.console
import rich.progress

from decjax import train

PERIOD_S = 10.0  # minimum between plain lines
ROOMY = 100  # columns of a terminal with room for the consensus distance


class Progress(train.Tracker):
    """Prints step, loss, items/s, MFU, consensus distance and time left; evaluations are on lines above the live line.

    Without a terminal it prints at most one line per `PERIOD_S` with the newest values; `metrics.jsonl` has all of them.

    Args:
        start: first step.
        steps: last step.
        items: unit of throughput, such as "tokens".
        unit: of the loss, or "".
        clock: in seconds.
    """

    def __init__(self, start: int, steps: int, items: str, unit: str, clock: Callable[[], float] = time.monotonic):
        self._steps, self._items, self._unit = steps, items, f" {unit}" if unit else ""
        self._clock, self._printed_s, self._newest = clock, -math.inf, {"train": "", "eval": ""}
        self._first: tuple[float, int] | None = None  # (time, step) of the first row, after compilation
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
            redirect_stderr=sys.stderr.isatty(),  # Otherwise a file with the errors would miss them.
        )
        self._task = self._line.add_task("train", total=steps, completed=start, numbers="compiling …")
        self._line.start()

    def close(self):
        self._line.stop()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False)

    def step(self, step):
        self._line.update(self._task, completed=step)

    def log(self, step, kind, values):
        consensus = [f"consensus {values['consensus_distance']:.2e}"] if self._roomy else []
        if kind == "train":
            loss, rate = f"loss {values['loss']:.3f}", f"{values[f'{self._items}_per_s']:,.0f} {self._items}/s"
            rate += f"  MFU {100 * values['mfu']:.1f} %" if "mfu" in values else ""
            self._line.update(self._task, numbers="  ".join((loss, rate, *consensus)))
            text = "  ".join((f"step {step}/{self._steps}", loss + self._unit, rate, *consensus, *self._left(step)))
        else:
            average = f"averaged model {values['loss']:.4f}{self._unit}"
            workers = [f"workers {values['loss_min']:.4f} to {values['loss_max']:.4f}"] if "loss_min" in values else []
            text = f"step {step} evaluated: {', '.join((average, *workers, *consensus))}"
        if not self._live:
            self._newest[kind] = text
            self._print_newest()
        elif kind == "eval":
            self.say(text)

    def _left(self, step: int) -> list[str]:
        """Return the remaining time, from the second row on."""
        now_s = self._clock()
        if self._first is None:
            self._first = now_s, step
            return []
        left_s = (now_s - self._first[0]) / (step - self._first[1]) * (self._steps - step)
        return [f"{datetime.timedelta(seconds=round(left_s))} left"]

    def _print_newest(self) -> None:
        if self._clock() - self._printed_s >= PERIOD_S:
            self._printed_s = self._clock()
            self.say("; ".join(filter(None, self._newest.values())))
            self._newest = dict.fromkeys(self._newest, "")


def of_run(run: train.Run) -> Progress:
    """Return the progress of a run, after printing its title."""
    task = run.trainer.setup.task
    progress = Progress(run.start, run.spec.steps, task.item, task.metrics["loss"])
    progress.say("\n".join(filter(None, (run.title(), run.note))))
    return progress
