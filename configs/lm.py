"""A byte-level decoder-only transformer on real text, trained by 8 workers with decentralized AdamW.

    python -m launch.train --config=configs/lm.py --workdir=runs/lm

Shorthand, comma-separated after a colon, as `--config=configs/lm.py:workers=12,topology=torus,optimizer=accum_adamw`:

    workers=N  local_size=L  topology=NAME  method=decentralized|allreduce|diloco|sparseloco|local
    optimizer=adamw|accum_adamw|sgdm|sign  order=awc|atc  mixer=exact|choco|deepsqueeze|dcd|beer|push_sum|power_gossip
    reducer=mean|powersgd|codec|demo|onebit_adam|gravac  codec=NAME  rank=R  every=H  engine=auto|fused|split
    stages=S  tensor=T  microbatches=M  schedule=gpipe|1f1b|interleaved  chunks=C  remat  tied
    backward=CODEC  forward=CODEC  autoencoder=R  fused  compressed=K|auto
    steps=N  stale  simulate  smoke

Each worker is stages x tensor devices, which hold one model between them: 2 workers of 4 devices with stages=2,tensor=2,workers=2.

Any field below can be set with `--config.FIELD=VALUE`. The defaults are for two CPU cores, where the run
takes about three minutes; expect 0.96 to 0.97 nats/byte on validation text.
"""

import ml_collections

from configs import shorthand

# (learning rate, weight decay) of the main job, the best of those tried; sgdm's and sign's are not tuned. Noise in a worker's
# own small batch inflates Adam's second moment, so that the signal moves less per step: gossip takes a larger rate than the averaged
# gradient. AccumAdam squares the mean of a window, and lies between; its moments, which stand still for a window, bear that
# rate in order "atc" only, where a step is mixed as soon as it is taken.
TUNED = {
    "awc": dict(adamw=(2.8e-2, 0.03), accum_adamw=(1.6e-2, 0.1), sgdm=(0.5, 1e-4), sign=(2e-3, 0.1)),
    "atc": dict(adamw=(2.8e-2, 0.03), accum_adamw=(2.4e-2, 0.05), sgdm=(0.5, 1e-4), sign=(2e-3, 0.1)),
}
TUNED_ALLREDUCE = TUNED["awc"] | dict(adamw=(1.2e-2, 0.03))

# Of each reducer and method that needs one: the codec, γ of the memory of what messages lose, and how messages are averaged.
CODED = dict(
    codec=("int8", 1.0, "auto"),
    demo=("dct", 0.999, "gather"),
    onebit_adam=("scaled_sign", 1.0, "shards"),
    sparseloco=("block_topk(values=int2)", 0.95, "gather"),
)

KEYS = dict(
    workers=int,
    local_size=int,
    topology=str,
    method=("decentralized", "allreduce", "diloco", "sparseloco", "local"),
    optimizer=("adamw", "accum_adamw", "sgdm", "sign"),
    order=("awc", "atc"),
    engine=("auto", "fused", "split"),
    steps=int,
    mixer=("exact", "choco", "deepsqueeze", "dcd", "beer", "push_sum", "power_gossip"),
    reducer=("mean", "powersgd", "codec", "demo", "onebit_adam", "gravac"),
    codec=str,
    rank=int,
    every=int,
    stages=int,
    tensor=int,
    microbatches=int,
    schedule=("gpipe", "1f1b", "interleaved"),
    chunks=int,
    remat=bool,
    tied=bool,
    backward=str,
    forward=str,
    autoencoder=int,
    fused=bool,
    compressed=str,
    stale=bool,
    simulate=bool,
    smoke=bool,
)

# What each mixer's graph has to be, where the default one is not: symmetric, or symmetric and the same in all steps.
TOPOLOGIES = dict(power_gossip=("one_peer_exponential", "pairwise=True"), dcd=("ring", ""), beer=("ring", ""))
PIPELINED = ("schedule", "chunks", "backward", "forward")  # keys that change nothing where a worker has one stage
# Keys of what is sent, and the methods that they change.
SENDING = dict(
    topology=("decentralized",),
    mixer=("decentralized",),
    reducer=("allreduce", "diloco", "sparseloco"),
    stale=("allreduce",),
    every=("decentralized", "diloco", "sparseloco"),
    codec=("decentralized", "allreduce", "diloco", "sparseloco"),
)


def _refuse_idle(given: dict) -> None:
    """Refuses keys of what is sent that would change nothing: nobody should believe in a compression that is not there."""
    if given.get("stages", 1) == 1 and (idle := [key for key in PIPELINED if key in given]):
        key = idle[0]
        raise ValueError(f"config argument {key}={given[key]} changes nothing with stages=1; leave it out, or use stages=2")
    method = given.get("method", "decentralized")
    for key in SENDING.keys() & given.keys():
        if method not in SENDING[key]:
            raise ValueError(
                f"config argument {key}={given[key]} changes nothing with method={method}; leave it out, or use "
                f"method={'|'.join(SENDING[key])}"
            )
    reducer = given.get("reducer", "codec" if method == "sparseloco" else "mean")
    if "codec" in given and (given.get("mixer") == "power_gossip" or (method != "decentralized" and reducer not in CODED)):
        raise ValueError(
            f"config argument codec={given['codec']} changes nothing here: mixer=power_gossip and reducers other than "
            f"{', '.join(CODED)} have none; leave it out" + ("" if method == "decentralized" else ", or use reducer=codec")
        )
    if "rank" in given and given.get("mixer") != "power_gossip" and reducer != "powersgd":
        raise ValueError(
            f"config argument rank={given['rank']} changes nothing here; use it with mixer=power_gossip or reducer=powersgd"
        )


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The config; `arg` is the shorthand."""
    given = shorthand.parse(arg, KEYS)
    _refuse_idle(given)
    smoke = given.get("smoke", False)
    config = ml_collections.ConfigDict()
    config.seed = 0

    workers = ml_collections.FieldReference(given.get("workers", 0))
    config.workers = workers  # 0: one per device; 8 simulated ones on a lone accelerator
    config.local_size = given.get("local_size", 1)  # workers that share a node
    config.simulate = given.get("simulate", False)  # all workers on one device
    microbatches = given.get("microbatches", 1)
    config.batch_size = workers * (2 * microbatches)  # sequences per step, over all workers
    config.steps = given.get("steps", 20 if smoke else 5000)

    config.tensor = given.get("tensor", 1)  # devices that divide the arrays of a stage
    config.pipeline = ml_collections.ConfigDict(
        dict(
            stages=given.get("stages", 1),
            microbatches=microbatches,  # parts of a worker's batch, which are under way one behind the other
            schedule=given.get("schedule", "1f1b"),  # gpipe | 1f1b | interleaved
            chunks=given.get(
                "chunks", 2 if given.get("schedule") == "interleaved" else 1
            ),  # interleaved: runs of layers on each stage
            layers="",  # of each of the stages x chunks runs, as "2,1,1,2"; empty: equally many
            remat=given.get("remat", False),  # compute a stage's forward pass anew in its backward pass
            autoencoder=given.get(
                "autoencoder", 0
            ),  # R: what travels between stages is learned to be so wide; 0: as wide as the model
            fused_embedding=given.get(
                "fused", False
            ),  # allreduce, tied: add the two gradients of the table up where they are averaged
        )
    )
    config.boundary = ml_collections.ConfigDict(
        dict(  # messages between stages
            backward=given.get("backward", ""),  # of gradients, as low_rank(rank=4); empty: as they are
            when="epilogue",  # which gradients: epilogue: those that a stage waits for in its cool-down | always
            error="carry",  # what they lose joins the next: carry | flush: a step's last, any of the next step's | reset: none; ef21 | none
            forward=given.get("forward", ""),  # of activations, as int8; empty: as they are
            forward_error="none",  # none | carry | reset | ef21 | samples: an estimate for each (AQ-SGD)
            slots=0,  # its places for samples: some times as many as a worker has
            reuse_indices=False,  # gradients at those places only that forward=topk chose; backward is then the form of these values
        )
    )

    config.method = given.get("method", "decentralized")  # decentralized | allreduce | diloco | sparseloco | local
    reducer = given.get("reducer", "codec" if config.method == "sparseloco" else "mean")
    coded = config.method if config.method == "sparseloco" else reducer if reducer in CODED else None
    config.stale = given.get("stale", False)  # allreduce: overlap it, and apply the gradient of the step before
    config.engine = given.get("engine", "auto")  # fused: one executable a step | split: the exchange in its own thread
    config.bucket_bytes = 2**18  # arrays travel joined up to this size; 0: each by itself
    graph, options = TOPOLOGIES.get(given.get("mixer"), ("one_peer_exponential", ""))
    config.topology = ml_collections.ConfigDict(
        dict(
            name=given.get("topology", graph),  # python -m launch.topologies lists them
            options="" if "topology" in given else options,  # as "k=2,seed=1"
        )
    )
    config.mixing = ml_collections.ConfigDict(
        dict(
            order=given.get("order", "awc"),  # awc: overlaps with the gradient | atc: after the step
            rounds=1,  # rounds of the topology per mixing step
            accelerated=False,  # static symmetric graphs only
            every=given.get("every", 1) if config.method == "decentralized" else 1,  # mix in every p-th step
            mixer=given.get("mixer", "exact"),  # exact | choco | deepsqueeze | dcd | beer | push_sum | power_gossip
            codec="" if coded else given.get("codec", ""),  # messages, as int8 or int8(block=128); empty: as they are
            gamma=0.0,  # step size of choco, deepsqueeze, beer and push_sum; 0: as the codec allows
            rank=given.get("rank", 1),  # columns that power_gossip sends
            strength=1.0,  # γ: 0 none, 1 full
            strength_power=0.0,  # γ follows (learning rate / peak)^power
            static_phase=True,  # one program per phase; False: one program that switches
        )
    )
    config.reducer = ml_collections.ConfigDict(
        dict(
            name=reducer,  # allreduce, diloco: mean | powersgd | codec | demo | gravac; allreduce: onebit_adam; sparseloco: codec
            start=config.steps // 6 if reducer == "onebit_adam" else 0,  # the plain mean before this step, or outer step
            stages=given.get("compressed", ""),  # of a pipeline, the first k compress: k | auto: as `cluster` needs it | empty: all
            cluster="",  # auto: a profile, as configs/clusters/optimus_a100.json
            rank=given.get("rank", 4),  # powersgd: R
            gate=1.0,  # powersgd: arrays I×J with (I + J)R ≥ gate·IJ travel as they are
            wire_dtype="",  # powersgd: of the factors' messages: bfloat16 | float16 | empty: float32
            codec=given.get("codec", CODED[coded][0]) if coded else "",  # of those in CODED above, as "int8(block=128)"
            form=CODED[coded][2] if coded else "auto",  # gather: N−1 messages | shards: 2(N−1)/N, coded twice | auto: the lesser
            error="residual",  # what is remembered of what messages lose: residual | momentum | ef21 | none: for unbiased codecs
            decay=CODED[coded][1] if coded else 1.0,  # residual: γ, what is left of the memory after a step
            momentum=0.9,  # momentum, ef21: β
            storage="",  # the memory's form: int8, or any codec without state | empty: in full
            ladder="bfloat16; int8; int4",  # gravac: codecs from the mildest to the strongest
            window=2 if smoke else 50,  # gravac: steps between its decisions
            threshold=0.5,  # gravac: the least gain
        )
    )
    config.outer = ml_collections.ConfigDict(
        dict(  # diloco, sparseloco: the step along the average change
            every=given.get("every", 5 if smoke else 30),  # H steps
            learning_rate=0.7 if config.method == "diloco" else 1.0,
            momentum=0.9 if config.method == "diloco" else 0.0,  # Nesterov's
        )
    )
    config.consensus_every = 0  # K: replace all replicas by their average every K steps; 0 never

    optimizer = given.get("optimizer", "sign" if reducer == "demo" else "adamw")
    tuned = TUNED_ALLREDUCE if config.method == "allreduce" else TUNED[config.mixing.order]
    learning_rate, weight_decay = tuned[optimizer]
    config.optimizer = ml_collections.ConfigDict(
        dict(
            name=optimizer,  # adamw | accum_adamw | sgdm | sign
            learning_rate=learning_rate,
            warmup_steps=min(150, config.steps // 10),
            final_fraction=0.05,  # of the learning rate, at the end of the cosine
            b1=0.8 if optimizer == "accum_adamw" else 0.9,  # accum_adamw: per window
            b2=0.98 if optimizer == "accum_adamw" else 0.99,
            eps=1e-8,
            weight_decay=weight_decay,
            window=4,  # of accum_adamw, steps
            momentum=0.9,  # of sgdm
            clip_norm=1.0,  # of each worker's own gradient; 0: none
        )
    )
    config.model = ml_collections.ConfigDict(
        dict(
            vocabulary=256,
            context=32 if smoke else 128,
            width=16 if smoke else 64,
            hidden=32 if smoke else 256,
            heads=2,
            depth=max(2, given.get("stages", 1) * given.get("chunks", 2 if given.get("schedule") == "interleaved" else 1)),
            tied=given.get("tied", False),  # one table for embedding and head
            dtype="float32",  # of the computation; parameters are float32
        )
    )
    config.data = ml_collections.ConfigDict(
        dict(
            path="",  # a text file or folder; empty: the Python standard library's sources
            partition="iid",  # iid | contiguous: each worker its own part of the text
        )
    )
    config.log_every = 5 if smoke else 10
    config.eval = ml_collections.ConfigDict(
        dict(
            every=10 if smoke else 500,
            num_windows=16 if smoke else 128,  # of the validation text in periodic evaluations, 0: all; the last takes all
            batch_size=8,
        )
    )
    config.checkpoint = ml_collections.ConfigDict(dict(every=10 if smoke else 500, keep=2))
    config.sample_bytes = 40 if smoke else 400  # of text at the end
    return config
