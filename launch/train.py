"""Train a config in a work directory; continue it after an interruption.

    python -m launch.train --config=configs/lm.py --workdir=runs/lm
    python -m launch.train --config=configs/lm.py:workers=4,topology=ring --config.steps=200 --workdir=runs/ring
    python -m launch.train --config=configs/lm.py:workers=4,steps=6000 --workdir=runs/lm_4 --resume_from=runs/lm

The shorthand after the colon selects parts (launch.parts lists them); `--config.FIELD=VALUE` sets a field. The same command continues
an interrupted run; --resume_from starts a run from the parameters of another one. The work directory holds metrics.jsonl, TensorBoard
files, checkpoints, and summary.json at the end.
"""

from collections.abc import Callable, Sequence
import functools
import os

from absl import flags
import jax
import ml_collections

from decjax import config as parts
from decjax import tasks, train
from decjax.elastic.members import ElasticMembers
from decjax.elastic.trainer import Trainers
from decjax.elastic.workers import Group
from decjax.errors import translating_out_of_memory
from decjax.train import metrics
from decjax.typing import Device
from launch import command, elastic, join, memory, processes, progress, train_flags

with command.defining_config():
    _CONFIG, _WORKDIR, _RESUME_FROM, _PLACEMENT, _TRACKER, _PROFILE, _PEAK_FLOPS = train_flags.define()
flags.mark_flags_as_required(["config", "workdir"])
flags.adopt_module_key_flags(join)  # --help shows them.

DevicesOf = Callable[[parts.RunSpec], Sequence[Device] | None]


def main(argv: list[str]) -> int:
    command.options_only(argv)
    with join.leaving_at_once((train.TrainingError,), "run the same command to continue from the last checkpoint"):
        config, workdir, resume_from = _CONFIG.value, command.folder("workdir", _WORKDIR.value or ""), _RESUME_FROM.value
        is_empty = resume_from is not None and not resume_from.strip()
        command.check((not is_empty, "--resume_from is empty", "give the --workdir of another run, or leave it out"))
        spec = parts.read(config)
        if _TRACKER.value:
            metrics.wandb()  # Fail early if wandb is missing.
        if steps := _PROFILE.value:
            problem = f"--profile={steps.start}:{steps.stop} does not end within the {spec.steps} steps of the run"
            command.check((steps.stop <= spec.steps, problem, f"use at most {spec.steps} as the end"))
        place = placed(spec)
        with translating_out_of_memory():
            trainer, members = elastic_trainer(config) if join.is_elastic() else (static_trainer(config, spec, place), None)
            run = train.Run(trainer, workdir, resume_from, members, _PEAK_FLOPS.value)
            outcome = run.train(trackers())
    if run.first:
        report(outcome, run.trainer.setup.task)
    return 128 + outcome.signal if outcome.signal else 0


def static_trainer(config: ml_collections.ConfigDict, spec: parts.RunSpec, place: DevicesOf) -> train.Trainer:
    """Return the trainer of a run, on the devices of all its processes."""
    join.set_up_devices(spec.workers, spec.simulate, spec.devices_of_worker)
    spec = parts.resolve(config, jax.device_count(), jax.default_backend())
    return train.Trainer(spec, place(spec))


def elastic_trainer(config: ml_collections.ConfigDict) -> tuple[train.Trainer, train.Members]:
    """Return the trainer of an elastic run, on one device, and this process's membership."""
    memory.keep_freed()  # As in `join.set_up_devices` with one device per process.
    jax.config.update("jax_num_cpu_devices", 1)
    group = Group()
    trainers = functools.cache(lambda: Trainers(resolved_for(config, join.slots()), group))
    join.stand_by(lambda: trainers().compile_all())
    group.membership = join.membership(trainers().spec.elastic)
    members = ElasticMembers(trainers(), group, elastic.launch_name(), functools.partial(print, flush=True))
    return members.trainer, members


def resolved_for(config: ml_collections.ConfigDict, slots: int) -> parts.RunSpec:
    """Return the spec of an elastic run, in which each process is a worker."""
    spec = parts.resolve(config, slots)
    if spec.workers != slots:
        raise parts.ConfigError(
            f"workers={spec.workers} with --elastic and {slots} processes: each process is a worker; use --num_processes={spec.workers}"
        )
    return spec


def placed(spec: parts.RunSpec) -> DevicesOf:
    """Read --placement; return a function from a spec to its devices in that order, or to None without --placement."""
    path = _PLACEMENT.value
    if path is None:
        return lambda spec: None
    from decjax.contrib import placement  # It brings SciPy, which takes a second.

    no_effect, fix = f"--placement={path} has no effect with", "leave one of them out"
    command.check((not join.is_elastic(), f"{no_effect} --elastic", fix), (not spec.simulate, f"{no_effect} simulate", fix))
    with command.refusing(f"--placement={path}"):
        order = placement.load_device_order(path)

    def devices(spec: parts.RunSpec) -> Sequence[Device]:
        with command.refusing(f"--placement={path}"):
            indices = order.of(spec.workers, spec.pipeline.stages, spec.tensor)
        counts = f"it orders {len(indices)} devices, and there are {jax.device_count()}"
        command.check((len(indices) == jax.device_count(), f"--placement={path}: {counts}", "rerun the placement"))
        return [jax.devices()[index] for index in indices]

    return devices


def trackers() -> list[Callable[[train.Run], metrics.Tracker]]:
    """Return the trackers in addition to the run directory: those of flags and the terminal, which is last: it has a live display."""

    def on_wandb(run: train.Run) -> metrics.WandB:
        tracker = metrics.WandB(run.workdir, run.start, run.spec.document)
        print(f"Weights & Biases: {tracker.place}")
        return tracker

    of_flags: list[Callable[[train.Run], metrics.Tracker]] = [on_wandb] if _TRACKER.value else []
    if steps := _PROFILE.value:
        of_flags.append(functools.partial(profile, steps))
    return [*of_flags, progress.of_run]


def profile(steps: range, run: train.Run) -> metrics.Tracker:
    """Return the tracker that writes a trace of some steps of a run."""
    if run.first and run.start >= steps.stop:
        print(f"--profile={steps.start}:{steps.stop}: nothing is traced, since the run continues from step {run.start}")
    return metrics.Profile(run.workdir / "profile", steps, run.start, lambda: jax.block_until_ready(run.state))


def report(outcome: train.Outcome, task: tasks.Task) -> None:
    """Print the results of a run."""
    if outcome.signal:
        print(f"interrupted by {outcome.signal.name}; saved step {outcome.step} in {_WORKDIR.value}")
        if command.LAUNCHER not in os.environ:  # Otherwise the launcher prints the command.
            print(f"To continue:\n  {processes.same_command(processes.TRAIN)}")
        return
    summary = outcome.summary
    assert summary is not None  # It is finished.
    if outcome.already_finished:
        print(f"the run in {_WORKDIR.value} is finished already, after {outcome.step} steps; another --workdir starts a new run")
    limit = summary.get("corpus_order1_entropy")
    print(
        f"averaged model after {summary['steps']} steps and {summary['time_s']:.0f} s: "
        + ", ".join(_metric(summary, name, unit) for name, unit in task.metrics.items())
        + "".join(f", {name} {summary[f'eval_{name}']:.2f}" for name in task.scores if f"eval_{name}" in summary)
        + (f" (a bigram model's limit: {limit:.2f})" if limit else "")
        + f"; {_size(summary['bytes_per_step_per_worker'])} sent per worker and step"
    )
    if outcome.shown is not None:
        print(command.printable(outcome.shown))


def _metric(summary: dict, name: str, unit: str) -> str:
    """Format a metric: "loss 0.9709 nats/byte (single workers 0.9810 to 0.9902)"."""
    low, high = summary[f"local_eval_{name}_min"], summary[f"local_eval_{name}_max"]
    return f"{name} {summary[f'eval_{name}']:.4f}{f' {unit}' * bool(unit)} (single workers {low:.4f} to {high:.4f})"


def _size(num_bytes: float) -> str:
    """Format bytes in MB, or in kB for small messages."""
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.2f} kB"


if __name__ == "__main__":
    command.run(main, errors=(train.TrainingError,))
