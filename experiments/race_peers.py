"""Loss against steps of PyTorch's rows of the race: DDP with its communication hooks, and decent-dp, on the language model.

    python -m experiments.race_peers --peers=.venv-peers/bin/python --out=runs/race

Four emulated hosts with unlimited links (launch.cluster: root and iproute2). Each row starts from the parameters of a run of decjax, reads
the same batches and is evaluated on the same text. It is tuned as rows of `experiments.race` without further options are, and trained
with the same seeds and steps as the first row there. Runs in `--out` are not repeated.
"""

from collections.abc import Mapping
import json
import math
import pathlib
from typing import Any, NamedTuple

from absl import flags

from experiments import race, script, seeds
from experiments.bench.cluster import systems, twins
from experiments.bench.cluster.group import Failed
from experiments.methods import HOSTS
from launch import cluster, command

FLAGS = flags.FLAGS

PEERS = {
    "PyTorch DDP fp32": "ddp",
    "PyTorch DDP fp16": "float16",
    "PyTorch DDP, PowerSGD rank 4": "power_sgd",
    "decent-dp one-peer exponential": "decent_dp",
}


class Peers(NamedTuple):
    """The runs of PyTorch."""

    network: cluster.Network
    out: pathlib.Path
    task: race.Task

    def curve(self, name: str, rate: float, seed: int, steps: int) -> list[tuple[int, float]] | None:
        """Return the validation losses of a run, which is trained if it is missing; None if it diverged."""
        workdir = self.out / f"{PEERS[name]}_{rate:.3g}_{seed}_{steps}"
        done = workdir / "summary.json"
        if not done.exists():
            twin = "method=allreduce" if PEERS[name] != "decent_dp" else race.ONE_PEER
            code = twins.train(self.network, FLAGS.peers, PEERS[name], self.config(twin, rate, seed, steps), workdir)
            if code:
                raise Failed(f"{name} ended with exit code {code}; the same command continues")
            (workdir / "data.npz").unlink()  # It is large.
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses = [(row["step"], row["loss"]) for row in rows if row["kind"] == "eval"]
        return losses if math.isfinite(losses[-1][1]) else None

    def config(self, shorthand: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
        """Return the config of a run's twin."""
        fields: Mapping[str, Any] = {
            "schedule.learning_rate": rate,
            "seed": seed,
            "batch_size": self.task.batch_size,
            "eval.every": self.task.every,
            **self.task.fields,
        }
        return twins.config_of(f"{self.task.config}:{shorthand},workers={HOSTS},simulate,steps={steps}", fields)

    def result(self, name: str) -> dict[str, Any]:
        """Tune a row and train it with its seeds."""
        tried: dict[float, float] = {}

        def measure(rate: float) -> float:
            rate = float(f"{rate:.3g}")
            if rate not in tried:
                curve = self.curve(name, rate, race.TUNING_SEED, self.task.tuning_steps)
                tried[rate] = curve[-1][1] if curve else math.inf
            return tried[rate]

        best, _ = seeds.best_rate(measure, self.task.rates[race.ADAMW])
        for factor in (1 / race.FINE, race.FINE):
            measure(best * factor)
        best = min(tried, key=lambda rate: tried[rate])
        return {
            "rate": best,
            "tried": tried,
            "curves": [self.curve(name, best, seed, self.task.steps) for seed in range(race.SEEDS)],
        }


def main() -> None:
    systems.use_one_thread()
    if not FLAGS.peers:
        command.fail("--peers is missing; give a Python with experiments/requirements-peers.txt")
    twins.check(FLAGS.peers)
    script.check_names("row", FLAGS.row, PEERS)
    out = script.folder() / "peers"
    with cluster.network(hosts=HOSTS, rate=cluster.UNLIMITED) as network:
        peers = Peers(network, out, race.TASKS["lm"])
        results = {name: peers.result(name) for name in FLAGS.row or PEERS}
    table = script.table("", "final nats/byte", "rate", "tried")
    for name, result in results.items():
        losses = [curve[-1][1] for curve in result["curves"] if curve]
        tried = "; ".join(f"{rate:.3g}: {loss:.3f}" for rate, loss in result["tried"].items())
        table.add_row(name, seeds.spread(losses).text(3) if losses else "diverged", f"{result['rate']:.3g}", tried)
    script.show(table)
    path = script.folder() / "lm_peers.json"
    script.save(str(path), **results)
    script.show(f"wrote {path}")


if __name__ == "__main__":
    script.define("out", "row", "peers")
    script.run(main, systems.ERRORS)
