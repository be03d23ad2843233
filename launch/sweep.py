"""Train all combinations of some values, several at a time, and print a table of results.

    python -m launch.sweep --config=configs/lm.py:smoke --sweep='topology=ring,torus;seed=0,1' --workdir=sweeps/graphs
    python -m launch.sweep --config=configs/lm.py:smoke --sweep='topology=ring,torus;seed=0,1' --workdir=sweeps/graphs --parallel=2

Keys of the config's shorthand (topology, workers, optimizer …) go into its argument; all other keys are fields of the config, such as
`optimizer.learning_rate=1e-3,4e-3`. Without --sweep the config file defines the sweep: a function `get_sweep(argument)` or a constant
`SWEEP` with the same text. Options after `--` are passed to each run. Each run has its own directory below --workdir, named by its
values. The same command skips finished runs and continues the others; with --table it only prints the results so far, also while the
sweep is running.
"""

import collections
import contextlib
import signal
import time
from typing import BinaryIO, NamedTuple

from absl import flags
import rich.console

from decjax import files
from launch import command, config_file, members, processes, sweep_table
from launch.members import Member

LOCAL = "launch.local"


class Child(NamedTuple):
    """A run in progress."""

    member: Member
    process: processes.Child
    begun_s: float
    log_offset: int  # bytes in its log before it was started
    held: BinaryIO  # lock of the member, in this process and in the child


class Sweep:
    """Runs members, several at a time; their processes end with this one.

    Args:
        all_members: of the sweep, in the order of their numbers.
        chosen: indices of the members to run.
        parallel: number of simultaneous runs.
        num_processes: of each run.
    """

    def __init__(self, all_members: list[Member], chosen: list[int], parallel: int = 1, num_processes: int = 1):
        self._members, self._parallel, self._num_processes = all_members, parallel, num_processes
        self._waiting = collections.deque(chosen)
        self._children: dict[int, Child] = {}
        self._finished = self._failed = 0
        self._in_use: set[int] = set()  # members that another process was running when it was their turn

    def run(self, caught: list, console: rich.console.Console) -> int:
        """Run unfinished members until signals are caught; return the number of failures."""
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._send(signal.SIGKILL))  # No process is left behind.
            live = stack.enter_context(sweep_table.Live(console, self._state))
            for stopping in processes.rounds(caught, self._send):
                if not self._children and (stopping or not self._waiting):
                    break
                if not stopping:
                    self._start(live)
                ended = [index for index, child in self._children.items() if not child.process.living()]
                for index in ended:
                    self._report_end(index, self._children.pop(index), bool(caught), live)
                live.look(again=bool(ended))
        return self._failed

    def _send(self, number: signal.Signals) -> None:
        processes.send([child.process for child in self._children.values()], number)

    def _state(self) -> tuple[list[tuple[Member, float]], str]:
        counts = f"{self._finished} finished, {self._failed} failed, {len(self._waiting)} waiting"
        return [(child.member, child.begun_s) for child in self._children.values()], counts

    def _title(self, index: int) -> str:
        return f"[{index + 1}/{len(self._members)}] {self._members[index].name}"

    def _start(self, live: sweep_table.Live) -> None:
        """Start runs until `parallel` are in progress; those that another process is running come last."""
        for _ in range(len(self._waiting)):
            if len(self._children) >= self._parallel:
                return
            index = self._waiting.popleft()
            member, title = self._members[index], self._title(index)
            if member.summary():
                self._finished += 1
                live.say(f"{title}: already finished")
            elif (held := member.lock()) is None:
                self._waiting.append(index)
                if index not in self._in_use:
                    self._in_use.add(index)
                    live.say(f"{title}: another process is running it, so it is postponed")
            else:
                live.say(f"{title}: running")
                self._children[index] = start(member, held, self._num_processes)

    def _report_end(self, index: int, child: Child, is_interrupted: bool, live: sweep_table.Live) -> None:
        """Report how a run ended."""
        member, title, code = child.member, self._title(index), child.process.process.returncode
        child.process.log.close()
        child.held.close()
        summary = member.summary()
        if code == 0 and summary:
            self._finished += 1
            live.say(f"{title}: eval_loss {summary['eval_loss']:.4f} after {time.monotonic() - child.begun_s:.0f} s")
        elif is_interrupted:
            progress = member.progress()
            live.say(f"{title}: interrupted" + (f" at step {progress.step}/{progress.steps}" if progress else ""))
        else:
            self._failed += 1
            line = members.last_line(member.log, "error:", child.log_offset)
            line = line or f"error: {members.last_line(member.log, '', child.log_offset)}"
            live.say(f"{title}: FAILED, it {processes.how_it_ended(code)}; {line}\n    log: {member.log}")


def start(member: Member, held: BinaryIO, num_processes: int) -> Child:
    """Start or continue a run; its output is appended to its log."""
    line = processes.python(processes.TRAIN, member.arguments)
    if num_processes > 1:
        line = processes.python(LOCAL, [f"--num_processes={num_processes}", "--", *member.arguments])
    files.check_regular(member.log)
    log = member.log.open("ab")
    offset = log.seek(0, 2)
    process = processes.start(line, death_signal=signal.SIGTERM, stdout=log, stderr=log, pass_fds=(held.fileno(),))
    return Child(member, processes.Child(process, log), time.monotonic(), offset, held)


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags of a sweep, which launch.slurm also parses."""

    def text(name: str, help_text: str, required: bool = False) -> None:
        flags.DEFINE_string(name, None, help_text, required=required, flag_values=values)

    text("config", "Config file, with an optional shorthand after a colon.", required=True)
    text("workdir", "Directory of the sweep, with one folder per run.", required=True)
    text("sweep", "'key=value,value;key=value'; default: that of the config file.")
    processes.define_count("parallel", 1, "Number of simultaneous runs.", values)
    index = "Run only the member with this number, from 0, such as $SLURM_ARRAY_TASK_ID in a job array."
    flags.DEFINE_integer("index", None, index, lower_bound=0, flag_values=values)
    processes.define_count("processes", 1, "Processes per run, started as by launch.local.", values)
    flags.DEFINE_bool("table", False, "Only print the results so far.", flag_values=values)


def planned(chosen: flags.FlagValues, extra: list[str], resolve: bool = True) -> list[Member]:
    """Return the members of a command line, after checking that launch.train would accept each.

    Args:
        chosen: the flags of `define`.
        extra: options after `--`, for all runs.
        resolve: whether to build the parts of the runs to start, which takes a second per run.
    """
    processes.check_options(extra)
    path, _, argument = chosen.config.partition(":")
    module = config_file.load_module(path)
    swept = members.parse_sweep(members.sweep_of(module, path, argument) if chosen.sweep is None else chosen.sweep)
    members.check_apart(chosen.config, swept, extra)
    keys, workdir = getattr(module, "KEYS", config_file.ANY_KEY), command.folder("workdir", chosen.workdir)
    all_members = members.expand(chosen.config, swept, keys, workdir, extra)
    count, index = len(all_members), chosen.index or 0
    command.check((index < count, f"index={index}: the sweep has {count} runs", f"use 0 to {count - 1}"))
    for number, member in enumerate(all_members):
        begins = resolve and not chosen.table and chosen.index in (None, number)
        members.check(member, chosen.processes, resolve=begins)
    members.check_values(all_members, chosen.config, swept, keys, extra)
    return all_members


def main(argv: list[str]) -> int:
    chosen = flags.FLAGS
    all_members, index = planned(chosen, argv), chosen.index
    workdir = all_members[0].directory.parent
    exists = (workdir / "sweep.json").exists()
    command.check(
        (exists or not chosen.table, f"{workdir} holds no sweep", "give the --workdir of one, or leave out --table to start it")
    )
    members.claim(workdir, chosen.config, argv)

    if chosen.table:
        show(all_members)
        return 0
    console = rich.console.Console(highlight=False, soft_wrap=True)
    with processes.caught_signals() as caught:
        runs = [*range(len(all_members))] if index is None else [index]
        failures = Sweep(all_members, runs, chosen.parallel, chosen.processes).run(caught, console)
    if index is None:
        show(all_members)
    if caught:
        again = processes.same_command("launch.sweep")
        console.print(f"interrupted by {caught[0].name}; the same command continues:\n  {again}", markup=False)
        return 128 + caught[0]
    if failures:
        console.print(f"{failures} of {len(all_members)} runs failed; the same command tries them again", markup=False)
    return 1 if failures else 0


def show(all_members: list[Member]) -> None:
    """Print the results so far and the progress of unfinished runs."""
    console = command.console()
    console.print(sweep_table.results(all_members))
    if table := sweep_table.unfinished(all_members):
        console.print(table)


if __name__ == "__main__":
    define()
    command.run(main, errors=(config_file.ConfigFileError,))
