"""What compression on every axis of 3D parallelism costs in loss: Optimus-CC's techniques, and what related studies found.

    python -m experiments.optimus --workdir=runs/optimus --markdown --out=experiments/optimus.png

One run of configs/gpt_optimus.py:size=tiny for each row: 2 workers of 4 stages, 1F1B with 16 microbatches of a sequence, on real
text; equal steps, equal data, the learning rate of the uncompressed baseline: nothing was tuned for compression. Runs that have
finished are not repeated.

    A   CB: gradients between stages in the cool-down at rank 16 of 64, what they lose goes with the next (lazy error propagation),
        the last error of a step with the first gradient of the next step ("flush"); the same with other memories, and in blocks of
        4 bits;
        FE: one average of the tied embedding; SC: PowerSGD of the first 3 of 4 stages. Speed-ups are those of GPT-2.5B that
        experiments.optimus_runtime predicts for the published system, whose messages travel beside the passes.
    B   every gradient between stages at rank 1, 32 times fewer bytes; what is remembered of the error.
    C   the same top-k on gradients only and on activations only, no error remembered; then a learned linear autoencoder of width R,
        which sends R/D of the values both ways, beside top-k at equal bytes, with indices of its own or those of the activations.

Loss is that of the averaged model on all of the validation text; "coded": with activations coded as in training. Bytes are those
of the compiled program, means over workers. The figure: the loss, and the cosine that lazy error propagation rests on
(bench.error_cosine).
"""

import json
import pathlib
import subprocess
import sys

from absl import flags
import numpy as np
import rich.console
import rich.table

from experiments import optimus_runtime
from experiments import rows as rows_lib
from experiments.rows import Row
from launch import command

CONFIG = "configs/gpt_optimus.py"
PLAIN = "size=tiny,fused=false,reducer=mean"
BASELINE = Row("baseline", f"{PLAIN},backward=none", (), "baseline")


def between_stages(name: str, shorthand: str, *fields: str) -> Row:
    """The baseline with other messages between stages; `shorthand` names their form."""
    given = shorthand if "backward=" in shorthand else f"backward=none,{shorthand}"
    return Row(name, f"{PLAIN},{given}", fields, BASELINE.name)


def cool_down(name: str, *fields: str) -> Row:
    """The gradients that stages wait for in their cool-down, compressed."""
    return Row(name, PLAIN, fields, BASELINE.name)


def every_gradient(name: str, error: str) -> Row:
    return between_stages(name, "backward=low_rank(rank=1)", "boundary.when=always", f"boundary.error={error}")


def topk(percent: int) -> tuple[Row, Row]:
    """On gradients only, on activations only."""
    codec = f"topk(fraction={percent / 100:g})"
    return (
        between_stages(f"gradients, top-k {percent} %", f"backward={codec}", "boundary.when=always", "boundary.error=none"),
        between_stages(f"activations, top-k {percent} %", f"forward={codec}"),
    )


TECHNIQUES = (
    BASELINE,
    BASELINE._replace(name="baseline, another seed", fields=("seed=1",)),
    cool_down("CB"),
    cool_down("CB, error carried", "boundary.error=carry"),
    cool_down("CB, forgotten after each step", "boundary.error=reset"),
    cool_down("CB, not remembered", "boundary.error=none"),
    cool_down("CB, int4", "boundary.backward=int4"),
    Row("CB+FE", "size=tiny,reducer=mean", (), BASELINE.name),
    Row("CB+FE+SC", "size=tiny", (), BASELINE.name),
)
MEMORIES = (
    every_gradient("carried (LEP)", "carry"),
    every_gradient("forgotten after each step", "reset"),
    every_gradient("EF21", "ef21"),
    every_gradient("not remembered", "none"),
)
FINDINGS = (
    *topk(10),
    *topk(2),
    between_stages("autoencoder, R = D/4", "autoencoder=16"),
    between_stages(
        "top-k 1/6, own indices",
        "forward=topk(fraction=0.1667),backward=topk(fraction=0.1667)",
        "boundary.when=always",
        "boundary.error=none",
    ),
    between_stages(
        "top-k 1/5, shared indices",
        "forward=topk(fraction=0.2),backward=identity",
        "boundary.when=always",
        "boundary.error=none",
        "boundary.reuse_indices=true",
    ),
)
ROWS = (*TECHNIQUES, *MEMORIES, *FINDINGS)


# -- Tables -----------------------------------------------------------------------------------------------------------


def techniques(summaries: rows_lib.Summaries, markdown: bool) -> rich.table.Table:
    """Table A."""
    predicted = {name.split(" ")[0]: (name, p.time_s) for name, p in optimus_runtime.predict("2.5b").items()}
    made = rows_lib.table(
        ("", "kB between stages", "kB between workers", "loss", "to the baseline", "predicted speed-up, 2.5B"),
        markdown,
        "A. Techniques",
    )
    for row in _told(TECHNIQUES, summaries):
        speedup = ""
        if row.name in predicted and row != BASELINE:
            name, time_s = predicted[row.name]
            speedup = f"{predicted[BASELINE.name][1] / time_s:.3f}" + (f" (SC {name[-1]})" if name != row.name else "")
        made.add_row(row.name, *_bytes(summaries[row.name]), *_loss(row, summaries), speedup)
    return made


def memories(summaries: rows_lib.Summaries, markdown: bool) -> rich.table.Table:
    """Table B."""
    made = rows_lib.table(
        ("", "kB between stages", "loss", "to the baseline"),
        markdown,
        "B. Every gradient between stages, rank 1: what is remembered of the error",
    )
    for row in _told((BASELINE, *MEMORIES), summaries):
        made.add_row(row.name, _bytes(summaries[row.name])[0], *_loss(row, summaries))
    return made


def findings(summaries: rows_lib.Summaries, markdown: bool) -> rich.table.Table:
    """Table C."""
    made = rows_lib.table(
        ("", "kB between stages", "loss", "to the baseline", "loss, coded", "to the baseline"),
        markdown,
        "C. Gradients and activations",
    )
    for row in _told((BASELINE, *FINDINGS), summaries):
        made.add_row(row.name, _bytes(summaries[row.name])[0], *_loss(row, summaries), *_loss(row, summaries, "eval_loss_coded"))
    return made


def _told(rows: tuple[Row, ...], summaries: rows_lib.Summaries) -> list[Row]:
    """Those that were asked for."""
    return [row for row in rows if row.name in summaries]


def _bytes(summary) -> tuple[str, str]:
    """Between stages and between workers, of a worker's step."""
    sent = ("bytes_between_stages_per_step_per_worker", "bytes_per_step_per_worker")
    stages, workers = (f"{summary[name] / 1e3:.1f}" if summary else "" for name in sent)
    return stages, workers


def _loss(row: Row, summaries: rows_lib.Summaries, name: str = "eval_loss") -> tuple[str, str]:
    """A loss and by how much it differs from the baseline's."""
    summary, reference = summaries[row.name], summaries[BASELINE.name] if row != BASELINE else None
    if not summary:
        return "failed", ""
    if name not in summary:
        return "", ""
    return f"{summary[name]:.4f}", rows_lib.difference(summary[name], reference)


# -- Figure -----------------------------------------------------------------------------------------------------------


def cosines(workdir: pathlib.Path, steps: int, extra: list[str]) -> pathlib.Path | None:
    """The file of the cosines of the CB row, measured unless it is there; None if that fails."""
    path = workdir / "cosines.json"
    if not path.exists():
        row = next(row for row in TECHNIQUES if row.name == "CB")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "experiments.bench.error_cosine",
                f"--config={CONFIG}:{row.shorthand},steps={steps}",
                f"--out={path}",
                *(f"--config.{field}" for field in row.fields),
                *extra,
            ],
            check=False,
        )
        if done.returncode:
            return None
    return path


def training_loss(directory: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """(steps, loss as the mean of five logged ones)."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    step_K, loss_K = np.array([(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]).T
    window = min(5, len(loss_K))
    return step_K[window - 1 :], np.convolve(loss_K, np.full(window, 1 / window), "valid")


def draw(curves: dict[str, tuple[np.ndarray, np.ndarray]], found: dict, out: str) -> None:
    """The figure.

    Args:
        curves: training losses, by name.
        found: as `error_cosine` writes it.
        out: its file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for name, (step_K, loss_K) in curves.items():
        left.plot(step_K, loss_K, label=name, linewidth=1.2)
    left.set(xlabel="step", ylabel="training loss, nats/byte", title="every gradient at rank 1, and CB")
    left.legend(frameon=False, ncols=2)
    step_K = np.array(found["step"])
    for stage, cosine_KxM in found["cosines"].items():
        cosine_KxM = np.array(cosine_KxM, float)
        for cosine_K in cosine_KxM.T:
            right.plot(step_K, cosine_K, ".", markersize=2, color=f"C{stage}", alpha=0.3)
        right.plot([], [], "o", color=f"C{stage}", label=f"stage {stage} to {int(stage) - 1}: mean {np.nanmean(cosine_KxM):+.3f}")
    right.axhline(0, color="0.5", linewidth=0.8)
    right.set(xlabel="step", ylabel=r"cos($e$, $X_j - X_{j+1}$)", ylim=(-1, 1), title="what lazy error propagation rests on (CB)")
    right.legend(frameon=False)
    figure.savefig(out, dpi=130)


# -- The command ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    chosen = flags.FLAGS
    if argv:
        command.fail(f"unexpected argument {argv[0]!r}; options start with --")
    rows, workdir = rows_lib.choose(ROWS, chosen.row), pathlib.Path(chosen.workdir)
    console = rich.console.Console(highlight=False, width=140)
    summaries = rows_lib.train(rows, CONFIG, workdir, chosen.steps, chosen.field, console)
    for tabulate in (techniques, memories, findings):
        console.print(tabulate(summaries, chosen.markdown))
    complete = all(summaries.values())
    if chosen.out:
        path = cosines(workdir, chosen.steps, chosen.field)
        if path is None:
            return 1
        shown = [row for row in (BASELINE, TECHNIQUES[2], *MEMORIES) if summaries.get(row.name)]
        draw({row.name: training_loss(rows_lib.directory(row, workdir)) for row in shown}, json.loads(path.read_text()), chosen.out)
    return 0 if complete else 1


if __name__ == "__main__":
    rows_lib.define_flags(workdir="runs/optimus", steps=400)
    flags.DEFINE_string("out", None, "Where to write the figure, such as optimus.png; none: the tables only.")
    command.run(main, errors=(OSError,))
