"""Predictions of the cost model, for single stages and pipelines, equal the recorded ones."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from decjax import topology as tp
from decjax.contrib.layouts import Boundary, DeviceLayout, Traffic, Transformer, choose_compressed_stages, predict_layout, work
from decjax.costmodel import Cluster, Jitter, Link, Workload, all_reduce, gossip, no_communication, predict

RECORDED = pathlib.Path(__file__).parent / "data" / "costmodel.json"
FLAT = Cluster("flat", 8, 1, Link(0, 1e10), Link(1e-3, 2e8), codec_Bps=1e9)
NODES = Cluster("nodes", 2, 4, Link(1e-5, 2e9), Link(1e-4, 1e8), False, 0.8, True)
ONE_PEER = tp.make("one_peer_exponential", 8)
METHODS = [
    no_communication(),
    all_reduce(8),
    all_reduce(8, overlap=True),
    all_reduce(8, bucketed=True, ratio=0.5),
    all_reduce(8, every=3, latencies=2.0),
    gossip(ONE_PEER),
    gossip(ONE_PEER, ratio=0.25, coding_s=0.01),
    gossip(ONE_PEER, bucketed=True, every=2),
    gossip(ONE_PEER, order="atc", ratio=0.25),
    gossip(tp.make("alternating_exponential_ring", 8, local_size=4), joint_ring=True),
    gossip(tp.make("ring", 8), order="atc", every=4),
]
JITTERS = [
    Jitter(),
    Jitter("lognormal", 0.05),
    Jitter("trace", trace_s=(0.1, 0.2, 0.15, 0.4), together=2, slow_workers=1, slow_factor=1.5),
]


def single_stage():
    for cluster, jitter, method in itertools.product((FLAT, NODES), JITTERS, METHODS):
        workload = Workload(0.1, (0.1, 0.05), (8e6, 4e6), 0.02, 0.01, jitter, beside_s=0.03)
        yield predict(cluster, workload, method, num_steps=32, num_replicas=2)


def pipelines():
    model = Transformer(16, 64, 4, 1024, 128, batch_size=64, tied=True)
    layouts = [
        DeviceLayout(8, 1, 1, 2),
        DeviceLayout(4, 2, 1, 4, inner="worker"),
        DeviceLayout(2, 4, 1, 8, blocking=False),
        DeviceLayout(2, 2, 2, 4, "interleaved", 2, remat="stages"),
        DeviceLayout(1, 8, 1, 16, "gpipe", remat="layers"),
    ]
    low_rank = Boundary(0.1, "low_rank", "epilogue")
    for cluster, layout in itertools.product((FLAT, NODES), layouts):
        N, load = layout.workers, work(model, layout, 1e11 if cluster is FLAT else 2e12)
        mixing = [tp.make("one_peer_exponential", N)] if N > 1 else []
        ways = [
            Traffic(no_communication(), forward=Boundary(0.25)),
            Traffic(all_reduce(N), backward=low_rank),
            Traffic(all_reduce(N, overlap=True)),
            Traffic(all_reduce(N), fused_embedding=True),
            Traffic(all_reduce(N, ratio=0.2, every=2), compressed_stages=1, fused_embedding=True),
            *(Traffic(gossip(graph), backward=low_rank) for graph in mixing),
            *(Traffic(gossip(graph, order="atc", ratio=0.25, every=3)) for graph in mixing),
        ]
        yield from (predict_layout(cluster, load, layout, way) for way in ways)
        yield choose_compressed_stages(cluster, load, layout, Traffic(all_reduce(N, ratio=0.2)))[1]


def numbers(prediction):
    """Return all numbers of a prediction, in order."""
    return [float(x) for value in prediction for x in (value.values() if isinstance(value, dict) else [value])]


@pytest.mark.parametrize("predicted", [single_stage, pipelines])
def test_predictions_equal_the_recorded_ones(predicted):
    recorded = json.loads(RECORDED.read_text())[predicted.__name__]
    found = [numbers(prediction) for prediction in predicted()]
    assert len(found) == len(recorded)
    for case, (now, then) in enumerate(zip(found, recorded)):
        np.testing.assert_allclose(now, then, rtol=1e-9, atol=1e-12, err_msg=str(case))
