"""Where GraVAC with measured speed climbs: the same run over slow and over fast links.

    python -m experiments.bench.gravac --out=runs/gravac_cluster

Two emulated hosts (launch.cluster: root and iproute2), one process a host, an LSTM of 0.1M parameters (configs/lm.py:model=lstm),
all-reduce. GraVAC measures the seconds of steps and climbs from no codec over bfloat16 and int8 to int4 as long as that pays. Over slow
links it should end on a rung that sends less, and over fast links on a low one, since coding costs time. Rounds differ by
seed. The table has the milliseconds of a step as GraVAC itself measured them last on each rung, from the state of its last checkpoint.
Finished runs are not repeated.
"""

import pathlib

from absl import flags
import jax
import numpy as np

from decjax.train import checkpoint
from experiments import script, trials
from experiments.bench.cluster import systems
from experiments.bench.cluster.group import done
from launch import cluster, processes

FLAGS = flags.FLAGS

HOSTS = 2
RUNGS = ("none", "bfloat16", "int8", "int4")
SIZE = {"model.width": 64, "model.context": 64}


def trial(out: pathlib.Path, rate: str, seed: int) -> trials.Trial:
    """Return a run over links of a rate."""
    gravac = f"gravac(window={FLAGS.window},improvement={FLAGS.improvement},speed=measured,ladder='{'; '.join(RUNGS[1:])}')"
    fields = SIZE | trials.TIMED | {"seed": seed, "log_every": FLAGS.window}
    shorthand = f"model=lstm,workers={HOSTS},method=allreduce,reducer={gravac},steps={FLAGS.windows * FLAGS.window}"
    return trials.trial(out, f"{rate} {seed}", f"configs/lm.py:{shorthand}", fields)


def ended(run: trials.Trial) -> tuple[int, np.ndarray, np.ndarray]:
    """Return (final rung, steps on each rung, last measured seconds of a step on each rung, inf: never), from its checkpoint."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {
        "rung": jax.ShapeDtypeStruct((HOSTS,), np.int32, sharding=here),
        "usage": jax.ShapeDtypeStruct((HOSTS, len(RUNGS)), np.int32, sharding=here),
        "rate": jax.ShapeDtypeStruct((HOSTS, len(RUNGS)), np.float32, sharding=here),
    }
    with checkpoint.Checkpoints(run.workdir, read_only=True) as checkpoints:
        step = checkpoints.latest()
        assert step is not None  # The run is finished.
        state, _ = checkpoints.restore(step, {"opt_state": {"reducer": like}}, partial=True)
    found = jax.tree.map(lambda x: np.asarray(x)[0], state["opt_state"]["reducer"])  # The same on all workers.
    with np.errstate(divide="ignore"):
        return int(found["rung"]), found["usage"], 1 / found["rate"]


def tabulate(found: dict[str, list[tuple[int, np.ndarray, np.ndarray]]]) -> script.Table:
    """Return a row for each run: milliseconds of a step on each rung, and its final rung."""
    table = script.table("links", "seed", "stays on", *RUNGS, "speed-up", left=3)
    for rate, runs in found.items():
        for seed, (rung, _, step_s) in enumerate(runs):
            cells = (script.ms(each) if np.isfinite(each) else "" for each in step_s)
            table.add_row(rate, str(seed), RUNGS[rung], *cells, f"{step_s[0] / step_s[rung]:.2f}")
    return table


def main() -> None:
    out = script.folder()
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}
    with cluster.network(hosts=HOSTS) as network:
        for rate in FLAGS.rates:
            network.set_rate(rate)
            found[rate] = []
            for seed in range(FLAGS.rounds):
                run = trial(out, rate, seed)
                if not run.finished:
                    done(f"the run in {run.workdir}", network.run(processes.TRAIN, run.arguments))
                found[rate].append(ended(run))
    script.report("gravac_cluster", tabulate(found))


if __name__ == "__main__":
    script.define("out", "pages")
    flags.DEFINE(cluster.Rates(), "rates", ["4mbit", "none"], "Rates of every link; none: unlimited.")
    script.selects("rates")
    flags.DEFINE_integer("rounds", 3, "Runs at each rate.", lower_bound=1)
    flags.DEFINE_integer("window", 15, "Steps on a rung.", lower_bound=2)
    flags.DEFINE_float("improvement", 0.25, "Relative gain that a rung needs; more than the noise of the clock.", lower_bound=0.0)
    flags.DEFINE_integer("windows", 6, "Windows of a run.", lower_bound=2)
    script.run(main, (*systems.ERRORS, trials.Broken, ValueError))
