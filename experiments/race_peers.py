"""Loss against steps of PyTorch's rows of the race: DDP with its communication hooks, decent-dp and torchft, on the language model.

    python -m experiments.race_peers --peers=.venv-peers/bin/python --out=runs/race --results=experiments/results/race/lm.jsonl

Four emulated hosts with unlimited links (launch.cluster: root and iproute2). Each row starts from the parameters of a run of decjax, reads
the same batches and is evaluated on the same text. It is tuned and trained as the rows of `experiments.race`, whose results log
`--results` is: the first row there sets the target. Runs in `--out` are not repeated. The results are written to lm_peers.json in `--out`.
"""

import dataclasses
import json
import math
import pathlib

from absl import flags

from experiments import race, race_rows, script, sweep
from experiments.bench.cluster import systems, twins
from experiments.bench.cluster.group import Failed
from experiments.methods import HOSTS
from experiments.race_rows import FP32, PEERS, Curve, Runs, Setting
from experiments.results_log import ResultsLog
from launch import cluster, command

FLAGS = flags.FLAGS

TWINS = {"decent_dp": race_rows.ONE_PEER, "diloco": "method=diloco,every=16"}  # shorthands of decjax; of others all-reduce


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers(Runs):
    """The runs of PyTorch."""

    network: cluster.Network
    out: pathlib.Path

    def curve(self, name: str, setting: Setting, seed: int, steps: int) -> Curve | None:
        method = PEERS[name].shorthand
        workdir = self.out / f"{method}_{setting}_{seed}_{steps}"
        if not (workdir / "summary.json").exists():
            twin = TWINS.get(method, "method=allreduce")
            fields = {**setting.fields, "seed": seed, "batch_size": self.task.batch_size}
            fields |= {"eval.every": self.task.every, **self.task.fields}
            config = twins.config_of(f"{self.task.config}:{twin},workers={HOSTS},simulate,steps={steps}", fields)
            if code := twins.train(self.network, FLAGS.peers, method, config, workdir):
                raise Failed(f"{name} ended with exit code {code}; the same command continues")
            (workdir / "data.npz").unlink()  # It is large.
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses = [(row["step"], round(row["loss"], 5)) for row in rows if row["kind"] == "eval"]
        return Curve(steps, losses) if math.isfinite(losses[-1][1]) else None


def main() -> None:
    systems.use_one_thread()
    if not FLAGS.peers:
        command.fail("--peers is missing; give a Python with experiments/requirements-peers.txt")
    twins.check(FLAGS.peers)
    script.check_names("row", FLAGS.row, PEERS)
    out, task = script.folder(), race_rows.TASKS["lm"]
    recorded = race.Race(task, out=out / "lm", log=ResultsLog.of(out / "lm", FLAGS.results).recorded())
    first = recorded.result(FP32)
    targets = recorded.targets(first)
    with cluster.network(hosts=HOSTS, rate=cluster.UNLIMITED) as network:
        peers = Peers(task, network=network, out=out / "peers")
        results = {name: peers.result(name, targets[0]) for name in FLAGS.row or PEERS}
    script.show(race.tabulate(task, {FP32: first} | results, targets))
    path = out / "lm_peers.json"
    script.save(str(path), **{name: result._asdict() for name, result in results.items()})
    script.show(f"wrote {path}")


if __name__ == "__main__":
    script.define("out", "row", "peers", "results")
    script.run(main, (*systems.ERRORS, *sweep.ERRORS))
