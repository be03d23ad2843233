"""Every option has an effect: each field of thirteen configs is changed, one at a time, and the programs are compared.

A field that changes neither the compiled steps, the initial state, the batches nor the messages must be refused, or be one that
only controls how a run is observed.
"""

import functools
import itertools
import zlib

import jax
import numpy as np
import pytest

from configs import lm
from decjax import config as parts
from decjax import train
from tests.runs import spec_of

pytestmark = pytest.mark.slow
SHORTHANDS = (
    "topology=one_peer_exponential",
    "topology=hierarchical,local_size=2,optimizer=accum_adamw,order=atc",
    "mixer=choco,codec=int8,topology=ring",
    "mixer=push_sum,topology=directed_exponential,optimizer=sgdm",
    "mixer=power_gossip,rank=2",
    "method=allreduce,reducer=powersgd,rank=2",
    "method=onebit_adam,codec=int8",
    "method=diloco,every=3,reducer=codec,codec=int4",
    "method=noloco,every=3",
    "method=streaming_diloco,every=4",
    "method=zero_one_adam(doubling=2,refresh=1),codec=int8",
    "method=allreduce,reducer=dion,rank=2",
    "stages=2,microbatches=2,method=allreduce,tied,backward=int8,forward=int8",
)
# How a run is observed or dispatched, and where its files are.
WATCHING = (
    "eval.",
    "checkpoint.",
    "log_every",
    "elastic.",
    "engine",
    "data.sample_bytes",
    "data.path",
    "simulate",
    "local_size",
    "consensus_",
)
OTHER = {
    "order": "atc", "form": "gather", "error": "ef21", "dtype": "bfloat16", "codec": "int4", "partition": "contiguous", "when": "always",
    "forward_error": "ef21", "backward": "int4", "forward": "int4", "topology": "torus", "storage": "int8", "wire_dtype": "bfloat16",
    "mu_dtype": "bfloat16", "param_dtype": "bfloat16", "schedule": "gpipe", "gamma": 0.3, "layers": "1,3", "gate": 0.01,
}  # fmt: skip


# Fields that do not depend on the method are tried with every third config, each with other fields; pipelines divide the model.
SHARED = ("model.", "data.")


def is_tried(name, shorthand):
    turn = zlib.crc32(name.encode()) + SHORTHANDS.index(shorthand)
    return not name.startswith(SHARED) or "stages" in shorthand or turn % 3 == 0


def flat(document, prefix=""):
    for name, value in document.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def changed(document, path, value):
    """Return a copy with another value at a path."""
    first, _, rest = path.partition(".")
    return document | {first: changed(document[first], rest, value) if rest else value}


def another(name, value):
    """Return a different value for a field; None if there is none to try."""
    if (last := name.split(".")[-1]) in OTHER:
        return OTHER[last] if OTHER[last] != value else "int8"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return {"bucket_bytes": 64, "batch_size": 2 * value, "workers": 2 * value, "pipeline.stages": 2 * value}.get(
            name, value + 1
        )
    return value / 2 + 0.1 if isinstance(value, float) else None


def parts_of_a_run(spec):
    """Yield, as text, everything that defines a run: its steps, initial state, batches and messages, cheapest first."""
    trainer = train.Trainer(spec)
    phases = [trainer.method.phase(step) for step in range(8)]
    yield str((phases, spec.steps, spec.seed, trainer.workers))
    batch = trainer.batch(0)
    yield str([np.asarray(x).tolist() for x in jax.tree.leaves(batch)])
    yield str(jax.make_jaxpr(trainer.setup.start)(jax.random.key(0)))
    for phase in dict.fromkeys(phases):
        fn = functools.partial(trainer.step_parts.train_step, phase=phase)
        yield trainer.workers.jit(fn, (0, 0, None)).lower(trainer.abstract, batch, np.int32(0)).as_text()


@pytest.mark.parametrize("shorthand", SHORTHANDS)
def test_every_field_has_an_effect_or_is_refused(shorthand, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(97, 123)) * 100)
    workers, depth = (2, 4) if "stages" in shorthand else (4, 2)
    config = lm.get_config(f"smoke,workers={workers},{shorthand}")
    config.update_from_flattened_dict(
        {"data.path": str(text), "model.width": 8, "model.hidden": 8, "model.heads": 1, "model.context": 8, "model.depth": depth}
    )
    document = spec_of(config).document
    before, idle = list(parts_of_a_run(parts.resolve(document))), []
    for name, value in flat(document):
        if name.startswith(WATCHING) or name.endswith("name") or name == "task" or not is_tried(name, shorthand):
            continue
        if (other := another(name, value)) is None:
            continue
        try:
            after = parts_of_a_run(parts.resolve(changed(document, name, other)))
            same = all(old == new for old, new in itertools.zip_longest(before, after))  # up to the first difference
        except parts.ConfigError as error:
            assert "\n" not in str(error)
            continue
        if same and not (name == "bucket_bytes" and "powersgd" in shorthand):  # it packs its messages regardless
            idle.append(f"{name}: {value!r} -> {other!r}")
    assert not idle
