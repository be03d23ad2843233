"""What compression on every axis of 3D parallelism costs in loss: Optimus-CC's techniques, and what related studies found.

    python -m experiments.optimus --workdir=runs/optimus --markdown --out=docs/images/optimus.png

One run of configs/gpt_optimus.py:size=tiny for each row: 2 workers of 4 stages, 1F1B with 16 microbatches of a sequence, on real
text; equal steps, equal data, the learning rate of the uncompressed baseline: nothing was tuned for compression. Finished runs are not
repeated.

    A   CB: gradients between stages in the cool-down at rank 16 of 64; their error is added to the next (lazy error propagation),
        the last error of a step to the first gradient of the next step ("flush"); the same with other memories, and in blocks of
        4 bits;
        FE: one average of the tied embedding; SC: PowerSGD of the first 3 of 4 stages. Speed-ups are those of GPT-2.5B that
        experiments.optimus_runtime predicts for the published system, whose messages overlap with the passes.
    B   every gradient between stages at rank 1, 32 times fewer bytes, with several memories of the error.
    C   the same top-k on gradients only and on activations only, without error memory; then a learned linear autoencoder of width R,
        which sends R/D of the values both ways, and top-k with as many bytes, with indices of its own or those of the activations.

Loss is that of the averaged model on all of the validation text; "coded": with activations coded as in training. Bytes are those
of the compiled program, means over workers. The figure: the loss, and the cosine that lazy error propagation relies on
(bench.error_cosine).
"""

import json
import pathlib
import subprocess
import sys

from absl import flags
import numpy as np

from experiments import optimus_runtime, script, sweep, trials
from experiments import rows as rows_lib
from experiments.rows import Row
from experiments.trials import Trial
from launch import command, processes

FLAGS = flags.FLAGS

CONFIG = "configs/gpt_optimus.py"
PLAIN = "size=tiny,fused=false,reducer=mean"  # with the cool-down's gradients compressed, as is the default
UNREMEMBERED = ("boundary.when=always", "boundary.error=none")


def row(name: str, shorthand: str, *fields: str) -> Row:
    """Return a row that is compared with the baseline."""
    return Row(name, shorthand, fields, "baseline")


BASELINE = row("baseline", f"{PLAIN},backward=none")
CB = row("CB", PLAIN)
TECHNIQUES = (
    BASELINE,
    row("baseline, another seed", BASELINE.shorthand, "seed=1"),
    CB,
    row("CB, error carried", PLAIN, "boundary.error=carry"),
    row("CB, forgotten after each step", PLAIN, "boundary.error=reset"),
    row("CB, not remembered", PLAIN, "boundary.error=none"),
    row("CB, int4", PLAIN, "boundary.backward=int4"),
    row("CB+FE", "size=tiny,reducer=mean"),
    row("CB+FE+SC", "size=tiny"),
)
MEMORIES = tuple(
    row(name, f"{PLAIN},backward=low_rank(rank=1)", "boundary.when=always", f"boundary.error={error}")
    for name, error in (
        ("carried (LEP)", "carry"),
        ("forgotten after each step", "reset"),
        ("EF21", "ef21"),
        ("not remembered", "none"),
    )
)
SIXTH, FIFTH = "topk(fraction=0.1667)", "topk(fraction=0.2)"
FINDINGS = (
    row("gradients, top-k 10 %", f"{PLAIN},backward=topk(fraction=0.1)", *UNREMEMBERED),
    row("activations, top-k 10 %", f"{PLAIN},backward=none,forward=topk(fraction=0.1)"),
    row("gradients, top-k 2 %", f"{PLAIN},backward=topk(fraction=0.02)", *UNREMEMBERED),
    row("activations, top-k 2 %", f"{PLAIN},backward=none,forward=topk(fraction=0.02)"),
    row("autoencoder, R = D/4", f"{PLAIN},backward=none,autoencoder=16"),
    row("top-k 1/6, own indices", f"{PLAIN},forward={SIXTH},backward={SIXTH}", *UNREMEMBERED),
    row("top-k 1/5, shared indices", f"{PLAIN},forward={FIFTH},backward=identity", *UNREMEMBERED, "boundary.reuse_indices=true"),
)
ROWS = (*TECHNIQUES, *MEMORIES, *FINDINGS)


def techniques(summaries: rows_lib.Summaries, markdown: bool) -> script.Table:
    """Return table A: the techniques of Optimus-CC."""
    predicted = {name.split(" ")[0]: (name, p.time_s) for name, p in optimus_runtime.predict("2.5b").items()}
    columns = ("", "kB between stages", "kB between workers", "loss", "vs. baseline", "predicted speed-up, 2.5B")
    table = rows_lib.table(columns, markdown, "A. Techniques")
    for row in _chosen(TECHNIQUES, summaries):
        speedup = ""
        if row.name in predicted and row != BASELINE:
            name, time_s = predicted[row.name]
            speedup = f"{predicted[BASELINE.name][1] / time_s:.3f}" + (f" (SC {name[-1]})" if name != row.name else "")
        table.add_row(row.name, *_bytes(row, summaries), *_loss(row, summaries), speedup)
    return table


def memories(summaries: rows_lib.Summaries, markdown: bool) -> script.Table:
    """Return table B: memories of the compression error."""
    title = "B. Every gradient between stages, rank 1: what is remembered of the error"
    made = rows_lib.table(("", "kB between stages", "loss", "vs. baseline"), markdown, title)
    for row in _chosen((BASELINE, *MEMORIES), summaries):
        made.add_row(row.name, _bytes(row, summaries)[0], *_loss(row, summaries))
    return made


def findings(summaries: rows_lib.Summaries, markdown: bool) -> script.Table:
    """Return table C: findings of related studies, on compressed gradients and activations."""
    columns = ("", "kB between stages", "loss", "vs. baseline", "loss, coded", "vs. baseline")
    made = rows_lib.table(columns, markdown, "C. Gradients and activations")
    for row in _chosen((BASELINE, *FINDINGS), summaries):
        coded = _loss(row, summaries, "eval_loss_coded")
        made.add_row(row.name, _bytes(row, summaries)[0], *_loss(row, summaries), *coded)
    return made


def _chosen(rows: tuple[Row, ...], summaries: rows_lib.Summaries) -> list[Row]:
    return [row for row in rows if row.name in summaries]


def _bytes(row: Row, summaries: rows_lib.Summaries) -> list[str]:
    """Return the kB that a worker sends per step between stages and between workers."""
    summary = summaries[row.name]
    return [f"{summary[name] / 1e3:.1f}" if summary else "" for name in (rows_lib.STAGE_BYTES, rows_lib.BYTES)]


def _loss(row: Row, summaries: rows_lib.Summaries, name: str = "eval_loss") -> tuple[str, str]:
    """Return a loss and its difference from the baseline's."""
    summary, reference = summaries[row.name], summaries[BASELINE.name]
    if not summary:
        return "diverged", ""
    if name not in summary:
        return "", ""
    more = script.difference(summary[name], reference["eval_loss"], 2) if reference and row != BASELINE else ""
    return f"{summary[name]:.4f}", more


def training_loss(run: Trial) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, training loss as a mean over five logged steps)."""
    step_K, loss_K = np.array([(row["step"], row["loss"]) for row in run.rows("train")]).T
    window = min(5, len(loss_K))
    return step_K[window - 1 :], np.convolve(loss_K, np.full(window, 1 / window), "valid")


def cosines(run: Trial) -> dict:
    """Return the output of `bench.error_cosine` for a run's config, which it trains unless that is done."""
    path = run.workdir.with_suffix(".cosines.json")
    if not path.exists():
        line = [sys.executable, "-m", "experiments.bench.error_cosine", f"--out={path}", *run.config_arguments]
        if code := subprocess.run(line, check=False).returncode:
            raise trials.Broken(f"experiments.bench.error_cosine {processes.how_it_ended(code)}; the same command continues")
    return json.loads(path.read_text())


def draw(curves: dict[str, tuple[np.ndarray, np.ndarray]], found: dict, out: str) -> None:
    """Draw training losses by name, and the cosines in the output of `bench.error_cosine`."""
    with script.panels(out, 2, (11, 3.8), dpi=130) as (left, right):
        for name, (step_K, loss_K) in curves.items():
            left.plot(step_K, loss_K, label=name, linewidth=1.2)
        left.set(xlabel="step", ylabel="training loss, nats/byte", title="every gradient at rank 1, and CB")
        left.legend(frameon=False, ncols=2)
        step_K = np.array(found["step"])
        for stage, cosines in found["cosines"].items():
            cosine_KxM = np.array(cosines, float)
            right.plot(step_K, cosine_KxM, ".", markersize=2, color=f"C{stage}", alpha=0.3)
            label = f"stage {stage} to {int(stage) - 1}: mean {np.nanmean(cosine_KxM):+.3f}"
            right.plot([], [], "o", color=f"C{stage}", label=label)
        right.axhline(0, color="0.5", linewidth=0.8)
        title = "what lazy error propagation rests on (CB)"
        right.set(xlabel="step", ylabel=r"cos($e$, $X_j - X_{j+1}$)", ylim=(-1, 1), title=title)
        right.legend(frameon=False)


def main() -> int:
    rows, workdir = rows_lib.choose(ROWS, FLAGS.row), pathlib.Path(FLAGS.workdir)
    summaries = rows_lib.train(rows, CONFIG, workdir, FLAGS.steps, FLAGS.field)
    script.show(*(tabulate(summaries, FLAGS.markdown) for tabulate in (techniques, memories, findings)))
    if FLAGS.out:
        run = {row: rows_lib.trial(row, CONFIG, workdir, FLAGS.steps, FLAGS.field) for row in (BASELINE, CB, *MEMORIES)}
        curves = {row.name: training_loss(run[row]) for row in run if summaries.get(row.name)}
        draw(curves, cosines(run[CB]), FLAGS.out)
    return 0 if all(summaries.values()) else 1


if __name__ == "__main__":
    rows_lib.define_flags(workdir="runs/optimus", steps=400)
    flags.DEFINE(command.FIGURE, "out", None, "Where to write the figure, such as optimus.png; none: the tables only.")
    script.run(main, sweep.ERRORS)
