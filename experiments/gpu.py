"""One GPU: MFU, the cost of codecs and mixers, the compiler's schedule, and loss against tokens of 124M parameters.

    python -m experiments.gpu --results=experiments/results/gpu.jsonl --pages=docs
    python -m experiments.gpu --part=mfu,codecs --minutes=9
    python -m experiments.gpu --smoke

Needs one H100 or H200, and begins no row after 20 minutes; `--smoke` measures tiny models on CPU. Workers are simulated. Parts:

    mfu        a training step of 124M, 350M and 1B parameters (configs/llama.py), of one worker and of eight
    loss       validation loss of 124M parameters and eight workers on the Python sources of this machine, against tokens
    codecs     speed of encoding and decoding, compared with a copy in the memory of the GPU
    options    options of XLA that start messages early, and whether the compiler accepts them
    schedules  where the compiler schedules messages between several GPUs
    overhead   update of each codec and mixer of gossip, compared with all-reduce and uncompressed gossip

A row is written to the results log when it is complete, so the same command continues. Remove its line to measure a row again.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import math
import pathlib
import time
from typing import NamedTuple

from absl import flags

from experiments import race_rows, script, trials
from experiments.bench import codecs, gpu_parts, overlap
from experiments.bench.gpu_parts import GOSSIP, Numbers, Scale
from experiments.results_log import ResultsLog
from launch import command

FLAGS = flags.FLAGS

RUN_S, MOST_TOKENS = 90, 1e8  # of a run of the part loss: seconds, about, and tokens, at most
FIRST, TIMED = "all-reduce fp32", "124M, 8 workers"  # rows that others are compared with
LOSS = (FIRST, "gossip fp32", "gossip int8", "MuLoCo int4, H = 16")  # of `race_rows.ROWS`
MUON = ",consistent_rms=0.2,outer_learning_rate=0.5,outer_momentum=0.5"  # updates as large as AdamW's, so that its rate fits
FORMS = codecs.VARIANTS | {"bounded": "bounded(raw=False)"}  # whose messages have one size
KINDS = {"1 worker": "workers=1,method=local", "8 workers": GOSSIP}
SMOKE_ROWS = ("124M, 1 worker", TIMED, FIRST, LOSS[-1], "int8", "codec int8", "mixer choco", *gpu_parts.OPTIONS, "schedule of ring")
NOT_MEASURED = "Not measured yet."


class Row(NamedTuple):
    """A row of the tables."""

    name: str
    part: str  # of COLUMNS; empty: in no table
    measure: Callable[..., Numbers]  # of (scale); of the part loss, of (steps, folder of the text, scale)


def _training(name: str) -> Callable[..., Numbers]:
    method = race_rows.ROWS[name]
    return functools.partial(gpu_parts.loss, method.shorthand + MUON * (method.optimizer == race_rows.MUON))


def _rows() -> list[Row]:
    of = functools.partial
    coded = {f"codec {name}": f"codec={FORMS.get(name, name)}" for name in codecs.ROWS if name != "identity"}
    mixed = {f"mixer {name}": f"mixer={name}" for name in gpu_parts.MIXERS}
    return [
        *(Row(f"{size}, {who}", "mfu", of(gpu_parts.step, size, how)) for size in gpu_parts.BATCH for who, how in KINDS.items()),
        *(Row(name, "loss", _training(name)) for name in LOSS),
        *(Row(name, "codecs", of(gpu_parts.codec, name)) for name in codecs.ROWS),
        *(Row(name, "options", of(gpu_parts.option, name)) for name in gpu_parts.OPTIONS),
        *(Row(f"schedule of {name}", "schedules", of(gpu_parts.schedule, name)) for name in overlap.METHODS),
        *(Row(name, "overhead", of(gpu_parts.overhead, how)) for name, how in (coded | mixed).items()),
    ]


CARD = Row("card", "", gpu_parts.card)
ROWS = {row.name: row for row in (CARD, *_rows())}
Results = Mapping[str, Numbers]  # of the complete rows, by name


class Here(trials.Pool):
    """Stands for the runs of a results log, whose rows are measured in this process."""

    def train(self, trial: trials.Trial) -> bool:
        return True


class Measured(NamedTuple):
    """The results log, and how its missing rows are measured."""

    log: ResultsLog
    scale: Scale
    out: pathlib.Path

    def numbers(self, name: str) -> Numbers:
        """Return the numbers of a row, which is measured if it is missing; `failed` is the reason why there are none.

        Raises:
            trials.NoData: if it is missing, and the log is one that is only read.
        """
        trial = trials.Trial(self.out, "experiments.gpu", (("row", name),))
        measure = functools.partial(self._measure, name)
        numbers = self.log.result(trial, lambda _: measure() if name == CARD.name else gpu_parts.numbers(measure))
        assert numbers is not None  # as for a run that diverged
        return numbers

    def _measure(self, name: str) -> Numbers:
        if ROWS[name].part != "loss":
            return ROWS[name].measure(self.scale)
        if "failed" in (timed := self.numbers(TIMED)):
            return timed
        steps = int(min(MOST_TOKENS / timed["tokens"], RUN_S / timed["step_s"])) // gpu_parts.PERIOD * gpu_parts.PERIOD
        _, text = gpu_parts.text(self.out, self.scale)
        if any(text != numbers.get("text", text) for numbers in self.complete().values()):
            command.fail("the results log has losses on another text than that of this machine; give another --results")
        return ROWS[name].measure(gpu_parts.PERIOD if self.scale.smoke else steps, self.out, self.scale)

    def complete(self) -> Results:
        """Return the rows that are complete."""
        found, recorded = {}, self._replace(log=self.log.recorded())
        for name in ROWS:
            with contextlib.suppress(trials.NoData):
                found[name] = recorded.numbers(name)
        return found


def read(path: pathlib.Path) -> Results:
    """Return the rows that are complete in a results log."""
    return Measured(ResultsLog(path), Scale(), path.parent).complete()


# -- The page ---------------------------------------------------------------------------------------------------------


def curves(results: Results) -> dict[str, list[tuple[float, float]]]:
    """Return (tokens, validation loss) of each method of the part loss."""
    return {name: results[name]["losses"] for name in LOSS if "losses" in results.get(name, {})}


def blocks(results: Results) -> dict[str, str]:
    """Return what the command writes into the page, as Markdown, by the name of the place."""
    shown = {"gpu_answer": _answer(results)}
    for part, (columns, cells) in COLUMNS.items():
        table = script.table("", *columns)
        for name in (name for name, row in ROWS.items() if row.part == part and name in results):
            failed = results[name].get("failed")
            table.add_row(name, *((failed, *"–" * (len(columns) - 1)) if failed else cells(results[name], results)))
        shown[f"gpu_{part}"] = script.markdown(table) if table.row_count else NOT_MEASURED
    if curves(results):
        shown["gpu_loss"] += "\n\n![Validation loss against tokens, one line per method](../images/gpu.png)"
    return shown


def _mfu(row: Numbers, results: Results) -> Sequence[str]:
    tokens_per_s = row["tokens"] / row["step_s"]
    return script.ms(row["step_s"]), f"{tokens_per_s:,.0f}", _percent(row["mfu"]), f"{row['gib']:.1f}"


def _loss(row: Numbers, results: Results) -> Sequence[str]:
    (tokens, last), first = row["losses"][-1], curves(results).get(FIRST)
    compared = script.difference(last, first[-1][1]) if first else "–"
    text = row["text"]["tokens"]
    return f"{tokens / 1e6:.1f}", f"{last:.3f}", compared, f"{row['sent_bytes'] / 1e6:,.1f}", f"{text / 1e6:.0f}"


def _codec(row: Numbers, results: Results) -> Sequence[str]:
    copied_GBps = results.get(CARD.name, {}).get("copy_GBps", math.nan) / 2  # of values; a copy reads and writes them
    speeds = [row[part] for part in ("encode", "decode", "both")]
    return f"{row['smaller']:.3g}", *(f"{x * copied_GBps:,.0f}" for x in speeds[:2]), *(f"{x:.2f}" for x in speeds)


def _overhead(row: Numbers, results: Results) -> Sequence[str]:
    return f"{1e3 * row['update_s']:.1f}", f"{row['to_gossip']:.2f}", f"{row['to_all_reduce']:.2f}", _of_step(row, results)


Cells = Callable[[Numbers, Results], Sequence[str]]
COLUMNS: Mapping[str, tuple[Sequence[str], Cells]] = {  # of the table of each part
    "mfu": (("ms per step", "tokens/s", "MFU", "GiB"), _mfu),
    "loss": (("million tokens", "nats/token", "vs. all-reduce", "MB sent by a worker per step", "million tokens of text"), _loss),
    "codecs": (("times smaller", "encode, GB/s", "decode, GB/s", "encode ÷ copy", "decode ÷ copy", "both ÷ copy"), _codec),
    "options": (("compiler",), lambda row, results: (f"accepts {row['value']}",)),
    "schedules": (
        ("GPUs", "messages", "asynchronous", "starts, %", "ends, %", "meanwhile, %"),
        lambda row, results: (row["devices"], *row["cells"]),
    ),
    "overhead": (("update, ms", "÷ gossip", "÷ all-reduce", "of a step"), _overhead),
}


def _answer(results: Results) -> str:
    """Return the first lines of the page."""
    if CARD.name not in results:
        return f"**Answer.** {NOT_MEASURED} No GPU was available."
    card, answer = results[CARD.name], []
    if mfu := [f"{_percent(row['mfu'])} ({name})" for name, row in results.items() if row.get("mfu")]:
        answer.append(f"MFU of a step is {', '.join(mfu)}.")
    if "more_s" in (row := results.get("codec int8", {})):
        answer.append(f"int8 messages change the time of a gossip step ({TIMED}) by {_of_step(row, results)}.")
    if "both" in (row := results.get("int8", {})):
        answer.append(f"int8 encodes and decodes at {row['both']:.2f} of the speed of a copy.")
    on = f"{card['device']}, {card['copy_GBps']:,.0f} GB/s for a copy in its memory, JAX {card['jax']}, {card['day']}."
    return f"**Answer.** {' '.join(answer)}\n\n{on}"


def _of_step(row: Numbers, results: Results) -> str:
    """Return the time of an update beyond that of uncompressed gossip as a share of a step."""
    return _percent(row["more_s"] / results.get(TIMED, {}).get("step_s", math.nan))


def _percent(share: float | None) -> str:
    return f"{100 * share:.1f} %" if share is not None and math.isfinite(share) else "–"


def draw(path: str, results: Results) -> None:
    """Draw validation loss against tokens."""
    with script.panels(path, 1, (6.4, 4.2), "lower is better") as (axis,):
        for color, (name, losses) in zip(script.COLORS, curves(results).items()):
            axis.plot([tokens / 1e6 for tokens, _ in losses[1:]], [loss for _, loss in losses[1:]], color=color, label=name)
        axis.set(xlabel="million tokens", ylabel="validation loss, nats/token")
        axis.legend(frameon=False)


def main() -> None:
    script.check_names("part", FLAGS.part, list(COLUMNS))
    names = [row.name for row in script.choose(list(ROWS.values())[1:], FLAGS.row) if row.part in FLAGS.part]
    names = [name for name in names if name in SMOKE_ROWS] if FLAGS.smoke and not FLAGS.row else names
    script.check_tables(*blocks({}))
    end_s = time.monotonic() + 60 * FLAGS.minutes
    device, out = gpu_parts.start(FLAGS.smoke), script.folder()
    log = ResultsLog.of(out, FLAGS.results, Here())
    measured = Measured(log, gpu_parts.SMOKE if FLAGS.smoke else Scale(), out)
    if (card := measured.numbers(CARD.name)["device"]) != device:
        command.fail(f"the results log has rows of {card}, and this machine has {device}; give another --results")
    left = [name for name in names if name not in measured.complete()]
    while left and time.monotonic() < end_s:
        script.show(f"{left[0]}: {measured.numbers(left[0])}"[:140])
        left.pop(0)
    results = measured.complete()
    for name, block in blocks(results).items():
        script.show(f"\n{name}", block)
        script.fill(name, block)
    if curves(results):
        script.draw_on_pages("gpu", functools.partial(draw, results=results))
    if left:
        script.show(f"{len(left)} rows are left after {FLAGS.minutes:g} minutes; the same command continues with {left[0]}")


if __name__ == "__main__":
    script.define("out", "row", "results", "pages", "smoke", out="runs/gpu")
    flags.DEFINE_list("part", list(COLUMNS), "Parts to measure.")
    script.selects("part")
    flags.DEFINE_float("minutes", 20.0, "After so many minutes no further row is begun.", lower_bound=0.0)
    script.run(main, (trials.Broken, gpu_parts.OutOfMemory, ValueError))
