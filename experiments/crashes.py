"""Runs that are killed repeatedly: each must end as if undisturbed.

    python -m experiments.crashes --out=runs/crashes
    python -m experiments.crashes --out=runs/crashes --kills=20 --row=choco

Noisy quadratics, or digits where a method needs matrices, with 8 simulated workers and a checkpoint every twenty steps. Each method
trains once undisturbed; then the same run is killed by SIGKILL at random moments after its first row of metrics, which may come
before its first checkpoint, and the same command continues it. After enough kills it runs to its end. The checksums of all arrays of
the last checkpoint must be equal, and all rows of metrics.jsonl without their times. Finished methods are not repeated.
"""

import json
import math
import pathlib
import random
import shutil
import time
from typing import NamedTuple

from absl import flags

from decjax import files
from experiments import script, sweep, trials
from launch import processes

FLAGS = flags.FLAGS

WORKERS, STEPS, SAVE, LOG = 8, 3000, 20, 10
LATEST_S = 3.0  # latest time of a kill, after the first new row of metrics


class Row(NamedTuple):
    """A method."""

    name: str
    shorthand: str
    config: str = "configs/quadratics.py"
    steps: int = STEPS


DIGITS = ("configs/digits.py", 300)  # a model with matrices, and enough parameters for four bits to pay
ROWS = (
    Row("gossip, awc", "topology=one_peer_exponential"),
    Row("gossip, atc", "topology=exponential,order=atc"),
    Row("AccumAdam", "topology=one_peer_exponential,optimizer=accum_adamw(window=4)"),
    Row("choco", "topology=ring,mixer=choco,codec=int4"),
    Row("dcd", "topology=ring,mixer=dcd,codec=int8"),
    Row("power gossip", "topology=ring,mixer=power_gossip", *DIGITS),
    Row("push-sum", "topology=exponential,mixer=push_sum"),
    Row("tracking", "topology=ring,method=tracking"),
    Row("all-reduce", "method=allreduce"),
    Row("all-reduce, one step stale", "method=allreduce,stale"),
    Row("PowerSGD", "method=allreduce,reducer=powersgd", *DIGITS),
    Row("top-k with error feedback", "method=allreduce,reducer=codec(codec=topk)"),
    Row("GraVAC", "method=allreduce,reducer=gravac", *DIGITS),
    Row("DiLoCo", "method=diloco"),
    Row("SparseLoCo", "method=sparseloco"),
    Row("1-bit Adam", "method=onebit_adam"),
    Row("0/1 Adam", "method=zero_one_adam"),
    Row("SlowMo", "method=slowmo"),
    Row("gossip DiLoCo", "method=gossip_diloco,topology=ring"),
    Row("NoLoCo", "method=noloco"),
    Row("Streaming DiLoCo", "method=streaming_diloco", *DIGITS),
    Row("QG-DSGDm", "method=qg_dsgdm,topology=ring"),
    Row("DecentLaM", "method=decentlam,topology=ring"),
    Row("exact diffusion", "method=exact_diffusion,topology=ring"),
    Row("RelaySGD", "mixer=relay,topology=ring"),
    Row("GT-NSGDm", "method=gt_nsgdm,topology=ring"),
    Row("delayed gossip", "mixer=delayed,topology=ring"),
    Row("consensus control", "mixer=consensus_control,topology=ring"),
)


class Killed(NamedTuple):
    """Results of a run that was killed repeatedly."""

    kills: int
    saving: int  # kills while a checkpoint was being written
    same_state: bool
    same_rows: bool


def trial(row: Row, workdir: pathlib.Path) -> trials.Trial:
    """Return the run of a row."""
    fields = (("log_every", LOG), ("eval.every", row.steps // 3), ("checkpoint.every", SAVE))
    return trials.Trial(workdir, f"{row.config}:{row.shorthand},workers={WORKERS},simulate,steps={row.steps}", fields)


def saving(workdir: pathlib.Path) -> bool:
    """Whether there is an incomplete checkpoint."""
    complete = set(map(str, files.numbers_in(workdir / "checkpoints")))
    return any(path.name not in complete for path in (workdir / "checkpoints").glob("*") if path.is_dir())


def disturb(run: trials.Trial, kills: int, chance: random.Random) -> tuple[int, int]:
    """Kill a run repeatedly, then let it end; return (kills, kills while saving)."""
    path, done, while_saving = run.workdir / "metrics.jsonl", 0, 0
    written = lambda: path.stat().st_mtime_ns if path.exists() else 0
    while True:
        before = written()
        process = trials.start(run)
        while process.poll() is None and written() == before:
            time.sleep(0.01)
        if done < kills:
            time.sleep(chance.uniform(0, LATEST_S))
        else:
            process.wait()
        if process.poll() is None:
            process.kill()
            process.wait()
            done, while_saving = done + 1, while_saving + saving(run.workdir)
        elif process.returncode:
            raise trials.Broken(f"the run in {run.workdir} {processes.how_it_ended(process.returncode)} after {done} kills")
        elif run.finished:
            return done, while_saving


def last_state(workdir: pathlib.Path) -> list[int]:
    """Return the checksums of all arrays of the newest checkpoint."""
    folder = workdir / "checkpoints"
    return json.loads((folder / str(files.numbers_in(folder)[-1]) / "extra" / "metadata").read_text())["checksums"]


def untimed(run: trials.Trial) -> list[dict[str, object]]:
    """Return the rows of a run without times and rates."""
    return [{name: value for name, value in row.items() if not name.endswith(("time_s", "_per_s"))} for row in run.rows()]


def compare(row: Row, out: pathlib.Path, kills: int, seed: int) -> Killed:
    """Train a row undisturbed and disturbed, unless that is done."""
    folder = out / trials.name_of(row.name)
    kept = folder / f"killed_{kills}_{seed}.json"
    if kept.exists():
        return Killed(**json.loads(kept.read_text()))
    calm, killed = trial(row, folder / "calm"), trial(row, folder / "killed")
    if not trials.Pool(1).train(calm):
        raise trials.Broken(f"the run in {calm.workdir} diverged")
    shutil.rmtree(killed.workdir, ignore_errors=True)
    done, while_saving = disturb(killed, kills, random.Random(f"{seed} {row.name}"))
    found = Killed(done, while_saving, last_state(calm.workdir) == last_state(killed.workdir), untimed(calm) == untimed(killed))
    script.save(str(kept), **found._asdict())
    return found


def tabulate(found: dict[str, Killed]) -> script.Table:
    """Return a row for each method."""
    table = script.table("", "killed", "while saving", "same state", "same metrics")
    words = {True: "yes", False: "NO"}
    for name, result in found.items():
        table.add_row(name, str(result.kills), str(result.saving), words[result.same_state], words[result.same_rows])
    table.add_row("total", *(str(sum(column)) for column in list(zip(*found.values()))[:2]))
    return table


def main() -> int:
    out, rows = script.folder(), script.choose(ROWS, FLAGS.row)
    script.check_tables("crashes")
    found: dict[str, Killed] = {}
    for place, row in enumerate(rows):
        left = FLAGS.kills - sum(result.kills for result in found.values())  # A run may end before it was killed often enough.
        found[row.name] = compare(row, out, math.ceil(left / (len(rows) - place)), FLAGS.seed)
        script.show(f"{row.name}: {found[row.name]}")
    script.report("crashes", tabulate(found))
    return 0 if all(result.same_state and result.same_rows for result in found.values()) else 1


if __name__ == "__main__":
    script.define("out", "row", "pages", rows=ROWS)
    flags.DEFINE_integer("kills", 100, "Kills of all methods together.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the times of kills.")
    script.run(main, sweep.ERRORS)
