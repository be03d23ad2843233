"""Train with several processes on this machine, one CPU worker each, over gloo.

    python -m launch.local --num_processes=4 -- --config=configs/lm.py --workdir=runs/lm

Options after `--` are passed to each `python -m launch.train`. Process 0 prints its progress; the output of the others is shown only if
one fails. If one dies, the others are terminated, or with `--elastic` continue until it is replaced. After Ctrl-C or SIGTERM all
processes save and stop at the next logging step. The same command continues in all cases.

`--module=launch.calibrate` runs another module that has launch.train's coordinator flags.
"""

from absl import flags

from launch import chaos, command, elastic, processes


def main(argv: list[str]) -> int:
    num_processes, module = flags.FLAGS.num_processes, flags.FLAGS.module
    processes.check(module, argv, num_processes)
    again, faults = processes.how_to_continue("launch.local", module), chaos.parse(flags.FLAGS.chaos, num_processes)
    return elastic.run(module, argv, num_processes, elastic.options(module, argv), again=again, faults=faults)


if __name__ == "__main__":
    processes.define_count("num_processes", None, "Processes on this machine, one CPU worker each.")
    flags.mark_flag_as_required("num_processes")
    flags.DEFINE_string("module", processes.TRAIN, "Module with the coordinator flags of launch.train.")
    elastic.define_flags()
    command.run(main)
