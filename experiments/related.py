"""The systems of related papers: what of each runs here, by which command, and the figure that says whether it is right.

    python -m experiments.related
    python -m experiments.related --only=DT-FM --smoke

A row has an oracle: something that is known of the system beforehand, such as an exact limit or a bound. The exit code is 1 if one of
them does not hold. `experiments.oracles` and its like compute the figures. docs/results/related.md is made by

    python -m experiments.related --pages=docs/results
"""

from collections.abc import Callable
import shlex
import time
from typing import Any, NamedTuple

from absl import flags

from experiments import oracles, oracles_low_rank, oracles_tables, script
from launch import command

FLAGS = flags.FLAGS


class Row(NamedTuple):
    """A system."""

    name: str
    source: str
    command: str  # that runs it
    oracle: str  # what its figure is
    measure: Callable[[bool], float]  # the figure; True: quickly
    most: float  # that it may be


ROWS = (
    Row(
        "DT-FM",
        "arXiv 2206.01288",
        "launch.place --links=configs/links/worldwide.json --stages=8 --model=depth=24,width=2048,heads=16,vocabulary=50257,"
        "context=2048,batch=64",
        "messages of 64 devices worldwide, ÷ the mean of random layouts",
        oracles.dt_fm,
        0.65,
    ),
    Row(
        "DT-FM, 256 devices",
        "arXiv 2206.01288",
        "launch.place --links=LINKS --stages=16 --search_s=50 --model=depth=24,width=2048,heads=16,vocabulary=50257,context=2048,batch=256",
        "the same for 256 devices, in less than a minute",
        oracles.dt_fm_256,
        0.65,
    ),
    Row(
        "dSSFN",
        "arXiv 2009.13982",
        "experiments.dssfn",
        "accuracy on a ring with 30 rounds beside one worker with all examples, percentage points",
        oracles.layer_wise,
        1.0,
    ),
    Row(
        "quantized push-sum",
        "arXiv 2002.09964",
        "launch.train --config=configs/quadratics.py:mixer=push_sum,codec=int4,topology=directed_exponential --workdir=WORKDIR",
        "distance from the mean, four bits, γ = 1",
        oracles.push_sum,
        1e-12,
    ),
    Row(
        "PowerGossip",
        "arXiv 2008.01425",
        "launch.train --config=configs/lm.py:mixer=power_gossip,rank=1,steps=500 --workdir=WORKDIR",
        "drift of the mean, rank 1",
        oracles.power_gossip,
        1e-12,
    ),
    Row(
        "consensus control",
        "arXiv 2102.04828",
        "launch.train --config=configs/quadratics.py:mixer=consensus_control,topology=ring --workdir=WORKDIR",
        "distance that a step leaves, ÷ the one before it; ρ = 0.25",
        oracles.consensus_control,
        0.25,
    ),
    Row(
        "MC-DSGT",
        "arXiv 2211.00533",
        "launch.train --config=configs/quadratics.py:method=mc_dsgt,mixer=accelerated(rounds=12),topology=ring --workdir=WORKDIR",
        "disagreement after 12 accelerated rounds ÷ 12 plain ones; refused on sun graphs",
        oracles.accelerated,
        0.5,
    ),
    Row(
        "FCGS",
        "arXiv 2410.08017",
        "none: bytes behind an entropy coder are estimated, by decjax.codecs.entropy",
        "estimated bits beside the entropy of matched Gaussians, relative",
        oracles.gaussian_rate,
        0.02,
    ),
    Row(
        "Ravnest",
        "arXiv 2401.01728",
        "launch.train --config=configs/lm.py:workers=2,stages=4,microbatches=2,delay=1,steps=300,"
        "method=diloco(every=10,outer_learning_rate=1.0,outer_momentum=0.0) --workdir=WORKDIR",
        "nothing late, an average every step: loss beside synchronous SGD, relative",
        oracles.ravnest,
        1e-4,
    ),
    Row(
        "independent subnetwork training",
        "arXiv 1910.02120",
        "launch.train --config=configs/digits.py:method=ist,every=25,model=mlp --workdir=WORKDIR",
        "distance from its known fixed point on a quadratic, ÷ that point's from the optimum",
        oracles.subnetworks,
        0.1,
    ),
    Row(
        "RandomTMA and SuperTMA",
        "arXiv 2305.09887",
        "launch.train --config=configs/nodes.py:partition=super --workdir=WORKDIR",
        "discrepancy of gradients, nodes at random ÷ few edges cut; that of random clusters lies below few edges cut",
        oracles.node_partitions,
        0.2,
    ),
    Row(
        "adaptive serverless learning",
        "arXiv 2008.10422",
        "launch.train --config=configs/digits.py:order=atc,every=4 --workdir=WORKDIR",
        "noise floor ~ N^a of Adam with gossip every 4 steps: distance of a from −1",
        oracles.adaptive_serverless,
        0.1,
    ),
    Row(
        "hybrid MPI compression",
        "arXiv 2409.02423",
        "launch.train --config=configs/lm.py:smoke,steps=200,method=allreduce,workers=2,stages=2,tensor=2,reducer=codec,"
        "codec=zfp(rate=7) --config.schedule.learning_rate=6e-3 --workdir=WORKDIR",
        "loss with coded gradients, all else exact, beside none coded, relative; three seeds",
        oracles.hybrid,
        0.01,
    ),
    Row(
        "hybrid MPI compression, naive",
        "arXiv 2409.02423",
        "launch.train --config=configs/lm.py:smoke,steps=200,method=allreduce,workers=2,stages=2,tensor=2,reducer=codec,"
        "codec=zfp(rate=7),backward=zfp(rate=7),forward=zfp(rate=7),tensor_codec=zfp(rate=7) --config.boundary.when=always "
        "--config.boundary.error=none --config.schedule.learning_rate=6e-3 --workdir=WORKDIR",
        "the loss increase of the row above ÷ that with the codec on all three axes",
        oracles.uniform,
        0.2,
    ),
    Row(
        "learned autoencoder",
        "arXiv 2301.02654",
        "launch.train --config=configs/lm.py:stages=2,workers=4,microbatches=2,autoencoder=16,steps=300 --workdir=WORKDIR",
        "loss of each token with full width beside none, relative",
        oracles_low_rank.boundary_autoencoder,
        1e-4,
    ),
    Row(
        "activations and gradients",
        "arXiv 2401.07788",
        "launch.train --config=configs/lm.py:workers=2,stages=4,microbatches=2,method=allreduce,forward=topk(fraction=0.2),"
        "backward=identity,steps=300 --config.boundary.reuse_indices=True --config.boundary.error=none --workdir=WORKDIR",
        "loss with gradients at the activations' places ÷ at their own, equal bytes",
        oracles.shared_places,
        1.0,
    ),
    Row(
        "GraVAC",
        "arXiv 2305.12201",
        "launch.train --config=configs/lm.py:method=allreduce,reducer=gravac,steps=500 --workdir=WORKDIR",
        "steps after a drop of the gain until it is a rung lower for good, ÷ window",
        oracles.gravac_drop,
        2.0,
    ),
    Row(
        "GraVAC, measured speed",
        "arXiv 2305.12201",
        "launch.train --config=configs/lm.py:model=lstm,method=allreduce,reducer=gravac(speed=measured),steps=300 --workdir=WORKDIR",
        "one rung is made slow: windows until it is left for the rung below, where it stays",
        oracles.gravac_delay,
        1.0,
    ),
    Row(
        "dual-level DLRM compression",
        "arXiv 2407.04272",
        "launch.train --config=configs/clicks.py:bound=0.02,gradient_bound=0.01,start=4,within=400 --workdir=WORKDIR",
        "largest error of a lookup or gradient ÷ its table's bound, all steps",
        oracles_tables.worst,
        1.0,
    ),
    Row(
        "dual-level DLRM compression, loss",
        "arXiv 2407.04272",
        "launch.train --config=configs/clicks.py:bound=0.02,gradient_bound=0.01,start=4,within=400 --workdir=WORKDIR",
        "log-loss beside that without bounds, in deviations of 3 seeds",
        oracles_tables.beyond_noise,
        1.0,
    ),
    Row(
        "transformer compression",
        "arXiv 2402.05964",
        "launch.compress --workdir=WORKDIR",
        "error at full rank, relative",
        oracles.full_rank,
        1e-5,
    ),
    Row(
        "unified low-rank compression of click models",
        "arXiv 2405.18146",
        "experiments.low_rank_clicks --out=WORKDIR",
        "what outputs lose beside the sum of discarded eigenvalues, relative; full rank exact",
        oracles_low_rank.low_rank_clicks,
        1e-4,
    ),
)


def tabulate(found: dict[Row, tuple[float, float]], last: str) -> Any:
    """One row a system, whose last column is "to try", for a page, or "took, s", for a terminal."""
    table = script.table("system", "oracle", "figure", "asked", "met", last, left=2)
    table.columns[-1].justify = "left"
    for row, (figure, took_s) in found.items():
        words = " ".join(map(shlex.quote, row.command.split()))
        command = row.command if row.command.startswith("none") else f"`python -m {words}`"
        met = "yes" if figure <= row.most else "NO"
        shown = {"to try": command, "took, s": f"{took_s:.1f}"}[last]
        table.add_row(f"{row.name}, {row.source}", row.oracle, f"{figure:.2g}", f"≤ {row.most:g}", met, shown)
    return table


def main() -> int:
    script.check_tables("related")
    found = {}
    for row in script.choose(ROWS, FLAGS.only):
        begun = time.monotonic()
        found[row] = row.measure(FLAGS.smoke), time.monotonic() - begun
        script.show(f"{row.name}: {row.command}")
    script.show(tabulate(found, "took, s"))
    script.fill("related", tabulate(found, "to try"))
    return 0 if all(figure <= row.most for row, (figure, _) in found.items()) else 1


if __name__ == "__main__":
    flags.DEFINE_multi_string("only", [], f"Of {'; '.join(row.name for row in ROWS)}; may be repeated; none: all.")
    script.selects("only")
    flags.DEFINE_bool("smoke", False, "Quickly: fewer steps, smaller samples.")
    flags.DEFINE(command.FOLDER, "pages", None, script.PAGES)
    script.run(main, (ValueError, OSError))
