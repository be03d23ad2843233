"""The cost model in three dimensions: against closed forms, a naive event simulation, worked examples, and plain data parallelism."""

import dataclasses
import heapq
import itertools
import math

import numpy as np
import pytest

from decjax import schedules
from decjax import topology as tp
from decjax.contrib.layouts import iteration
from decjax.contrib.layouts import layout as lay
from decjax.contrib.layouts.iteration import Hop, predict_layout
from decjax.contrib.layouts.layout import Boundary, DeviceLayout, Traffic, Work
from decjax.contrib.layouts.transformer import Transformer, low_rank_ratio
from decjax.costmodel import Cluster, Link, Workload, all_reduce, gossip, no_communication, predict

FREE = Link(0, 1e18)
SILENT = Hop(0.0, 0.0, 0.0, 0.0)


def line(n, per_node=1, inter=FREE, intra=FREE, **options):
    return Cluster("line", n // per_node, per_node, intra, inter, **options)


def even(layout, forward_s=1.0, backward_s=2.0, boundary_bytes=0.0, tensor_bytes=0.0, gradient_bytes=0.0, **others):
    """Work of equal virtual stages, with two all-reduces per pass each."""
    U = layout.num_virtual
    return Work(
        (forward_s,) * U,
        (backward_s,) * U,
        boundary_bytes,
        tensor_bytes,
        (2,) * U,
        (2,) * U,
        (gradient_bytes,) * layout.stages,
        **others,
    )


def ends(schedule, forward_s, backward_s, hop=lambda send: SILENT, **options):
    return iteration.run_pipeline(schedule, np.array([forward_s]), np.array([backward_s]), hop, np.ones(1), **options)[0]


# -- The recursion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, S, M", [(n, S, M) for n in ("gpipe", "1f1b") for S in (1, 2, 4, 8) for M in (1, 3, 8, 16)])
@pytest.mark.parametrize("blocking", [False, True])
def test_uniform_stages_take_the_closed_form(name, S, M, blocking):
    f, b = 1.0, 1.7
    run = ends(schedules.make(name, S, M), [f] * S, [b] * S, blocking=blocking)
    assert run[0] == pytest.approx((M + S - 1) * (f + b))
    assert np.diff(run) == pytest.approx(-b * np.ones(S - 1))  # A stage finishes one backward pass after the next stage.


@pytest.mark.parametrize("S, M, V", [(2, 2, 2), (2, 8, 4), (4, 8, 2), (4, 16, 3), (8, 8, 2)])
def test_chunks_divide_the_bubble(S, M, V):
    f, b = 1.0, 2.0
    run = ends(schedules.make("interleaved", S, M, V), [f / V] * S * V, [b / V] * S * V)
    assert run.max() == pytest.approx((M + (S - 1) / V) * (f + b))


def naive_simulation(schedule, forward_s, backward_s, hop):
    """Simulate stages and their outgoing links as events taken from a queue."""
    S = schedule.num_stages
    upcoming, busy, here = [list(order) for order in schedule.orders], [False] * S, [{} for _ in range(S)]
    waiting, sending, end = [[] for _ in range(S)], [False] * S, [0.0] * S
    sends = {(m.kind, m.microbatch, m.source, m.source_chunk): m for sent in schedule.sends for m in sent}
    events, count = [], itertools.count()

    def at(time, what, *args):
        heapq.heappush(events, (time, next(count), what, args))

    def try_start(time, s):
        if busy[s] or not upcoming[s]:
            return
        op = upcoming[s][0]
        v = schedule.virtual(s, op.chunk)
        needs = v > 0 if op.kind == "F" else v < schedule.num_virtual - 1
        if needs and (op.kind, op.microbatch, op.chunk) not in here[s]:
            return
        upcoming[s].pop(0)
        busy[s] = True
        takes = (forward_s if op.kind == "F" else backward_s)[v] + here[s].get((op.kind, op.microbatch, op.chunk), 0.0)
        message = sends.get((op.kind, op.microbatch, s, op.chunk))
        at(time + takes + (hop(message).encode_s if message else 0.0), computed, s, message)

    def computed(time, s, message):
        busy[s], end[s] = False, time
        if message:
            waiting[s].append(message)
            try_send(time, s)
        try_start(time, s)

    def try_send(time, s):
        if not sending[s] and waiting[s]:
            sending[s] = True
            at(time + hop(waiting[s][0]).out_s, sent, s, waiting[s].pop(0))

    def sent(time, s, message):
        sending[s] = False
        at(time + hop(message).late_s, arrived, message)
        try_send(time, s)

    def arrived(time, message):
        here[message.target][message.kind, message.microbatch, message.target_chunk] = hop(message).decode_s
        try_start(time, message.target)

    for s in range(S):
        try_start(0.0, s)
    while events:
        time, _, what, args = heapq.heappop(events)
        what(time, *args)
    assert not any(upcoming)
    return end


@pytest.mark.parametrize("seed", range(12))
def test_recursion_is_what_events_make_of_it(seed):
    rng = np.random.default_rng(seed)
    S, V = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    name = "interleaved" if V > 1 else ("gpipe", "1f1b")[seed % 2]
    schedule = schedules.make(name, S, S * int(rng.integers(1, 4)), V)
    forward_s, backward_s = rng.exponential(1, S * V), rng.exponential(2, S * V)
    costs = {}

    def hop(send):
        return costs.setdefault(send, Hop(*rng.exponential([1.0, 0.3, 0.2, 0.1])))

    run = ends(schedule, forward_s, backward_s, hop)
    assert run == pytest.approx(naive_simulation(schedule, forward_s, backward_s, hop), rel=1e-12)
    assert (run > ends(schedule, forward_s, backward_s)).all()
    # Messages that nothing waits for between passes are never later than those that a stage waits for.
    assert (ends(schedule, forward_s, backward_s, hop, blocking=True) >= run - 1e-9).all()


def test_two_stages_by_hand():
    """F 1 s, B 2 s; a message occupies the link for 0.5 s and arrives 0.25 s later; two microbatches in 1F1B."""
    schedule = schedules.make("1f1b", 2, 2)
    run = ends(schedule, [1, 1], [2, 2], lambda send: Hop(0.5, 0.25, 0.0, 0.0))
    # Stage 1: F0 at 1.75, B0 until 4.75, F1 (arrived at 2.75) until 5.75, B1 until 7.75.
    # Stage 0: B0 arrives at 5.5, until 7.5; B1 arrives at 8.5, until 10.5.
    assert run == pytest.approx([10.5, 7.75])
    # With a codec of 0.1 s on each side of gradients: B0 until 4.85, F1 until 5.85, B1 until 7.95;
    # stage 0: B0 arrives at 5.6, until 7.7; B1 arrives at 8.7, until 10.8.
    coded = ends(schedule, [1, 1], [2, 2], lambda send: Hop(0.5, 0.25, *((0.1, 0.1) if send.kind == "B" else (0, 0))))
    assert coded == pytest.approx([10.8, 7.95])


def test_messages_between_passes_by_hand():
    """As above with four microbatches: messages delay both stages, and message forms travel one after the other."""
    schedule = schedules.make("1f1b", 2, 4)
    # Stage 0: F0 until 1, sent at 1.5, F1 until 2.5, sent at 3, receives B0's gradient at 6, B0 8, F2 9. Stage 1: F0 1.75 … 2.75,
    # receives F1's input at 3.25, B0 5.25, sent at 5.75, F1 6.75, B1 8.75. Then F2's output and B1's gradient travel at the same
    # time: stage 1 receives at 9.75, stage 0 at 9.5. And so on.
    alike = ends(schedule, [1] * 2, [2] * 2, lambda send: Hop(0.5, 0.25, 0, 0), blocking=True)
    assert alike == pytest.approx([19, 16.75])
    # In its own form, the gradient leaves when stage 1 has F2's input, at 9.75, and arrives at 10.5; B2's at 15, B3's at 18.5.
    unlike = ends(schedule, [1] * 2, [2] * 2, lambda send: Hop(0.5, 0.25, 0, 0, send.kind), blocking=True)
    assert unlike == pytest.approx([20.5, 18.25])


# -- Layouts ----------------------------------------------------------------------------------------------------------


def test_one_stage_is_plain_data_parallelism():
    cluster = line(8, 4, Link(1e-4, 1e9), Link(1e-5, 2e9), all_reduce_efficiency=0.8, codec_Bps=1e9)
    layout = DeviceLayout(workers=8)
    load = Work((0.01,), (0.02,), 0, 0, (0,), (0,), (24e6,), optimizer_s=0.003, combine_s=0.002, beside_s=0.005)
    plain = Workload(0.01, (0.02,), (24e6,), optimizer_s=0.003, combine_s=0.002, beside_s=0.005)
    methods = [no_communication(), all_reduce(8), all_reduce(8, overlap=True), all_reduce(8, every=3), all_reduce(8, ratio=0.1)]
    methods += [all_reduce(8, ratio=0.1, coding_s=0.02, latencies=2.0), all_reduce(8, overlap=True, ratio=0.5, coding_s=0.02)]
    methods += [
        gossip(tp.make(name, 8, **options), order=order, ratio=ratio, **costs)
        for name, options in (
            ("ring", {}),
            ("one_peer_exponential", dict(pairwise=True)),
            ("alternating_exponential_ring", dict(local_size=4)),
        )
        for order in ("awc", "atc")
        for ratio in (1.0, 0.25)
        for costs in ({}, dict(coding_s=0.02, latencies=3.0, every=2))
    ]
    for method in methods:
        assert predict_layout(cluster, load, layout, Traffic(method)).time_s == pytest.approx(
            predict(cluster, plain, method).mean_s, rel=1e-9
        ), method.name


def test_every_cost_counts_in_a_pipeline():
    layout = DeviceLayout(2, 4, 1, microbatches=8, inner="worker")
    load = even(layout, 0.01, 0.02, gradient_bytes=1e8)

    def time_s(method, load=load):
        return predict_layout(line(8, inter=Link(0.01, 1e8)), load, layout, Traffic(method)).time_s

    for order in ("awc", "atc"):
        mixing = gossip(tp.make("ring", 2), order=order, ratio=0.5)
        coded = dataclasses.replace(mixing, coding_s=0.4)
        assert time_s(coded) == pytest.approx(time_s(mixing) + 0.1)  # each of four stages encodes a quarter
        assert time_s(dataclasses.replace(mixing, latencies=3.0)) == pytest.approx(time_s(mixing) + 0.02)
        slowed = dataclasses.replace(load, beside_s=0.05)
        assert time_s(mixing, slowed) == pytest.approx(time_s(mixing) + (0.05 if order == "awc" else 0.0))


def test_parts_of_the_time_sum_up():
    cluster = line(16, 8, Link(1e-5, 1e9), Link(1e-6, 1e10), codec_Bps=1e10)
    layout = DeviceLayout(2, 4, 2, microbatches=8, inner="worker")
    load = even(layout, 0.01, 0.02, 1e7, 1e7, 1e8, embedding_bytes=4e7, optimizer_s=0.001)
    prediction = predict_layout(cluster, load, layout, Traffic(all_reduce(2), backward=Boundary(0.1, when="epilogue")))
    parts_s = prediction[1:7]
    assert sum(parts_s) == pytest.approx(prediction.time_s) and min(parts_s) > 0
    assert prediction.compute_s == pytest.approx(8 * 0.03 + 0.001) and prediction.bubble_s == pytest.approx(3 * 0.03)


def hop_of(cluster, layout, load, send, **traffic):
    return iteration.PipelineCosts(cluster, load, layout, Traffic(all_reduce(layout.workers), **traffic)).hop(send)


def test_placement_decides_which_link_a_message_takes():
    """Two nodes of four devices, 2 × 2 × 2: a node holds either the stages of a worker, or the workers of a stage."""
    cluster = Cluster("two", 2, 4, Link(1e-6, 1e10), Link(1e-4, 1e9))
    send = schedules.Send("B", 0, 1, 0, 0, 0, True)
    for inner, message_s, latency_s in (("stage", 5e5 / 1e10, 1e-6), ("worker", 4 * 5e5 / 1e9, 1e-4)):
        layout = DeviceLayout(2, 2, 2, microbatches=4, inner=inner)
        load = even(layout, boundary_bytes=1e6, gradient_bytes=1e6)
        hop = hop_of(cluster, layout, load, send)
        gather_s = 1e-6 + 1e6 / 2 / 1e10  # half of the 1e6 bytes from the other device
        assert (hop.out_s, hop.late_s) == pytest.approx((message_s, latency_s + gather_s))
        # Messages of 1e6 bytes from two devices through one NIC, or over each device's own link.
        mean_s = predict_layout(cluster, load, layout, Traffic(all_reduce(2))).workers_s
        own_s = 2e-4 + 2 * 1e6 / 1e9 if inner == "stage" else 2e-6 + 1e6 / 1e10
        # The two stages share the NIC, but stage 1 is ready a backward pass, two seconds, earlier.
        assert mean_s == pytest.approx(own_s)
    whole = hop_of(cluster, dataclasses.replace(layout, split_boundary=False), load, send)
    assert (whole.out_s, whole.late_s) == pytest.approx((4 * 1e6 / 1e9, 1e-4))  # all of it from each device, no gather


def test_tensor_reductions_are_paid_in_every_pass():
    cluster = Cluster("node", 1, 4, Link(1e-3, 1e9), FREE)
    layout = DeviceLayout(tensor=4, microbatches=3)
    load = even(layout, tensor_bytes=1e8)
    reduction_s = 6 * 1e-3 + 2 * 3 / 4 * 1e8 / 1e9
    assert predict_layout(cluster, load, layout, Traffic(no_communication())).tensor_s == pytest.approx(3 * 4 * reduction_s)


def test_exchanges_on_one_nic_take_turns():
    exchanges = [iteration.StageExchange(time_s, nodes) for time_s, nodes in ((1.0, (0, 1)), (5.0, (0,)), (1.0, (2,)), (9.0, ()))]
    done = iteration.take_turns([3.0, 1.0, 2.0, 0.0], exchanges)
    assert done == [7.0, 6.0, 3.0, 9.0]


def test_later_stages_hide_their_exchange():
    """Stage s finishes s backward passes before stage 0; with c dense and c/4 compressed, stages s ≥ (3/4) c/b need not compress."""
    layout = DeviceLayout(2, 4, 1, microbatches=8)
    cluster = line(8, inter=Link(0, 1e9))
    for dense_s, k in ((0.1, 1), (1.2, 1), (2.9, 3), (4.1, 4)):
        load = even(layout, 0.5, 1.0, gradient_bytes=dense_s * 1e9)  # 2(N − 1)/N = 1
        traffic = Traffic(all_reduce(2, ratio=0.25))
        chosen, times_s = iteration.choose_compressed_stages(cluster, load, layout, traffic)
        assert chosen == k == math.ceil(0.75 * dense_s)
        pipeline_s = 11 * 1.5
        for compressed, time_s in enumerate(times_s):
            expected_s = max(pipeline_s - s + dense_s * (0.25 if s < compressed else 1) for s in range(4))
            assert time_s == pytest.approx(expected_s)
            assert predict_layout(
                cluster, load, layout, dataclasses.replace(traffic, compressed_stages=compressed)
            ).time_s == pytest.approx(time_s)


def test_compressing_gains_nothing_where_messages_are_free():
    layout = DeviceLayout(2, 4, 1, microbatches=8)
    load = even(layout, gradient_bytes=1e9)
    assert iteration.choose_compressed_stages(line(8), load, layout, Traffic(all_reduce(2, ratio=0.25)))[0] == 0
    slow_codec = line(8, inter=Link(0, 1e9), codec_Bps=1e7)
    assert iteration.choose_compressed_stages(slow_codec, load, layout, Traffic(all_reduce(2, ratio=0.25)))[0] == 0


@pytest.mark.parametrize("N", [2, 4, 8])
def test_fused_embedding(N):
    """On a ring of equal links time is proportional to bytes: V(3N − 2)/N separate, V(2N − 1)/N fused. Stage 0 is ready last and
    delays both.
    """
    layout = DeviceLayout(N, 2, 1, microbatches=4)
    load = even(layout, embedding_bytes=1e9)
    cluster = line(2 * N, inter=Link(0, 1e9))
    apart, fused = (predict_layout(cluster, load, layout, Traffic(all_reduce(N), fused_embedding=fuse)) for fuse in (False, True))
    for prediction, num_bytes in ((apart, 1e9 * (3 * N - 2) / N), (fused, 1e9 * (2 * N - 1) / N)):
        assert (prediction.embedding_s, prediction.embedding_bytes) == pytest.approx((num_bytes / 1e9, num_bytes))
    assert apart.embedding_s / fused.embedding_s == pytest.approx((3 * N - 2) / (2 * N - 1))


def test_pipelines_that_gossip_still_share_their_embedding():
    layout = DeviceLayout(4, 2, 1, microbatches=4)
    load = even(layout, embedding_bytes=1e9, gradient_bytes=1e6)
    cluster = line(8, inter=Link(0, 1e9))
    exchange = gossip(tp.make("one_peer_exponential", 4))
    prediction = predict_layout(cluster, load, layout, Traffic(exchange))
    assert prediction.embedding_s == pytest.approx(1.0) and prediction.workers_s == pytest.approx(0)  # hidden: 1 s of 15
    after = predict_layout(cluster, load, layout, Traffic(dataclasses.replace(exchange, overlap=False)))
    assert after.embedding_s == pytest.approx(2.0) and after.workers_s == pytest.approx(1e-3)


@pytest.mark.parametrize("S, M", [(2, 8), (4, 16), (8, 16)])
def test_compressed_backpropagation_sends_what_it_should(S, M):
    # Between passes, a gradient in its own form leaves after the activations, which may cost more time than it saves.
    layout = DeviceLayout(stages=S, microbatches=M, blocking=False)
    load = even(layout, boundary_bytes=1e6)
    cluster = line(S, inter=Link(1e-3, 1e7))

    def sent(**traffic):
        return predict_layout(cluster, load, layout, Traffic(all_reduce(1), **traffic))

    dense, critical, always = sent(), sent(backward=Boundary(0.1, when="epilogue")), sent(backward=Boundary(0.1))
    both = sent(backward=Boundary(0.1), forward=Boundary(0.1))
    inner = 2 if S > 2 else 1  # a middle stage sends in both directions
    assert (dense.boundary_bytes, always.boundary_bytes, both.boundary_bytes) == pytest.approx(
        (inner * M * 1e6, 1.1 * M * 1e6 if S > 2 else M * 1e6, inner * 0.1 * M * 1e6)
    )
    labels = [send for sends in layout.passes.sends for send in sends if send.in_epilogue]
    assert len(labels) == S * (S - 1) // 2
    assert dense.time_s > critical.time_s > always.time_s > both.time_s
    # The critical path has S − 1 gradients at its end; each saves 0.9 of its 0.1 s.
    assert dense.time_s - critical.time_s >= (S - 1) * 0.9 * 0.1 * (1 - 1e-9)


def test_better_links_are_never_slower():
    layout = DeviceLayout(2, 4, 2, microbatches=8)
    load = even(layout, 1e-2, 2e-2, 1e7, 1e7, 1e8, embedding_bytes=1e7)

    def time_s(inter=1.0, intra=1.0, latency=1.0, codec=1.0, **options):
        cluster = Cluster("c", 4, 4, Link(latency * 1e-5, intra * 1e10), Link(latency * 1e-4, inter * 1e9), codec_Bps=codec * 1e9)
        traffic = Traffic(all_reduce(2, ratio=0.2), backward=Boundary(0.1), fused_embedding=True)
        return predict_layout(cluster, load, dataclasses.replace(layout, **options), traffic).time_s

    for options in ({}, dict(inner="worker"), dict(schedule="gpipe"), dict(blocking=False)):
        better = [time_s(**{what: 4.0}, **options) for what in ("inter", "intra", "codec")] + [time_s(latency=0, **options)]
        assert all(better_s <= time_s(**options) for better_s in better) and min(better) < time_s(**options)
    assert time_s() > time_s(blocking=False)


@pytest.mark.parametrize(
    "make, problem",
    [
        (lambda: DeviceLayout(stages=0), "stages=0"),
        (lambda: DeviceLayout(stages=4, microbatches=6, schedule="interleaved", chunks=2), "multiple of stages=4"),
        (lambda: DeviceLayout(inner="tensor"), "use one of stage, worker"),
        (lambda: DeviceLayout(remat="all"), "use one of none, products, layers, stages"),
        (lambda: DeviceLayout(stages=2, layers=(3,)), "a positive number for each"),
        (lambda: DeviceLayout(stages=2, layers=(3, 4)).check(GPT), "are 7, the model has 8"),
        (lambda: DeviceLayout(stages=3).check(GPT), "depth=8 does not divide into stages=3 × chunks=1"),
        (lambda: DeviceLayout(tensor=3).check(GPT), "heads=4 does not divide into tensor=3"),
        (lambda: DeviceLayout(workers=3, microbatches=2).check(GPT), "use a multiple of 6"),
        (lambda: Boundary(0), "ratio=0"),
        (lambda: Boundary(0.1, when="never"), "when='never'"),
        (lambda: Traffic(all_reduce(2), forward=Boundary(0.1, when="epilogue")), "use 'always'"),
        (lambda: Traffic(gossip(tp.make("ring", 4)), fused_embedding=True), "use all-reduce"),
        (lambda: Transformer(8, 30, 4, 256, 128, 16), "width=30"),
        (lambda: lay.work(GPT, DeviceLayout(), 0), "flops=0"),
        (lambda: predict_layout(line(4), even(DeviceLayout(2)), DeviceLayout(2), Traffic(all_reduce(2))), "use cluster.resize(2)"),
        (
            lambda: predict_layout(line(2), even(DeviceLayout(2)), DeviceLayout(2), Traffic(all_reduce(4))),
            "4 workers in 'all-reduce' must be 2 for layout 2×1×1",
        ),
        (
            lambda: predict_layout(line(2), even(DeviceLayout(2)), DeviceLayout(2), Traffic(all_reduce(2), compressed_stages=2)),
            "use at most 1",
        ),
        (
            lambda: predict_layout(line(2), even(DeviceLayout(2)), DeviceLayout(1, 2), Traffic(all_reduce(1))),
            "work(model, layout, flops)",
        ),
    ],
)
def test_mistakes_are_one_line(make, problem):
    with pytest.raises(ValueError) as error:
        make()
    assert problem in str(error.value) and "\n" not in str(error.value)


# -- The model as numbers ---------------------------------------------------------------------------------------------

GPT = Transformer(8, 32, 4, 256, 128, 16)
PAPER = {
    "2.5b": Transformer(52, 1920, 24, 51200, 1024, 512, tied=True),
    "8.3b": Transformer(72, 3072, 24, 51200, 1024, 512, tied=True),
}


def test_formulas_of_the_paper():
    assert low_rank_ratio(1024, 1920, 16) == pytest.approx(41.7, abs=0.05)  # 1024·1920 / (16·2944)
    assert low_rank_ratio(1024, 3072, 16) == pytest.approx(48)  # 1024·3072 / (16·4096)
    assert low_rank_ratio(8192, 1920, 16) == pytest.approx(97, abs=0.3)
    # Σ IJ ÷ Σ 128(I + J) over the four matrices of a layer on one of eight devices.
    assert PAPER["2.5b"].low_rank_ratio(128, 8) == pytest.approx(4.1, abs=0.05)
    assert PAPER["8.3b"].low_rank_ratio(128, 8) == pytest.approx(6.6, abs=0.1)
    assert [m.parameters / 1e9 for m in PAPER.values()] == pytest.approx([2.4, 8.3], abs=0.1)


def test_a_matrix_that_gains_nothing_travels_as_it_is():
    narrow = Transformer(1, 8, 2, 16, 4, 4, hidden=64)
    dense, low = sum(i * j for i, j in narrow.matrices()), 4 * (32 + 72 + 72) + 64  # 8×8 at rank 4 is no smaller
    assert narrow.low_rank_ratio(4) == pytest.approx(dense / low)


def test_work_adds_up_over_layouts():
    whole = lay.work(GPT, DeviceLayout(microbatches=4), 1e9)
    tokens = 4 * 128
    assert whole.forward_s[0] == pytest.approx((2 * tokens * 8 * 12 * 32**2 + 8 * 4 * tokens * 128 * 32) / 1e9)
    head_s = 2 * tokens * 256 * 32 / 1e9
    assert whole.backward_s[0] == pytest.approx(2 * whole.forward_s[0] + 3 * head_s) and whole.embedding_bytes == 0
    assert whole.gradient_bytes[0] == pytest.approx(4 * GPT.parameters)
    for stages, tensor, chunks in ((4, 1, 1), (2, 4, 1), (2, 2, 2)):
        part = lay.work(GPT, DeviceLayout(1, stages, tensor, 4, "interleaved" if chunks > 1 else "1f1b", chunks), 1e9)
        assert sum(part.forward_s) == pytest.approx(whole.forward_s[0] / tensor)
        assert sum(part.forward_reductions) == sum(part.backward_reductions) == 2 * 8 + 1
        norms = 4 * (8 * 2 + 1) * 32 * (tensor - 1) / tensor  # every device holds them
        assert sum(part.gradient_bytes) == pytest.approx(whole.gradient_bytes[0] / tensor + norms)
    anew = lay.work(GPT, DeviceLayout(microbatches=4, remat="layers"), 1e9)
    assert anew.backward_s[0] - 3 * head_s == pytest.approx(3 * whole.forward_s[0])
    skipping = lay.work(GPT, DeviceLayout(stages=2, microbatches=4, remat="stages"), 1e9)
    assert skipping.forward_s[1] == 0 and skipping.forward_reductions == (9, 0)
    assert skipping.backward_s[1] - 3 * head_s == pytest.approx(skipping.backward_s[0]) == pytest.approx(3 * skipping.forward_s[0])
    uneven = lay.work(GPT, DeviceLayout(stages=2, layers=(5, 3), microbatches=4), 1e9)
    assert uneven.forward_s[0] / 5 == pytest.approx(uneven.forward_s[1] / 3)


def test_a_tied_embedding_is_on_both_ends():
    tied = dataclasses.replace(GPT, tied=True)
    load = lay.work(tied, DeviceLayout(stages=2, microbatches=4), 1e9)
    assert load.embedding_bytes == 4 * 256 * 32 and sum(load.gradient_bytes) + load.embedding_bytes == 4 * tied.parameters
    assert lay.work(tied, DeviceLayout(microbatches=4), 1e9).embedding_bytes == 0
    held = [
        lay._stage_memory(tied, DeviceLayout(stages=4, microbatches=4), Traffic(no_communication()), s).parameters for s in range(4)
    ]
    assert held[0] - held[1] == 4 * 256 * 32 and sum(held) == 4 * (tied.parameters + 256 * 32)


# -- Memory -----------------------------------------------------------------------------------------------------------


def test_memory_follows_the_schedule():
    def activations(schedule, M, remat="none"):
        model = dataclasses.replace(GPT, batch_size=4 * M, vocabulary=4)
        return lay.memory(model, DeviceLayout(1, 4, 1, M, schedule, remat=remat), Traffic(no_communication())).activations

    assert activations("1f1b", 8) == activations("1f1b", 64)
    assert activations("gpipe", 64) == pytest.approx(8 * activations("gpipe", 8), rel=0.01)
    assert activations("gpipe", 64) > 15 * activations("1f1b", 64)
    assert activations("1f1b", 8) > activations("1f1b", 8, "products") > activations("1f1b", 8, "layers")
    # 64 inputs of a stage instead of 64 × 2 layers' products; the working set of one backward pass is added.
    assert activations("gpipe", 64, "stages") - activations("gpipe", 8, "stages") == 56 * (4 * 128 * 32 * 4)


def test_a_layer_keeps_what_differentiation_keeps():
    import jax

    from decjax import models

    def kept_values(depth):
        model = models.decoder_lm(vocabulary=16, context=64, width=32, hidden=128, heads=2, depth=depth)
        params = jax.eval_shape(lambda: model.init(jax.random.key(0)))

        def backward(params, tokens_BxT1):
            return jax.vjp(lambda params: model.nll(params, tokens_BxT1, jax.random.key(0)).mean(), params)[1]

        kept = jax.eval_shape(backward, params, jax.ShapeDtypeStruct((4, 65), "int32"))  # weights included
        return sum(leaf.size for leaf in jax.tree.leaves(kept)) - sum(leaf.size for leaf in jax.tree.leaves(params))

    model = Transformer(1, 32, 2, 16, 64, 4, hidden=128)
    assert 4 * (kept_values(12) - kept_values(4)) == 8 * model.activation_bytes(4, 1, "products")


def test_memory_by_hand():
    model = Transformer(2, 8, 2, 16, 4, batch_size=4, hidden=32)
    layout = DeviceLayout(2, 1, 1, microbatches=2)
    held = lay.memory(model, layout, Traffic(all_reduce(2)))
    parameters = 2 * (4 * 64 + 2 * 8 * 32 + 16) + 8 + 2 * 16 * 8
    assert held[:4] == (0, 4 * parameters, 4 * parameters, 8 * parameters) and model.parameters == parameters
    values = 2 * 4 * (18 * 8 + 6 * 32 + 2 * 2 * 4)  # 4 tokens and 2 layers each
    assert held.activations == 4 * (values + 4 * 16) and held.errors == 0
    coded = lay.memory(model, layout, Traffic(all_reduce(2, ratio=0.25)))
    of_layers = parameters - 2 * 16 * 8
    assert coded.errors == of_layers * (4 + 1)
    assert lay.memory(model, layout, Traffic(gossip(tp.make("ring", 2)))).errors == 4 * parameters  # received values
