"""Several processes on this machine, one CPU worker each, train together over gloo.

    python -m launch.local --num_processes=4 -- --config=configs/lm.py --workdir=runs/lm

What stands behind `--` goes to every `python -m launch.train`. Process 0 shows its progress; the others are quiet
unless one fails. If one dies, the others are ended. Ctrl-C and SIGTERM reach every process once: they save and stop at
the next logging step. The same command continues in both cases.
"""

from absl import flags

from launch import command
from launch import processes


def main(argv: list[str]) -> int:
    num_processes = flags.FLAGS.num_processes
    if num_processes < 1:
        command.fail(f"num_processes={num_processes}: must be at least 1")
    if not argv or not argv[0].startswith("-"):
        command.fail((f"unexpected argument {argv[0]!r}; " if argv else "")
                     + "options of launch.train go behind --, as in -- --config=configs/lm.py --workdir=runs/lm")
    again = f"the same command continues from the last checkpoint:\n  {processes.same_command('launch.local')}"
    return processes.run_together(processes.members("launch.train", argv, num_processes, "127.0.0.1"), again)


if __name__ == "__main__":
    flags.DEFINE_integer("num_processes", None, "Processes on this machine, one CPU worker each.", required=True)
    command.run(main)
