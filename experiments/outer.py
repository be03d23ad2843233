"""Loss against bytes of methods that send seldom: outer steps of all kinds, their compressed forms, and all-reduce.

    python -m experiments.outer --out=runs/outer

One model, configs/lm.py with 8 workers, and equal steps. Every row has the learning rate, then the outer momentum, then the outer rate
that were best in shorter runs with a separate seed; a grid whose best is at its edge is extended. Loss is that of the averaged model on
validation text, bytes are a worker's mean over all steps. Runs in the results log are not repeated.
"""

from collections.abc import Mapping
import math
import pathlib
from typing import NamedTuple

from absl import flags

from experiments import script, seeds, sweep, trials
from experiments.results_log import ResultsLog
from experiments.script import Check
from experiments.trials import Trial

FLAGS = flags.FLAGS
WORKERS, STEPS, TUNING_STEPS, TUNING_SEED, SEEDS = 8, 896, 256, 99, 3  # Steps are multiples of every H.
FEWER, MORE = 100, 2.0  # the target: 100 times fewer bytes than all-reduce at 2 % more loss
ADAMW, MUON = (6e-3, 1.2e-2, 2.4e-2), (1e-2, 2e-2, 4e-2)
MOMENTA, SPREAD, MIDDLE = (0.0, 0.5, 0.9), (0.5, 1.0, 2.0), (0.5, 0.5)  # μ; outer rate ÷ (1 − μ); (rate, μ) at first
ALL_REDUCE, EVERY = "all-reduce, AdamW", "without an outer step"


class Row(NamedTuple):
    """A method: its shorthand of configs/lm.py, its family, which has one color, and the learning rates that are tried."""

    shorthand: str
    family: str
    rates: tuple[float, ...] = ADAMW

    @property
    def outer(self) -> bool:
        """Whether it has an outer step."""
        return self.family != EVERY


INT4, ONE_PEER = "reducer=codec,codec=int4", "topology=one_peer_exponential"
ROWS = {
    ALL_REDUCE: Row("method=allreduce", EVERY),
    **{f"DiLoCo, H = {H}": Row(f"method=diloco,every={H}", "DiLoCo") for H in (1, 4, 16, 64)},
    **{f"DiLoCo, 4 bits, H = {H}": Row(f"method=diloco,every={H},{INT4}", "DiLoCo, 4 bits") for H in (4, 16, 64)},
    **{f"SparseLoCo, H = {H}": Row(f"method=sparseloco,every={H}", "SparseLoCo") for H in (4, 16, 64)},
    **{f"MuLoCo, H = {H}": Row(f"method=diloco,every={H},optimizer=muon", "MuLoCo", rates=MUON) for H in (4, 16, 64)},
    **{f"gossip DiLoCo, H = {H}": Row(f"method=gossip_diloco,every={H},{ONE_PEER}", "gossip DiLoCo") for H in (4, 16, 64)},
    "MuLoCo, 4 bits, H = 16": Row(f"method=diloco,every=16,{INT4},optimizer=muon", "MuLoCo, 4 bits", rates=MUON),
    "Streaming DiLoCo, 4 bits, H = 16": Row("method=streaming_diloco,every=16", "Streaming DiLoCo, 4 bits"),
    "SlowMo, H = 16": Row("method=slowmo,every=16", "SlowMo"),
    "NoLoCo, H = 16": Row("method=noloco,every=16", "NoLoCo"),
    "gossip DiLoCo, 4 bits, H = 16": Row(f"method=gossip_diloco,every=16,mixer=choco,codec=int4,{ONE_PEER}", "gossip, 4 bits"),
    "all-reduce, Muon": Row("method=allreduce,optimizer=muon", EVERY, MUON),
    "Dion, rank 4": Row("method=allreduce,reducer=dion,rank=4", EVERY, MUON),
    "0/1 Adam": Row("method=zero_one_adam", EVERY),
}


class Result(NamedTuple):
    """Results of a row."""

    rate: float
    outer: tuple[float, float] | None  # rate and momentum of the outer step
    tried: dict[str, float]  # "rate" or "rate, outer rate, momentum" -> loss of the shorter run
    losses: list[float | None]  # one for each seed; None: it diverged
    sent: float  # bytes of a worker in a step; nan if all diverged

    @property
    def spread(self) -> seeds.Spread | None:
        ended = [loss for loss in self.losses if loss is not None]
        return seeds.spread(ended) if ended else None


def rates(*values: float) -> str:
    """Return a learning rate, and the rate and momentum of the outer step, as text."""
    return ", ".join(f"{value:.3g}" for value in values)


class Runs(NamedTuple):
    """The runs of all rows."""

    out: pathlib.Path
    log: ResultsLog
    smoke: bool  # tiny models, one rate, one seed

    def trial(self, name: str, rate: float, outer: tuple[float, float] | None, seed: int) -> Trial:
        """Return a run; that of the tuning's seed is shorter."""
        size = "smoke" if self.smoke else f"steps={TUNING_STEPS if seed == TUNING_SEED else STEPS}"
        shorthand = f"{ROWS[name].shorthand},workers={WORKERS},simulate,{size}"
        fields = {"schedule.learning_rate": rate, "seed": seed, "eval.local": False, "data.sample_bytes": 0}
        fields |= {f"method.outer_{of}": value for of, value in zip(("learning_rate", "momentum"), outer or ())}
        return trials.trial(self.out, f"{name} {rates(rate, *(outer or ()))} {seed}", f"configs/lm.py:{shorthand}", fields)

    def tune(self, name: str) -> tuple[float, tuple[float, float] | None, dict[str, float]]:
        """Return (best rate, best outer rate and momentum with it, loss of each setting, infinite if it diverged)."""
        row, tried = ROWS[name], {}

        def measure(rate: float, outer: tuple[float, float] | None) -> float:
            numbers = self.log.result(self.trial(name, rate, outer, TUNING_SEED))
            tried[rates(rate, *(outer or ()))] = loss = numbers["eval_loss"] if numbers else math.inf
            return loss

        start = MIDDLE if row.outer else None
        rate, _ = seeds.best_rate(lambda rate: measure(rate, start), row.rates[:1] if self.smoke else row.rates)
        if not row.outer or self.smoke:
            return rate, start, tried
        momentum = min(MOMENTA, key=lambda momentum: measure(rate, (round(1 - momentum, 3), momentum)))
        grid = [round(times * (1 - momentum), 3) for times in SPREAD]
        outer_rate, _ = seeds.best_rate(lambda own: measure(rate, (own, momentum)), grid)
        return rate, (outer_rate, momentum), tried

    def result(self, name: str) -> Result:
        """Tune a row and train it with its seeds."""
        rate, outer, tried = self.tune(name)
        found = [self.log.result(self.trial(name, rate, outer, seed)) for seed in range(1 if self.smoke else SEEDS)]
        sent = next((numbers["bytes_per_step_per_worker"] for numbers in found if numbers), math.nan)
        return Result(rate, outer, tried, [numbers["eval_loss"] if numbers else None for numbers in found], sent)


def compared(found: Mapping[str, Result], name: str) -> tuple[float, float]:
    """Return (times fewer bytes, percent more loss) than all-reduce; nan if one of the two diverged."""
    own, first = found[name], found[ALL_REDUCE]
    if not (own.spread and first.spread):
        return math.nan, math.nan
    return first.sent / own.sent, 100 * (own.spread.mean / first.spread.mean - 1)


def tabulate(found: Mapping[str, Result]) -> script.Table:
    """Return bytes, loss, both relative to all-reduce, and the rates."""
    table = script.table(
        "", "kB per step", "times fewer", "nats/byte, mean ± 2σ", "vs. all-reduce", "rate", "outer rate, μ", "tuning losses"
    )
    for name, result in found.items():
        lost, (fewer, more) = result.losses.count(None), compared(found, name)
        diverged = f", {lost} of {len(result.losses)} diverged" if lost else ""
        table.add_row(
            name,
            f"{result.sent / 1e3:.2f}",
            f"{fewer:.1f}",
            (result.spread.text(4) if result.spread else "–") + diverged,
            f"{more:+.1f} %",
            f"{result.rate:.3g}",
            rates(*(result.outer or ())),
            "; ".join(f"{setting}: {loss:.4f}" for setting, loss in result.tried.items()),
        )
    return table


def checks(found: Mapping[str, Result]) -> list[Check]:
    """Return whether the best method that sends a hundredth of all-reduce's bytes reaches its loss."""
    of = {name: compared(found, name) for name in found if name != ALL_REDUCE}
    seldom = {name: more for name, (fewer, more) in of.items() if fewer >= FEWER}
    best = sorted(seldom, key=lambda name: seldom[name])[:1]
    return [Check(f"% of loss: {name}", f"{of[name][0]:.0f} × fewer bytes", seldom[name], MORE, True) for name in best]


def draw(path: str, found: Mapping[str, Result]) -> None:
    """Draw loss against bytes, a line for each family; bars are 2σ of the mean."""
    caption = f"Loss against bytes after {STEPS} steps, {WORKERS} workers, rates tuned for each"
    with script.panels(path, 1, (7.0, 4.5), caption) as (axis,):
        for number, family in enumerate(dict.fromkeys(ROWS[name].family for name in found)):
            rows = sorted((r.sent, r.spread) for name, r in found.items() if ROWS[name].family == family and r.spread)
            errors = [0.0 if math.isnan(spread.error) else spread.error for _, spread in rows]
            again, color = divmod(number, len(script.COLORS))
            style = dict(color=script.COLORS[color], marker="os^D"[again % 4], linestyle="" if family == EVERY else "-")
            axis.errorbar([sent for sent, _ in rows], [s.mean for _, s in rows], errors, label=family, **style)
        drawn = {name: (result.sent, result.spread.mean) for name, result in found.items() if result.spread}
        for name in [name for name in drawn if not ROWS[name].outer]:
            axis.annotate(name, drawn[name], (7, -3), textcoords="offset points", fontsize=7, color="0.3")
        axis.set(xscale="log", xlabel="bytes sent per worker and step", ylabel="nats/byte")
        axis.set_xlim(right=8 * max((sent for sent, _ in drawn.values()), default=1.0))  # room for names
        axis.legend(frameon=False, fontsize=8)


def main() -> None:
    out = script.folder()
    script.check_tables("outer")
    script.check_names("row", FLAGS.row, ROWS)
    chosen = FLAGS.row or (["gossip DiLoCo, H = 4"] if FLAGS.smoke else ROWS)
    names = list(dict.fromkeys([ALL_REDUCE, *chosen]))
    runs = Runs(out, ResultsLog.of(out, FLAGS.results), FLAGS.smoke)
    found = dict(zip(names, runs.log.pool.map(runs.result, names), strict=True))
    script.show(tabulate(found), script.tabulate(checks(found)))
    numbers = {name: result._asdict() for name, result in found.items()}
    script.publish("outer", tabulate(found), lambda path: draw(path, found), **numbers)


if __name__ == "__main__":
    script.define("out", "row", "results", "pages", "smoke")
    script.run(main, sweep.ERRORS)
