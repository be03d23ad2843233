"""Three hundred hostile inputs in one process: each is accepted, or refused on one line, within seconds."""

import copy
import json
import random
import time

import jax
import pytest

from configs import lm, shorthand
from decjax import codecs, costmodel, registry, topology
from decjax import config as parts
from experiments import compare
from launch import plan_model
from tests.audit_test import SHORTHANDS, changed, flat
from tests.runs import spec_of

pytestmark = pytest.mark.slow
COUNT = 300
MOST_S = 10.0  # CPU time; alone and compiled, each takes less than two
HOSTILE = (
    0, -1, 1, 3, 10**9, 2**31, 10**30, -(10**30), 0.5, 1e300, -1e300, float("inf"), float("nan"), True, None, "", " ", "x" * 999, "\n",
    "none", "auto", [], [1], {}, {"name": "exact"}, "ring(num_workers=3)", "ring(name='x')", "base_k(k={[]:1})", "int8(block=8,block=16)",
    "topk(fraction=2)", "int8(", "a.b", "f(1)", "[" * 500, "(" * 5000, "../../etc/passwd", "~", "\x00", "int4(block=1000000000)", "Ω",
)  # fmt: skip


def configs():
    """The documents of ten tiny runs."""
    found = []
    for text in SHORTHANDS:
        config = lm.get_config(f"smoke,workers={2 if 'stages' in text else 4},{text}")
        config.update_from_flattened_dict({"model.width": 8, "model.hidden": 8, "model.heads": 1, "model.context": 8})
        found.append(spec_of(config).document)
    return found


def a_config(rng, documents):
    document = copy.deepcopy(rng.choice(documents))
    for name, _ in rng.sample(list(flat(document)), rng.choice((1, 1, 2))):
        document = changed(document, name, rng.choice(HOSTILE))
    return lambda: parts.resolve(document)


def a_section(rng, documents):
    document = copy.deepcopy(rng.choice(documents))
    name = rng.choice(list(document))
    if rng.random() < 0.5:
        del document[name]
    else:
        document[rng.choice([name, "name", "colour"])] = rng.choice(HOSTILE)
    return lambda: parts.resolve(document)


def a_text(rng, documents):
    text = rng.choice([value for value in HOSTILE if isinstance(value, str)])
    name = rng.choice(("int8", "topk", "low_rank", "bounded", "zfp"))
    return rng.choice(
        [
            lambda: registry.parse("codec", text),
            lambda: codecs.make(text),
            lambda: topology.make(text, rng.choice((1, 2, 8))),
            lambda: lm.get_config(text),
            lambda: lm.get_config(f"mixer={text},codec={text}"),
            lambda: shorthand.parse(text, {"a": int, "b": ("x", "y")}),
            lambda: plan_model.parse(text, plan_model.Numbers),
            lambda: codecs.make(name, **{rng.choice(list(registry.part("codec", name).options) + ["x"]): rng.choice(HOSTILE)}),
        ]
    )


def a_file(rng, documents, folder):
    """A cluster profile, or a run's directory, with an unusual value in it."""
    row = dict(
        step=4, time_s=1.0, kind="train", loss=1.0, loss_min=1.0, loss_max=1.0, consensus_distance=0.1, bytes_sent_per_worker=1.0
    )
    odd = rng.choice(HOSTILE)
    row[rng.choice(list(row))] = odd
    (folder / "config.json").write_text(json.dumps(rng.choice([odd, *documents])))
    (folder / "metrics.jsonl").write_text(json.dumps(rng.choice([row, odd])) + "\n")
    profile = json.loads((compare.pathlib.Path("configs/clusters") / "a40_ethernet.json").read_text())
    names = [name for name, _ in flat(profile)]
    (folder / "profile.json").write_text(json.dumps(changed(profile, rng.choice(names), odd)))
    return rng.choice([lambda: compare.load(folder), lambda: costmodel.load(folder / "profile.json")])


def test_every_input_is_taken_or_refused_in_one_line(tmp_path):
    rng, documents, slow = random.Random(0), configs(), []
    for number in range(COUNT):
        kind = rng.choice((a_config, a_config, a_config, a_section, a_text, a_text, a_file))
        attempt = kind(rng, documents, tmp_path) if kind is a_file else kind(rng, documents)
        begun = time.process_time()
        try:
            attempt()
        except (ValueError, parts.ConfigError, compare.RunError, OSError) as error:
            assert "\n" not in str(error), (number, str(error)[:500])
        if (took_s := time.process_time() - begun) > MOST_S:
            slow.append((number, kind.__name__, took_s))
        jax.clear_caches() if number % 50 == 49 else None
    assert not slow
