"""The runs of each study: quality at equal tokens, the gap of overlapped gossip, ablations, and methods for heterogeneous data.

Gossip is overlapped (order "awc") unless a row says otherwise. `experiments.quality` makes the runs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

WORKERS, NODE, WINDOW = 16, 4, 8
LEAD, OTHERS = 3, 1  # seeds of the rows of a claim, and of the others
ALL_REDUCE = "all-reduce, AdamW"
# Of the data of the results pages, by flag.
CHECKSUMS = {"multi30k": "c857046e", "cifar10": "0be870b2", "shakespeare": "df613551", "text": "0509bf97"}


class Row(NamedTuple):
    """A method of a study.

    Attributes:
        shorthand: of its config.
        seeds: number of runs besides those of tuning.
        fields: of its config, dotted, in addition to those of the study.
        longer: factor of the study's steps.
        grid: learning rates for tuning; none: those of the study.
        like: the row whose rate it has; "": it is tuned.
        against: the row that it is compared with; "": the first one.
    """

    shorthand: str
    seeds: int = OTHERS
    fields: Mapping[str, Any] = {}
    longer: float = 1.0
    grid: tuple[float, ...] = ()
    like: str = ""
    against: str = ""


class Study(NamedTuple):
    """A task, and the methods that are compared on it.

    Attributes:
        config: config file.
        rows: methods by name; the others are compared with the first one.
        metric: entry of summary.json that is compared.
        unit: its unit.
        grid: learning rates for tuning; a single one is not tuned.
        steps: of a run.
        tuning_steps: of a run for tuning; 0: as many as `steps`.
        shorthand: of all rows.
        fields: of all rows.
        tuning_fields: of the runs for tuning: validation data that the table does not show, if the task has them. Digits and texts
            have none: a rate is chosen by the loss on the examples of the table, in a run with a separate seed.
        data: the flag with the path of the data; "": none is needed.
        rates: the study whose rates are used; "": rates are tuned.
    """

    config: str
    rows: Mapping[str, Row]
    metric: str
    unit: str
    grid: tuple[float, ...]
    steps: int
    tuning_steps: int = 0
    shorthand: str = f"workers={WORKERS},local_size={NODE}"
    fields: Mapping[str, Any] = {}
    tuning_fields: Mapping[str, Any] = {}
    data: str = ""
    rates: str = ""


# -- Quality at equal tokens ------------------------------------------------------------------------------------------

ALL = Row("method=allreduce,optimizer=adamw", LEAD)
ACCUM = f"accum_adamw(window={WINDOW})"
ADAMS = {"D-Adam": "adamw", "AccumAdam": ACCUM}
GRAPHS = {"complete": "complete", "AER": "alternating_exponential_ring", "one-peer": "one_peer_exponential"}
METHODS = {ALL_REDUCE: ALL} | {
    f"{adam}, {name}": Row(
        f"topology={graph},optimizer={optimizer}",
        OTHERS if name == "complete" else LEAD,
        like="" if name == "AER" else f"{adam}, AER",
    )
    for adam, optimizer in ADAMS.items()
    for name, graph in GRAPHS.items()
}
TEXT = Study("configs/lm.py", METHODS, "eval_loss", "nats/byte", (8e-3, 1.6e-2, 3.2e-2), 2000, 1000)
IMAGES = Study("configs/cifar.py", METHODS, "eval_accuracy", "accuracy", (4e-3, 8e-3, 1.6e-2), 600, 200, data="cifar10")
B1 = {"optimizer.b1": 0.9}  # per window, as that of D-Adam per step; configs/translation.py has another one
TRANSLATING = {name: row._replace(fields=B1) if ACCUM in row.shorthand else row for name, row in METHODS.items()}
QUALITY = {
    "translation": Study(
        "configs/translation.py", TRANSLATING, "eval_bleu", "BLEU", (4e-3, 8e-3, 1.6e-2), 1000, 500, data="multi30k"
    ),
    "cifar": IMAGES._replace(tuning_fields={"data.validation": 0.1}),
    "digits": IMAGES._replace(config="configs/digits.py", grid=(1e-2, 2e-2, 4e-2), steps=300, tuning_steps=0, data=""),
    "python": TEXT,
    "shakespeare": TEXT._replace(data="shakespeare", rates="python"),
}

# -- The gap of overlapped gossip -------------------------------------------------------------------------------------

MAIN, ATC, TO_ZERO = (
    "one-peer",
    "order atc",
    {"schedule.final_fraction": 0.0},
)  # MAIN: the method of configs/lm.py, whose gap is studied
NESTEROV = {"optimizer.nesterov": True}  # the next step's momentum in this one, as NAdam
MORE = f"{MAIN}, 1.25 × the steps"
MOMENTS = {  # Each is tuned.
    "β1 = 0.974": {"optimizer.b1": 0.974},
    "β1 = 0.95": {"optimizer.b1": 0.95},
    "β1 = 0.8": {"optimizer.b1": 0.8},
    "β1 = 0.6": {"optimizer.b1": 0.6},
    "β2 = 0.999": {"optimizer.b2": 0.999},
    "β1 = 0.974, β2 = 0.999": {"optimizer.b1": 0.974, "optimizer.b2": 0.999},
    "Nesterov": NESTEROV,
}
CANDIDATES = {  # They have the rate of MAIN.
    "no weight decay": {"optimizer.weight_decay": 0.0},
    "no clipping": {"clip_norm": 0.0},
    "clipping at 0.1": {"clip_norm": 0.1},
    "mixing follows the rate": {"method.strength_power": 0.5},
    "rate ends at zero": TO_ZERO,
    "equal replicas in the first 5 %": {"consensus_first": 100},
    "equal replicas in the last 5 %": {"consensus_last": 100},
}
GAP_ROWS = {  # Each has three seeds, since most rows of gossip differ by little more than their seeds.
    ALL_REDUCE: ALL,
    "all-reduce, one step stale": ALL._replace(shorthand=f"{ALL.shorthand},stale"),
    "all-reduce, β1 = 0.974": ALL._replace(fields={"optimizer.b1": 0.974}),
    "all-reduce, Nesterov": ALL._replace(fields=NESTEROV),
    "all-reduce, rate ends at zero": ALL._replace(fields=TO_ZERO, like=ALL_REDUCE),
    "order atc, complete graph": Row("topology=complete,order=atc", LEAD, like=ATC),
    ATC: Row("order=atc", LEAD),
    "complete graph": Row("topology=complete", LEAD),
    "two rounds": Row("", LEAD, {"mixer.rounds": 2}),
    MAIN: Row("", LEAD),
    MORE: Row("", LEAD, longer=1.25, like=MAIN),
    **{name: Row("", LEAD, fields) for name, fields in MOMENTS.items()},
    **{name: Row("", LEAD, fields, like=MAIN) for name, fields in CANDIDATES.items()},
    **{
        f"AccumAdam, s = {s}, β1 = {b1}": Row(f"optimizer=accum_adamw(window={s})", LEAD, {"optimizer.b1": b1})
        for s, b1 in ((2, 0.8), (2, 0.9), (4, 0.8), (4, 0.9), (4, 0.95))
    },
}
GAP = TEXT._replace(rows=GAP_ROWS, steps=2000, tuning_steps=700, grid=(1e-2, 2e-2, 4e-2), shorthand="workers=8")
ACCUM_2 = "AccumAdam, s = 2, β1 = 0.9"
LARGE = GAP._replace(
    rows={name: GAP_ROWS[name] for name in (ALL_REDUCE, MAIN, ACCUM_2)}, fields={"batch_size": 64}, steps=8000, tuning_steps=3000
)
ONE_PEER = f"topology={GRAPHS['one-peer']}"
TRANSLATED = {name: METHODS[name] for name in (ALL_REDUCE, "D-Adam, AER", "D-Adam, one-peer")} | {
    # 0.43 is 0.9 to the power of 8: a gradient has the same lifetime in steps as with D-Adam.
    "AccumAdam, one-peer, β1 = 0.43": Row(f"{ONE_PEER},optimizer={ACCUM}", LEAD, {"optimizer.b1": 0.43}),
    "D-Adam, one-peer, 1.25 × the steps": METHODS["D-Adam, one-peer"]._replace(longer=1.25, seeds=OTHERS),
}
GAPS = {
    "gap": GAP,
    # Four times as long; also four times the batch; and that on a text without tuning.
    "gap_longer": GAP._replace(rows={name: GAP_ROWS[name] for name in (ALL_REDUCE, ATC, MAIN)}, steps=8000, tuning_steps=4000),
    "gap_both": LARGE,
    "gap_shakespeare": LARGE._replace(data="shakespeare", rates="gap_both"),
    "gap_translation": QUALITY["translation"]._replace(rows=TRANSLATED),
}

# -- Ablations --------------------------------------------------------------------------------------------------------

SHORT = TEXT._replace(steps=1000, tuning_steps=300)
ADAMW = {"optimizer.b1": 0.9, "optimizer.b2": 0.99, "optimizer.weight_decay": 0.03}  # of configs/lm.py
TOPOLOGIES = "ring torus one_peer_exponential exponential alternating_exponential_ring complete".split()
GLOBAL_BATCH = 32  # sequences
ABLATIONS = {
    "graphs": SHORT._replace(rows={ALL_REDUCE: ALL} | {name: Row(f"topology={name}") for name in TOPOLOGIES}, tuning_steps=500),
    "window": SHORT._replace(
        # With the other options of AdamW: AccumAdam with s = 1 is Adam.
        rows={ALL_REDUCE: ALL} | {f"s = {s}": Row(f"optimizer=accum_adamw(window={s})", fields=ADAMW) for s in (1, 2, 4, 8, 16)}
    ),
    "strength": SHORT._replace(
        rows={ALL_REDUCE: ALL}
        | {"1": Row(ONE_PEER)}
        | {f"(rate ÷ peak)^{p:g}": Row(ONE_PEER, fields={"method.strength_power": p}) for p in (0.25, 0.5, 1.0)},
        tuning_steps=500,
    ),
    "distance": SHORT._replace(
        rows={f"rate {rate:g}": Row(ONE_PEER, grid=(rate,)) for rate in (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)}
    ),
    "workers": SHORT._replace(
        shorthand="",
        rows={
            f"{name}, N = {N}": Row(f"{method},workers={N}", longer=WORKERS / N, against=f"all-reduce, N = {N}")
            for N in (4, 8, 16, 32, 64)
            for name, method in {"all-reduce": "method=allreduce", "D-Adam": "order=awc"}.items()
        },
    ),
    "batch": SHORT._replace(
        shorthand="",
        fields={"batch_size": GLOBAL_BATCH},
        rows={ALL_REDUCE: Row(f"method=allreduce,workers={WORKERS}")}
        | {
            f"{name}, {batch} a worker": Row(f"optimizer={optimizer},workers={GLOBAL_BATCH // batch}")
            for batch in (1, 2, 4, 8)
            for name, optimizer in ADAMS.items()
        },
    ),
}
# -- Different data on each worker -----------------------------------------------------------------------------------

SGD = "optimizer=sgdm(momentum=0.0)"
ALL_REDUCE_SGDM, DSGD, DSGDM, QG, DECENTLAM = "all-reduce, SGDm", "DSGD", "DSGDm", "QG-DSGDm", "DecentLaM"
D2, TRACKING, RELAY = "exact diffusion", "gradient tracking", "RelaySGDm"
SKEWED = {
    ALL_REDUCE_SGDM: Row("method=allreduce,optimizer=sgdm", LEAD),
    DSGD: Row(f"topology=ring,order=atc,{SGD}", LEAD, grid=(0.5, 1.0, 2.0)),
    DSGDM: Row("topology=ring,order=atc,optimizer=sgdm", LEAD),
    QG: Row("topology=ring,method=qg_dsgdm", LEAD),
    DECENTLAM: Row("topology=ring,method=decentlam", LEAD),
    D2: Row(f"topology=ring,method=exact_diffusion,{SGD}", LEAD, grid=(0.5, 1.0, 2.0)),
    TRACKING: Row(f"topology=ring,method=tracking,order=atc,{SGD}", LEAD, grid=(0.5, 1.0, 2.0)),
    RELAY: Row("topology=ring,mixer=relay,optimizer=sgdm", LEAD),
}
ALPHAS = (10.0, 1.0, 0.1)
DIRICHLET = {
    f"dirichlet_{alpha:g}": QUALITY["digits"]._replace(
        rows=SKEWED,
        grid=(0.05, 0.1, 0.2),
        tuning_steps=150,
        shorthand=f"workers={WORKERS}",
        fields={"data.partition": f"dirichlet(alpha={alpha:g})", "model.norm": "group"},  # Batch statistics would differ, too.
    )
    for alpha in ALPHAS
}
UNCLIPPED = {"clip_norm": 0.0}
MULTI30K = {
    f"multi30k_{graph}": TEXT._replace(
        rows={
            DSGD: Row(f"topology={graph},order=atc,{SGD}", LEAD, UNCLIPPED, grid=(0.5, 1.0, 2.0)),
            "DSGD, clipped": Row(f"topology={graph},order=atc,{SGD}", LEAD, grid=(0.5, 1.0, 2.0)),
            QG: Row(f"topology={graph},method=qg_dsgdm", LEAD, UNCLIPPED, grid=(0.1, 0.2, 0.4)),
            "GT-Adam": Row(f"topology={graph},method=tracking,order=atc", LEAD, UNCLIPPED),
            "GT-NSGDm": Row(f"topology={graph},method=gt_nsgdm", LEAD, UNCLIPPED, grid=(0.05, 0.1, 0.2)),
        },
        steps=800,
        tuning_steps=250,
        shorthand="workers=8",
        data="text",
        rates="" if graph == "ring" else "multi30k_ring",
    )
    for graph in ("ring", "exponential", "complete")
}

PAPER = {**QUALITY, **GAPS, **ABLATIONS}
STUDIES = {**PAPER, **DIRICHLET, **MULTI30K}
