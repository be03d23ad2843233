"""Validation loss against seconds on a slow network: how much sooner gossip reaches the loss that all-reduce ends with.

    python -m experiments.time_to_loss --out=runs/time_to_loss
    python -m experiments.time_to_loss --out=runs/time_to_loss --peers=.venv-peers/bin/python     # and PyTorch's
    python -m experiments.time_to_loss --out=runs/translated_in --multi30k=data/multi30k
    python -m experiments.time_to_loss --out=runs/smoke --smoke

Four emulated hosts (launch.cluster: root and iproute2), links of 100 Mbit/s, one process a host, the transformer of 5.9M parameters
of experiments.speedup on a megabyte of Python's standard library; with --multi30k the encoder–decoder of configs/translation.py, of
1.2M parameters, learns to translate. A step of every method reads as many examples.

1. Each method is tuned in simulation, without a network: three learning rates, and further ones while the best is at an edge. A method that
   does not end 0.05 nats below all-reduce's loss is tried with 1.5 and 2 times as many steps. It gets the fewest steps that reach this
   loss or, if none do, those with the lowest loss.
2. The methods train on the emulated cluster, one after the other, in several rounds, each with its own seed.
3. The forecast: before each round launch.calibrate measures the cluster, and from that the cost model predicts the time of a step.
   Simulated runs with the same seeds give the number of steps that each method needs. Their product is compared with the seconds.

Seconds are those of training, without compilation and evaluation. Finished runs in `--out` are not repeated, so an interrupted command
continues; the table and the figure are made from the run directories there.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

from absl import flags

from decjax import costmodel
from experiments import cluster_runtime, curves, methods, script, seeds, trials
from experiments.bench.cluster import systems, twins
from experiments.bench.cluster.group import Failed, done
from experiments.methods import HOSTS, ONE_PEER, SHORTHANDS, STALE, SYNC
from experiments.trials import Trial
from launch import cluster, command

FLAGS = flags.FLAGS

INT8, ACCUM = f"{ONE_PEER}, int8", f"{ONE_PEER}, AccumAdamW"
ACCUM_INT8 = f"{ACCUM}, int8"
ACCUMULATING = "optimizer=accum_adamw(window=2)"
TRAINED = {
    **{method: SHORTHANDS[method] for method in (SYNC, STALE, ONE_PEER)},
    ACCUM: f"{SHORTHANDS[ONE_PEER]},{ACCUMULATING}",
    INT8: SHORTHANDS[INT8],
    ACCUM_INT8: f"{SHORTHANDS[INT8]},{ACCUMULATING}",
}
PEERS = {"PyTorch DDP": ("ddp", SYNC), "decent-dp, one-peer exponential": ("decent_dp", ONE_PEER)}  # with their twins
BUCKET = 2**21  # bytes of gossip's messages
LONGER = (1.0, 1.5, 2.0)  # times the steps of all-reduce
GRID = (2e-3, 4e-3, 8e-3)  # the first learning rates of every method
SMOKE_TUNING = (SYNC, ACCUM_INT8), (8e-3,), (1.0,)  # methods, grid and lengths
SIZES = ("steps", "batch_size", "every")  # flags that replace those of the job


class Job(NamedTuple):
    """A task and its model."""

    name: str  # of tables and figures
    config: str  # config file
    model: Mapping[str, int]  # options of the model
    small: Mapping[str, int]  # those of a tiny one
    about: str  # description in the figure
    unit: str  # of its loss
    steps: int  # of all-reduce
    batch_size: int  # sequences, or pairs of the longest sentences, of a worker; of shorter pairs more
    every: int  # steps between evaluations
    fields: Mapping[str, Any] = {}  # of the config
    score: str = ""  # score on test data at the end, as "bleu"; "": none


TEXT = Job(
    "time_to_loss",
    "configs/lm.py",
    systems.MODEL,
    dict(width=16, hidden=32, heads=2, depth=1, context=16, vocabulary=256),
    "5.9M parameters learn Python",
    "nats/byte",
    steps=100,
    batch_size=2,
    every=10,
    fields={"data.sample_bytes": 0},
)
TRANSLATION = Job(
    "time_to_translate",
    "configs/translation.py",
    {},
    dict(width=16, hidden=32, heads=2, encoder=1, decoder=1, vocabulary=300),
    "1.2M parameters learn to translate",
    "nats/token",
    steps=600,
    batch_size=8,
    every=20,
    fields={"optimizer.b1": 0.9},
    score="bleu",
)


class Setup(NamedTuple):
    """What all runs have in common."""

    job: Job
    path: pathlib.Path  # of the data
    pool: trials.Pool  # of the simulated runs
    methods: tuple[str, ...]  # names in TRAINED
    grid: tuple[float, ...]  # learning rates; a single one is not extended
    longer: tuple[float, ...]  # times the steps, for a method that needs more to reach all-reduce's loss

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the config."""
        job = self.job
        return {
            **{f"model.{key}": value for key, value in job.model.items()},
            **job.fields,
            "batch_size": HOSTS * job.batch_size,
            "log_every": job.every,
            "eval.every": job.every,
            "checkpoint.every": 4 * job.every,
            "checkpoint.keep": 1,
            "schedule.warmup_steps": max(1, job.steps // 10),
            "eval.num_windows": 0,  # all, as at the end
            "eval.local": False,  # Evaluating every worker's model takes longer than training it.
            "data.path": str(self.path),
        }


class Tuned(NamedTuple):
    """The learning rate and the number of steps of a method."""

    rate: float
    steps: int


def trial(method: str, setup: Setup, tuned: Tuned, workdir: pathlib.Path, seed: int, simulate: bool) -> Trial:
    """Return a run of launch.train."""
    shorthand = f"{TRAINED[method]},workers={HOSTS},steps={tuned.steps}" + ",simulate" * simulate
    bucket_bytes = systems.WHOLE if "allreduce" in shorthand else BUCKET  # the fastest of each
    fields = setup.fields | {"schedule.learning_rate": tuned.rate, "seed": seed, "bucket_bytes": bucket_bytes}
    return Trial(workdir, f"{setup.job.config}:{shorthand}", tuple(fields.items()))


def simulate(out: pathlib.Path, setup: Setup, method: str, tuned: Tuned) -> float:
    """Return the final loss of a simulated run, which is trained unless that is done; infinite if it diverged."""
    workdir = out / "tuning" / trials.name_of(method) / f"{tuned.rate:.3g}_{tuned.steps}"
    ended = setup.pool.train(trial(method, setup, tuned, workdir, seed=99, simulate=True))
    return curves.read(workdir)[-1].loss if ended else math.inf


def tune(out: pathlib.Path, setup: Setup) -> dict[str, Tuned]:
    """Return the best learning rate of every method, and the steps it needs to all-reduce's loss, from simulated runs."""

    def rate_of(method: str) -> tuple[float, dict[float, float]]:
        return seeds.best_rate(lambda rate: simulate(out, setup, method, Tuned(rate, setup.job.steps)), setup.grid)

    rates = dict(zip(setup.methods, setup.pool.map(rate_of, setup.methods)))
    if math.isinf(goal := min(rates[SYNC][1].values())):
        raise Failed(f"no simulated run of {SYNC} ended; its output has the reason")

    def lengthened(method: str) -> Tuned:
        """Return the fewest steps with which it ends `curves.NEAR` below the goal; if none do, those with the smallest loss."""
        losses: dict[Tuned, float] = {}
        for share in (1.0,) if method == SYNC else setup.longer:
            tuned = Tuned(rates[method][0], round(share * setup.job.steps))
            losses[tuned] = simulate(out, setup, method, tuned)
            if losses[tuned] <= goal - curves.NEAR:
                return tuned
        return min(losses, key=lambda tuned: losses[tuned])

    lengths = dict(zip(setup.methods, setup.pool.map(lengthened, setup.methods)))
    for method, tuned in lengths.items():
        tried = ", ".join(f"{rate:.3g}: {loss:.4f}" for rate, loss in sorted(rates[method][1].items()))
        script.show(f"{method}: {tuned.steps} steps at learning rate {tuned.rate:.3g} of {tried}")
    return lengths


def same(workdir: pathlib.Path, tuned: Tuned) -> None:
    """Refuse a finished run whose rate or length differs from the tuned ones."""
    config = json.loads((workdir / "config.json").read_text())
    made = Tuned(config["schedule"]["learning_rate"], config["steps"])
    if made != tuned:
        raise Failed(f"the run in {workdir} has {made}, and tuning gives {tuned} now; move it away, or give another --out")


def simulated_round(out: pathlib.Path, method: str, seed: int) -> pathlib.Path:
    """Return the run directory of the simulation of a run on the emulated cluster."""
    return out / f"simulated{seed}" / trials.name_of(method)


def measured(out: pathlib.Path, method: str, seed: int) -> pathlib.Path:
    """Return the run directory of a run on the emulated cluster."""
    return out / f"round{seed}" / trials.name_of(method)


def profile(out: pathlib.Path, seed: int) -> pathlib.Path:
    """Return the path of the profile that was measured before a round."""
    return out / f"round{seed}" / "profile.json"


def simulate_rounds(out: pathlib.Path, setup: Setup, tuned: dict[str, Tuned], rounds: int) -> None:
    """Train every method in simulation with the seeds of all rounds, two at a time."""
    keys = [(method, seed) for seed in range(rounds) for method in tuned]
    runs = [trial(method, setup, tuned[method], simulated_round(out, method, seed), seed, simulate=True) for method, seed in keys]
    for (method, _), run in zip(keys, runs, strict=True):
        if run.finished:
            same(run.workdir, tuned[method])
    for (method, seed), ended in zip(keys, setup.pool.make(runs), strict=True):
        if not ended:
            raise Failed(f"{method} diverged in simulation with seed {seed}; --rounds={seed} leaves it out")


def calibrate(network: cluster.Network, path: pathlib.Path, setup: Setup, seconds: float) -> None:
    """Measure the emulated cluster with launch.calibrate and write the profile, unless that is done."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        job, data = setup.job, {"data.path": str(setup.path)}
        cluster_, workload = cluster_runtime.calibrate(
            network, FLAGS.rate, seconds, job.batch_size, [SHORTHANDS[INT8]], job.model, BUCKET, job.config, data
        )
        costmodel.save(path, cluster_, workload)


def predict(path: pathlib.Path) -> dict[str, float]:
    """Return the seconds per step that the cost model predicts from a profile, by method.

    AccumAdamW sends the same as AdamW.
    """
    cluster_, workload = costmodel.load(path)
    assert workload is not None  # Calibration always writes one.
    known = methods.modeled(HOSTS)
    exact, coded = known[ONE_PEER], costmodel.compressed(workload.compressed[0])
    modeled = {SYNC: known[SYNC], STALE: known[STALE], ONE_PEER: exact, ACCUM: exact, INT8: coded, ACCUM_INT8: coded}
    return {name: costmodel.predict(cluster_, workload, method).mean_s for name, method in modeled.items()}


def train(network: cluster.Network, out: pathlib.Path, setup: Setup, tuned: dict[str, Tuned], rounds: int) -> None:
    """Train every method on the emulated cluster, `rounds` times; a peer has the learning rate and steps of its twin.

    Each round begins with a calibration, so that rounds may be of different machines.
    """
    for seed in range(rounds):
        calibrate(network, profile(out, seed), setup, 2.0 if FLAGS.smoke else 60.0)
        for method in [*tuned, *(peer for peer, (_, twin) in PEERS.items() if FLAGS.peers and twin in tuned)]:
            workdir = measured(out, method, seed)
            if Trial(workdir).finished:
                if method in tuned:
                    same(workdir, tuned[method])
                continue
            if method in PEERS:
                name, twin = PEERS[method]
                config = json.loads((measured(out, twin, seed) / "config.json").read_text())
                code = twins.train(network, FLAGS.peers, name, config, workdir)
            else:
                code = network.run("launch.train", trial(method, setup, tuned[method], workdir, seed, simulate=False).arguments)
            if code == command.DIVERGED:
                raise Failed(f"{method} diverged on the emulated cluster with seed {seed}; --rounds={seed} leaves it out")
            done(method, code)


def results(out: pathlib.Path, tuned: dict[str, Tuned], rounds: int, score: str) -> dict[str, curves.Result]:
    """Return every method's result, from the run directories; `score` is that of the job."""
    places = measured, simulated_round
    goals, simulated_goals = ([curves.read(place(out, SYNC, seed))[-1].loss for seed in range(rounds)] for place in places)
    predicted_s = [predict(profile(out, seed)) for seed in range(rounds)]
    found = {}
    for method in [*tuned, *PEERS]:
        made = [Trial(measured(out, method, seed)) for seed in range(rounds)]
        if not all(run.finished for run in made):
            continue
        runs = [curves.read(run.workdir) for run in made]
        own_s, predicted_to_loss_s = None, None
        if method in tuned:
            own_s = [of[method] for of in predicted_s]
            simulations = [curves.read(simulated_round(out, method, seed)) for seed in range(rounds)]
            needed = [curves.reached(run, loss, lambda point: point.step) for run, loss in zip(simulations, simulated_goals)]
            predicted_to_loss_s = [step_s * steps for step_s, steps in zip(own_s, needed)]
        found[method] = curves.Result(
            runs,
            [run[-1].time_s / run[-1].step for run in runs],
            own_s,
            [curves.reached(run, loss) for run, loss in zip(runs, goals)],
            [curves.reached(run, loss + curves.NEAR) for run, loss in zip(runs, goals)],
            predicted_to_loss_s,
            [run.summary()[f"eval_{score}"] for run in made] if score else (),
        )
    return found


def check() -> None:
    """Refuse mistakes before an hour of tuning, and sizes that would change nothing."""
    for name in SIZES if FLAGS.smoke else ():
        if (size := FLAGS[name].value) is not None:
            command.fail(f"--{name}={size} has no effect with --smoke, which has sizes of its own; leave out one of them")
    if FLAGS.multi30k == "":
        command.fail("--multi30k is empty; give the folder of Multi30k's parallel files, or leave it out")
    script.check_tables(_job().name)
    for name in trials.MULTI30K_FILES if FLAGS.multi30k else ():
        if not any((_multi30k() / f"{name}{end}").is_file() for end in ("", ".gz")):
            raise Failed(f"--multi30k={FLAGS.multi30k} has no {name}; give the folder of Multi30k's parallel files")
    with cluster.network(hosts=HOSTS, rate=FLAGS.rate):
        pass
    if FLAGS.peers and FLAGS.multi30k:
        raise Failed("--peers: PyTorch's DDP has no translation here; leave out --peers or --multi30k")
    if FLAGS.peers:
        twins.check(FLAGS.peers)


def _job() -> Job:
    """Return the job, with the sizes of flags."""
    job = TRANSLATION if FLAGS.multi30k else TEXT
    if FLAGS.smoke:
        return job._replace(model=job.small, steps=8, batch_size=1, every=2)
    return job._replace(**{name: FLAGS[name].value or getattr(job, name) for name in SIZES})


def _multi30k() -> pathlib.Path:
    return pathlib.Path(os.path.expanduser(FLAGS.multi30k))


def main() -> None:
    systems.use_one_thread()
    out = script.folder()
    check()
    job = _job()
    data = FLAGS.multi30k and f"checksum {trials.data_checksum(str(_multi30k()), job.config)}"
    sizes = {name: getattr(job, name) for name in SIZES}
    script.claim(out, rate=FLAGS.rate, multi30k=data, smoke=FLAGS.smoke, **sizes)
    path = _multi30k() if FLAGS.multi30k else twins.write_text(out / "text.txt", job.model["context"])
    if not FLAGS.multi30k:
        script.claim(out, text=f"checksum {trials.data_checksum(str(path))}")
    setup = Setup(job, path, trials.Pool(), *(SMOKE_TUNING if FLAGS.smoke else (tuple(TRAINED), GRID, LONGER)))
    tuned = tune(out, setup)
    with cluster.network(hosts=HOSTS, rate=FLAGS.rate) as network:
        train(network, out, setup, tuned, FLAGS.rounds)
    simulate_rounds(out, setup, tuned, FLAGS.rounds)
    found = results(out, tuned, FLAGS.rounds, job.score)
    table = curves.tabulate(found, job.score.upper())
    title = f"{job.about} on four hosts, links of {FLAGS.rate.replace('mbit', ' Mbit/s')}"
    script.show(table)
    rows = {name: result._asdict() for name, result in found.items()}
    rates = {name: each._asdict() for name, each in tuned.items()}
    script.publish(job.name, table, lambda path: curves.draw(path, found, title, job.unit), tuned=rates, **rows)


if __name__ == "__main__":
    script.define("out", "pages", "smoke", "peers")
    flags.DEFINE_string("rate", "100mbit", "Rate of every link.")
    flags.DEFINE_integer("rounds", 2, "Runs of each method on the emulated cluster.", lower_bound=1)
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files, to learn to translate; none: to learn Python.")
    flags.DEFINE_integer("steps", None, "Steps of all-reduce; none: 100, or 600 to translate.", lower_bound=10)
    text = "Batch of a worker: sequences of 128 bytes, or pairs of the longest sentences (of shorter ones more); none: 2, or 8."
    flags.DEFINE_integer("batch_size", None, text, lower_bound=1)
    flags.DEFINE_integer("every", None, "Steps between evaluations; none: 10, or 20 to translate.", lower_bound=1)
    script.run(main, (*systems.ERRORS, trials.Broken))
