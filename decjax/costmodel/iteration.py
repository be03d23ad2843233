"""Time per iteration of a layout of workers × stages × tensor, under a pipeline schedule.

A worker is a pipeline of S stages, a stage K devices of the tensor axis. Every stage runs its passes in the schedule's order. With F
and B the times of a forward and a backward pass, and `end*` the end of the stage's pass before,

    start   = max(end*, arrival of what it needs) + decode
    end     = start + F or B + encode
    arrival = max(end, arrival of what this stage sent before) + b·β⁻¹, and α + gather later

so bubbles come out as waiting time. If messages are sent between passes ("blocking"), those of a tick occupy both stages until they
have been sent and received, one after the other on each stage's link in either direction. Messages of one form (codec and ratio)
travel at once, activations before gradients; those of the next form follow when a stage is done with these.

F and B include their all-reduces over the tensor axis. When a stage's last backward pass is done, its gradients are exchanged with
those of other workers, while earlier stages still compute; stages that send through the same NIC take turns. The optimizer waits
for all stages, since a gradient is clipped by its norm over all of them. Gossip exchanges parameters, during an iteration ("awc") or
after it ("atc").

So a pipeline computes for some seconds and exchanges for some seconds, as one device does; `costmodel.simulator` makes iterations of
these. A single stage with one microbatch is predicted as by `costmodel.model`. All workers are equally fast here. Messages between
stages are assumed not to slow down messages between workers through the same NIC.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from decjax.costmodel.exchange import Exchange, exchange_cost, mean_cost, messages_cost
from decjax.costmodel.layout import DeviceLayout, Traffic, Work, by_stage
from decjax.costmodel.methods import GRADIENTS, PARAMETERS
from decjax.costmodel.profile import Cluster
from decjax.costmodel.simulator import StepCosts, horizon, simulate
from decjax.schedules import BACKWARD, FORWARD, Schedule, Send
from decjax.topology import Round

GAIN = 1e-3  # fraction of an iteration that compressing one more stage has to save

# -- The pipeline -----------------------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """What a message between stages costs."""

    out_s: float  # seconds that it occupies the sender's link
    late_s: float  # seconds from then until the receiver has it
    encode_s: float
    decode_s: float
    form: str = ""  # codec and ratio; empty: not compressed


def run_pipeline(schedule: Schedule, forward_ZxU, backward_ZxU, hop, pays_Z, *, blocking: bool = False) -> np.ndarray:
    """When each stage ends its last pass, [Z, S] seconds, by the recursion of the module's docstring, for Z variants at once.

    Args:
        schedule: what each stage does, in which order.
        forward_ZxU: seconds of a forward pass of each virtual stage.
        backward_ZxU: seconds of a backward pass of each virtual stage.
        hop: `hop(send) -> Hop`, what a message costs.
        pays_Z: 1 where messages take that time, 0 where they take none.
        blocking: see `DeviceLayout`.
    """
    seconds = {FORWARD: np.asarray(forward_ZxU, float), BACKWARD: np.asarray(backward_ZxU, float)}
    end_SxZ = np.zeros((schedule.num_stages, len(pays_Z)))
    out_SxZ, in_SxZ = np.zeros_like(end_SxZ), np.zeros_like(end_SxZ)
    arrived = {}  # (kind, microbatch, stage, chunk) -> (seconds [Z], decode [Z])
    for row, sends in zip(schedule.ticks, schedule.sends, strict=True):
        for stage, op in enumerate(row):
            if op is not None:
                at_Z, decode_Z = arrived.pop((op.kind, op.microbatch, stage, op.chunk), (0.0, 0.0))
                seconds_Z = seconds[op.kind][:, schedule.virtual(stage, op.chunk)]
                end_SxZ[stage] = np.maximum(end_SxZ[stage], at_Z) + decode_Z + seconds_Z
        hops = [(send, hop(send)) for send in sends]
        for send, cost in hops:
            end_SxZ[send.source] += cost.encode_s * pays_Z
        if blocking:
            _talk(hops, end_SxZ, in_SxZ, pays_Z)
            continue
        for send, cost in hops:
            out_SxZ[send.source] = np.maximum(out_SxZ[send.source], end_SxZ[send.source]) + cost.out_s * pays_Z
            there_Z = out_SxZ[send.source] + cost.late_s * pays_Z
            arrived[send.kind, send.microbatch, send.target, send.target_chunk] = there_Z, cost.decode_s * pays_Z
    return end_SxZ.T


def _talk(hops: Sequence[tuple[Send, Hop]], end_SxZ, in_SxZ, pays_Z) -> None:
    """Adds a tick's blocking messages to the times at which stages (`end_SxZ`) and their incoming links (`in_SxZ`) are free again."""
    by_form: dict[str, list[tuple[Send, Hop]]] = {}
    for send, cost in sorted(hops, key=lambda each: each[0].kind, reverse=True):  # Activations first.
        by_form.setdefault(cost.form, []).append((send, cost))
    for group in by_form.values():
        done = []
        for send, cost in group:
            in_SxZ[send.target] = np.maximum(in_SxZ[send.target], end_SxZ[send.source]) + cost.out_s * pays_Z
            done += [(send.source, in_SxZ[send.target]), (send.target, in_SxZ[send.target] + cost.late_s * pays_Z)]
        for stage, done_Z in done:
            end_SxZ[stage] = np.maximum(end_SxZ[stage], done_Z)
    for send, cost in hops:
        end_SxZ[send.target] += cost.decode_s * pays_Z


def _hops(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic):
    """The function `hop(send) -> Hop`: what a message between stages costs on the slowest of all workers and devices."""
    devices_NxSxK = layout.devices_NxSxK()
    parts = layout.tensor if layout.split_boundary else 1
    dense_bytes = load.boundary_bytes / parts

    @functools.cache
    def cost(source, target, boundary, coded):
        if source == target:
            return Hop(0.0, 0.0, 0.0, 0.0)
        pairs = np.stack([devices_NxSxK[:, stage].ravel() for stage in (source, target)])
        latency_N, per_byte_N, _ = messages_cost(cluster, [pairs])
        gather_s = 0.0
        if parts > 1:  # An all-gather is the second half of an all-reduce.
            latency_G, per_byte_G, *_ = mean_cost(cluster, devices_NxSxK[:, target])
            gather_s = (latency_G.max() + load.boundary_bytes * per_byte_G.max()) / 2
        codec_s = cluster.coding_s(dense_bytes, boundary.codec) if coded else 0.0
        num_bytes = dense_bytes * (boundary.ratio if coded else 1)
        form = f"{boundary.codec}, {boundary.ratio}" if coded else ""
        return Hop(num_bytes * per_byte_N.max(), latency_N.max() + gather_s, codec_s / 2, codec_s / 2, form)

    def hop(send):
        boundary = traffic.boundary(send.kind)
        return cost(send.source, send.target, boundary, boundary.codes(send.in_epilogue))

    return hop


# -- Between workers --------------------------------------------------------------------------------------------------


class StageExchange(NamedTuple):
    """Messages that all devices of a stage exchange with those of other workers."""

    time_s: float
    nodes: tuple[int, ...]  # whose NICs they pass


SILENCE = StageExchange(0.0, ())
ALIKE = Exchange(1, (), *np.zeros((4, 1)))  # A worker that waits for others would wait for itself, since all are equally fast.


def take_turns(ready_s: Sequence[float], exchanges: Sequence[StageExchange]) -> list[float]:
    """Return when each exchange is done, seconds; those through the same NIC take turns in the order in which they are ready."""
    free_s: dict[int, float] = {}
    done_s = list(ready_s)
    for index in sorted(range(len(ready_s)), key=lambda i: ready_s[i]):
        exchange = exchanges[index]
        done_s[index] = max([ready_s[index], *(free_s.get(node, 0.0) for node in exchange.nodes)]) + exchange.time_s
        free_s |= dict.fromkeys(exchange.nodes, done_s[index])
    return done_s


def _codec_s(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic, stage: int) -> float:
    """Return the seconds that a device of a stage encodes and decodes; devices divide `Method.coding_s` by their bytes."""
    method, num_bytes = traffic.method, load.gradient_bytes[stage]
    if traffic.ratio(stage) == 1:
        return 0.0
    if method.coding_s is None:
        return cluster.coding_s(num_bytes, method.codec)
    total_bytes = layout.tensor * sum(load.gradient_bytes)
    return method.coding_s * num_bytes / total_bytes if total_bytes else 0.0


def _exchanges(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic, round_: Round) -> list[StageExchange]:
    """Return what each stage exchanges between workers in a round, with its part of a tied embedding, but without codec time."""
    devices_NxSxK, method = layout.devices_NxSxK(), traffic.method

    def exchange(stage: int, num_bytes: float) -> StageExchange:
        route = exchange_cost(cluster, round_, method.joint_ring, devices_NxSxK[:, stage])
        shared = load.embedding_bytes if not traffic.fused_embedding and stage in (0, layout.stages - 1) else 0.0
        latency_s = traffic.latencies(stage) * route.latency_N.max()
        time_s = latency_s + (traffic.ratio(stage) * num_bytes + shared) * route.per_byte_N.max()
        return StageExchange(float(time_s), tuple(np.flatnonzero(route.nic_M).tolist()))

    return [exchange(stage, num_bytes) for stage, num_bytes in enumerate(load.gradient_bytes)]


def _joint(cluster: Cluster, load: Work, layout: DeviceLayout, fused: bool) -> StageExchange:
    """Return the averaging of the embedding's gradient over the first and last stage of each worker, or of all workers."""
    if not load.embedding_bytes:
        return SILENCE
    holders_NxHxK = layout.devices_NxSxK()[:, [0, -1]]
    members_GxH = np.moveaxis(holders_NxHxK, 2, 0).reshape(-1, 2 * layout.workers if fused else 2)
    members_GxH = np.sort(members_GxH, axis=1)  # A ring visits the holders on a node one after the other.
    latency_G, per_byte_G, _, nic_M = mean_cost(cluster, members_GxH)
    return StageExchange(float(latency_G.max() + load.embedding_bytes * per_byte_G.max()), tuple(np.flatnonzero(nic_M).tolist()))


def _averaged_s(traffic: Traffic, ready_s: Sequence[float], exchanges: Sequence[StageExchange], joint: StageExchange) -> float:
    """Return when all gradients of a worker are exchanged, whose stages have computed at `ready_s`."""
    ends_s = max(ready_s[0], ready_s[-1])
    if traffic.fused_embedding:
        return max(take_turns([*ready_s, ends_s], [*exchanges, joint]))
    done_s = take_turns(ready_s, exchanges)
    return max(*done_s, max(done_s[0], done_s[-1]) + joint.time_s)


def _worker(
    cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic, ready_S: np.ndarray
) -> tuple[float, float, list[float]]:
    """Return the pipeline as one device: seconds of its computing, of a codec beside that, and of the exchange in each phase.

    A method that averages gradients before the update computes until the gradients are there without an exchange; the exchange takes
    the seconds from then on.
    """
    method, ready_s, alone = traffic.method, [*map(float, ready_S)], [SILENCE] * layout.stages
    joint = _joint(cluster, load, layout, traffic.fused_embedding)
    computed_s = _averaged_s(traffic, ready_s, alone, joint)
    codec_S = [_codec_s(cluster, load, layout, traffic, stage) for stage in range(layout.stages)]
    costs_s = []
    for round_ in method.topology.rounds if method.topology else ():
        exchanges = _exchanges(cluster, load, layout, traffic, round_)
        if method.overlap:
            costs_s.append(max(take_turns([0.0] * layout.stages, exchanges)) + load.beside_s)
            continue
        coded = [exchange._replace(time_s=exchange.time_s + codec_s) for exchange, codec_s in zip(exchanges, codec_S, strict=True)]
        if method.message == GRADIENTS:
            costs_s.append(_averaged_s(traffic, ready_s, coded, joint) - computed_s)
        else:
            costs_s.append(max(take_turns([0.0] * layout.stages, coded)))
    return computed_s, max(codec_S) if method.overlap else 0.0, costs_s


def _mean_s(cluster: Cluster, layout: DeviceLayout, ready_S: np.ndarray, variants: Sequence[tuple[Work, Traffic]]) -> list[float]:
    """Return the seconds of an iteration, mean over phases and local steps, for variants of what is sent by one method."""
    load, method = variants[0][0], variants[0][1].method
    computed_s, codec_s, costs_s = zip(*(_worker(cluster, load, layout, traffic, ready_S) for load, traffic in variants))
    combine_s, phases = load.combine_s if method.message == PARAMETERS else 0.0, len(costs_s[0])
    cost_s = [np.reshape(phase_K, (1, -1, 1)) for phase_K in zip(*costs_s)]
    step = StepCosts(0.0, (1.0,), (1.0,), load.optimizer_s, combine_s, np.reshape(codec_s, (-1, 1)), [ALIKE] * phases, cost_s)
    warm_up, T = horizon(method, method.period)
    run = simulate(method, step, np.broadcast_to(np.reshape(computed_s, (1, -1, 1)), (T, len(variants), 1)))
    return ((run.start_TxKxN[-1] - run.start_TxKxN[warm_up]) / (T - warm_up))[:, 0].tolist()


# -- Prediction -------------------------------------------------------------------------------------------------------


class LayoutPrediction(NamedTuple):
    """Time of an iteration and where it goes: each part is the time that it adds to the parts before it; they sum to `time_s`.

    Attributes:
        time_s: seconds of an iteration.
        compute_s: passes of the busiest stage, and the optimizer.
        bubble_s: stages waiting for each other, as if messages took no time.
        tensor_s: all-reduces over the tensor axis.
        boundary_s: messages between stages, and their codec.
        workers_s: messages between workers, and their codec.
        embedding_s: averaging a tied embedding over the stages that hold it.
        boundary_bytes: bytes that the busiest device sends to other stages in an iteration.
        workers_bytes: bytes that the busiest device sends to other workers, without a tied embedding of several stages.
        embedding_bytes: bytes that each holder of such an embedding sends for it. For V bytes and N workers, over rings:
            V(3N − 2)/N, which is 2V(N − 1)/N for the mean over workers and V for the sum of the two stages; if fused, V(2N − 1)/N,
            one mean over 2N holders.
    """

    time_s: float
    compute_s: float
    bubble_s: float
    tensor_s: float
    boundary_s: float
    workers_s: float
    embedding_s: float
    boundary_bytes: float
    workers_bytes: float
    embedding_bytes: float


def _check(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> None:
    """Raise a ValueError if the numbers of devices, workers or stages disagree."""
    topology, counts = traffic.method.topology, (len(load.forward_s), len(load.gradient_bytes))
    for theirs, own, of, fix in (
        (
            cluster.num_workers,
            layout.num_devices,
            f"devices in cluster {cluster.name!r}",
            f"use cluster.resize({layout.num_devices})",
        ),
        (topology and topology.num_workers, topology and layout.workers, f"workers in {traffic.method.name!r}", "make them equal"),
        (counts, (layout.num_virtual, layout.stages), "(virtual stages, stages) in the work", "use work(model, layout, flops)"),
        (max(traffic.compressed_stages or 0, layout.stages), layout.stages, "compressed_stages", f"use at most {layout.stages}"),
    ):
        if theirs != own:
            raise ValueError(f"{theirs} {of} must be {own} for layout {layout.name}; {fix}")


def _stage_ends_ZxS(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> np.ndarray:
    """When stages end their last pass: without messages; with those of the tensor axis; and with those between stages too."""
    latency_G, per_byte_G, *_ = mean_cost(cluster, layout.devices_NxSxK().reshape(-1, layout.tensor))
    reduction_s = latency_G.max() + load.tensor_bytes * per_byte_G.max()
    tensor_Zx1 = np.array([[0.0], [1.0], [1.0]]) * reduction_s
    forward_ZxU = np.array(load.forward_s) + tensor_Zx1 * np.array(load.forward_reductions)
    backward_ZxU = np.array(load.backward_s) + tensor_Zx1 * np.array(load.backward_reductions)
    hop, pays_Z = _hops(cluster, load, layout, traffic), np.array([0.0, 0.0, 1.0])
    return run_pipeline(layout.passes, forward_ZxU, backward_ZxU, hop, pays_Z, blocking=layout.blocking)


def predict_layout(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> LayoutPrediction:
    """The predicted time of an iteration of a layout.

    Args:
        cluster: of as many workers as the layout has devices.
        load: what devices compute and send, from `work(model, layout, flops)`.
        layout: how devices share the model.
        traffic: what is sent between workers and between stages.

    Raises:
        ValueError: if the numbers of devices, workers or stages disagree.

    Examples:
        >>> from decjax.costmodel import Cluster, Link, Transformer, all_reduce, work
        >>> four = Cluster("four hosts", 4, 1, Link(0, 1e9), Link(0, 25e6))
        >>> layout = DeviceLayout(stages=4, microbatches=8)
        >>> model = Transformer(8, 64, 2, 256, 128, batch_size=16)
        >>> prediction = predict_layout(four, work(model, layout, 1e9), layout, Traffic(all_reduce(1)))
        >>> f"{prediction.compute_s:.2f} {prediction.time_s:.2f}"
        '1.81 2.45'
    """
    _check(cluster, load, layout, traffic)
    ends_ZxS = _stage_ends_ZxS(cluster, load, layout, traffic)
    passes_U = np.array(load.forward_s) + np.array(load.backward_s)
    compute_s = layout.microbatches * max(by_stage(layout, passes_U)) + load.optimizer_s
    variants = [(dataclasses.replace(load, embedding_bytes=0.0), traffic), (load, traffic)]
    sent_s = _mean_s(cluster, layout, ends_ZxS[-1], variants)
    total_s = np.maximum.accumulate([compute_s, *(ends_ZxS.max(axis=1) + load.optimizer_s), *sent_s])  # Rounding adds no time.
    parts_s = map(float, np.diff(total_s))
    return LayoutPrediction._make((float(total_s[-1]), compute_s, *parts_s, *_sent(cluster, load, layout, traffic)))


def _sent(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> tuple[float, float, float]:
    """(boundary_bytes, workers_bytes, embedding_bytes) of the busiest device in an iteration."""
    dense_bytes = load.boundary_bytes / (layout.tensor if layout.split_boundary else 1)
    boundary_S = np.zeros(layout.stages)
    for send in (send for sends in layout.passes.sends for send in sends if send.source != send.target):
        boundary = traffic.boundary(send.kind)
        boundary_S[send.source] += dense_bytes * (boundary.ratio if boundary.codes(send.in_epilogue) else 1)
    method, workers = traffic.method, 0.0
    if method.topology is not None:
        devices_NxK = layout.devices_NxSxK()[:, 0]
        routes = [exchange_cost(cluster, round_, method.joint_ring, devices_NxK) for round_ in method.topology.rounds]
        workers = float(np.mean([route.sent_N.max() for route in routes])) / method.every
    workers_bytes = workers * max(traffic.ratio(s) * num_bytes for s, num_bytes in enumerate(load.gradient_bytes))
    holders = 2 * layout.workers if traffic.fused_embedding else 2
    shares = 2 * (holders - 1) / holders + (0 if traffic.fused_embedding else workers)
    return float(boundary_S.max()), workers_bytes, load.embedding_bytes * shares


def choose_compressed_stages(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> tuple[int, tuple[float, ...]]:
    """How many stages, from the first on, should compress what they send to other workers.

    Stage 0 ends its backward passes last; what later stages send travels meanwhile.

    Args:
        cluster: as in `predict_layout`.
        load: as in `predict_layout`.
        layout: as in `predict_layout`.
        traffic: its method has the ratio of a compressed stage; its `compressed_stages` is ignored.

    Returns:
        The smallest k whose time is within the fraction `GAIN` of the best, and the seconds of an iteration for k = 0, 1, … S.
    """
    _check(cluster, load, layout, traffic)
    ready_S = _stage_ends_ZxS(cluster, load, layout, traffic)[-1]
    variants = [(load, dataclasses.replace(traffic, compressed_stages=k)) for k in range(layout.stages + 1)]
    times_s = tuple(_mean_s(cluster, layout, ready_S, variants))
    return next(k for k, time_s in enumerate(times_s) if time_s <= (1 + GAIN) * min(times_s)), times_s
