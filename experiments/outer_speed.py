"""Whether communication of outer steps overlaps with compute: step times of DiLoCo and Streaming DiLoCo on slow links.

    python -m experiments.outer_speed --out=runs/outer_speed.json

Four emulated hosts (launch.cluster: root and iproute2), the transformer of experiments.speedup, 5.9M parameters in float32. Rows take
turns, each for a round of H steps; a figure is the median over the visits of the mean time of a step. DiLoCo waits for its exchange in
every H-th step; Streaming DiLoCo sends one fourth of the parameters at a time, in τ pieces, while gradients are computed.

Emulated hosts share the cores of one machine, so workers that do not wait for each other drift apart, and a worker that waits for a message
also waits for the drift. Rows "pauses" compute one sequence after a pause of 400 ms, which simulates hosts with cores of their own.
"""

from absl import flags

from experiments import script, speedup
from experiments.bench.cluster.systems import ERRORS, Runner, decjax
from experiments.methods import ALONE, HOSTS
from experiments.script import Check
from experiments.speedup import Measured
from launch import cluster

FLAGS = flags.FLAGS
H, MOST = 30, 1.05  # steps of a round, the methods' default; bound of Streaming DiLoCo's step time, relative to no communication
PAUSE_S = 0.4
STREAMING = "Streaming DiLoCo, 4 bits"
SHORTHANDS = {
    ALONE: "method=local",
    "DiLoCo": f"method=diloco,every={H}",
    "DiLoCo, 4 bits": f"method=diloco,every={H},reducer=codec,codec=int4",
    STREAMING: f"method=streaming_diloco,every={H}",
    f"{STREAMING}, τ = 2": f"method=streaming_diloco(every={H},delay=2)",
}
ALONE_P, STREAMING_P = (f"{name}, pauses" for name in (ALONE, STREAMING))
ROWS = (
    *(decjax(name, shorthand) for name, shorthand in SHORTHANDS.items()),
    *(decjax(f"{name}, pauses", SHORTHANDS[name], batch_size=1, pause_s=PAUSE_S) for name in (ALONE, STREAMING)),
)


def tabulate(measured: Measured, refused: dict[str, str]) -> script.Table:
    """Return the time of a step, its ratio to one without communication, and bytes."""
    table = script.table("", "ms per step", "÷ no communication", "MB per step and host, mean")
    for row in ROWS:
        if row.name in measured.step_s:
            step_s, sent = measured.time_s(row.name), measured.sent_bytes[row.name]
            alone_s = measured.time_s(ALONE_P if row.visits else ALONE)
            table.add_row(row.name, script.ms(step_s), f"{step_s / alone_s:.3f}", f"{sent / 1e6:.2f}")
        elif row.name in refused:
            table.add_row(row.name, "cannot run", "", "")
    return table


def checks(measured: Measured) -> list[Check]:
    """Return whether Streaming DiLoCo is about as fast as no communication; nan (not met) if it did not run."""
    pairs = ((STREAMING, ALONE), (f"{STREAMING}, τ = 2", ALONE), (STREAMING_P, ALONE_P))
    time_s = measured.time_s
    return [Check(f"{row} ÷ {alone}", measured.rate, time_s(row) / time_s(alone), MOST, True) for row, alone in pairs]


def main() -> None:
    script.check_tables("outer_speed")
    rows = script.choose(ROWS, FLAGS.row, ALONE, ALONE_P)
    with cluster.network(hosts=FLAGS.hosts, rate=FLAGS.rate) as network, Runner(network) as runner:
        runner.prepare_all(rows)
        measured = speedup.measure(runner, rows, FLAGS.rate, FLAGS.rounds, lambda row: H)
    found = tabulate(measured, runner.refused)
    script.show(found, script.tabulate(checks(measured)))
    script.show(*runner.refusals)
    script.save(FLAGS.out, refused=runner.refused, measured=measured._asdict())
    script.fill("outer_speed", found)


if __name__ == "__main__":
    script.define("json", "row", "pages", rows=ROWS)
    flags.DEFINE_string("rate", "50mbit", "Rate of every link, both ways.")
    flags.DEFINE_integer("hosts", HOSTS, "Hosts, one process each.", lower_bound=2)
    flags.DEFINE_integer("rounds", 3, "Visits of each row.", lower_bound=1)
    script.run(main, ERRORS)
