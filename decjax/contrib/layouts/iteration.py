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

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from decjax.contrib.layouts.layout import DeviceLayout, Traffic, Work, by_stage
from decjax.costmodel.exchange import Exchange, exchange_cost, mean_cost, messages_cost
from decjax.costmodel.methods import GRADIENTS, PARAMETERS
from decjax.costmodel.profile import Cluster
from decjax.costmodel.simulator import StepCosts, horizon, simulate
from decjax.schedules import BACKWARD, FORWARD, Schedule, Send
from decjax.topology import Round

GAIN = 1e-3  # fraction of an iteration that compressing one more stage has to save

# -- The pipeline -----------------------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """The cost of a message between stages."""

    out_s: float  # seconds that it occupies the sender's link
    late_s: float  # seconds from then until the receiver has it
    encode_s: float
    decode_s: float
    form: str = ""  # codec and ratio; empty: not compressed


def run_pipeline(
    schedule: Schedule,
    forward_ZxU: np.ndarray,
    backward_ZxU: np.ndarray,
    hop: Callable[[Send], Hop],
    pays_Z: np.ndarray,
    *,
    blocking: bool = False,
) -> np.ndarray:
    """Return when each stage ends its last pass, [Z, S] seconds, by the recursion of the module's docstring, for Z variants at once.

    Args:
        schedule: what each stage does, in which order.
        forward_ZxU: seconds of a forward pass of each virtual stage.
        backward_ZxU: seconds of a backward pass of each virtual stage.
        hop: the cost of a message.
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
            _send_blocking(hops, end_SxZ, in_SxZ, pays_Z)
            continue
        for send, cost in hops:
            out_SxZ[send.source] = np.maximum(out_SxZ[send.source], end_SxZ[send.source]) + cost.out_s * pays_Z
            there_Z = out_SxZ[send.source] + cost.late_s * pays_Z
            arrived[send.kind, send.microbatch, send.target, send.target_chunk] = there_Z, cost.decode_s * pays_Z
    return end_SxZ.T


def _send_blocking(hops: Sequence[tuple[Send, Hop]], end_SxZ: np.ndarray, in_SxZ: np.ndarray, pays_Z: np.ndarray) -> None:
    """Add a tick's blocking messages to the times at which stages (`end_SxZ`) and their incoming links (`in_SxZ`) are free again."""
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


@dataclasses.dataclass(frozen=True)
class PipelineCosts:
    """The costs of an iteration of a layout; arguments as those of `predict_layout`."""

    cluster: Cluster
    load: Work
    layout: DeviceLayout
    traffic: Traffic

    def __post_init__(self):
        load, layout, traffic, S = self.load, self.layout, self.traffic, self.layout.stages
        devices, workers = layout.num_devices, traffic.method.topology.num_workers if traffic.method.topology else layout.workers
        counts, of_work = (len(load.forward_s), len(load.gradient_bytes)), "(virtual stages, stages) in the work"
        for theirs, ours, of, fix in (
            (self.cluster.num_workers, devices, f"devices in cluster {self.cluster.name!r}", f"use cluster.resize({devices})"),
            (workers, layout.workers, f"workers in {traffic.method.name!r}", "make them equal"),
            (counts, (layout.num_virtual, S), of_work, "use work(model, layout, flops)"),
            (max(traffic.compressed_stages or 0, S), S, "compressed_stages", f"use at most {S}"),
        ):
            if theirs != ours:
                raise ValueError(f"{theirs} {of} must be {ours} for layout {layout.name}; {fix}")

    @functools.cached_property
    def devices_NxSxK(self) -> np.ndarray:
        """The devices of the layout."""
        return self.layout.devices_NxSxK()

    @property
    def sent_bytes(self) -> float:
        """Bytes of an uncompressed message between stages, of one device."""
        return self.load.boundary_bytes / (self.layout.tensor if self.layout.split_boundary else 1)

    def hop(self, send: Send) -> Hop:
        """Return the cost of a message between stages on the slowest of all workers and devices."""
        if send.source == send.target:
            return Hop(0.0, 0.0, 0.0, 0.0)
        boundary = self.traffic.boundary(send.kind)
        coded = boundary.codes(send.in_epilogue)
        pairs = np.stack([self.devices_NxSxK[:, stage].ravel() for stage in (send.source, send.target)])
        latency_N, per_byte_N, _ = messages_cost(self.cluster, [pairs])
        gather_s = 0.0
        if self.layout.split_boundary and self.layout.tensor > 1:  # An all-gather is the second half of an all-reduce.
            latency_G, per_byte_G, *_ = mean_cost(self.cluster, self.devices_NxSxK[:, send.target])
            gather_s = (latency_G.max() + self.load.boundary_bytes * per_byte_G.max()) / 2
        codec_s = self.cluster.coding_s(self.sent_bytes, boundary.codec) if coded else 0.0
        num_bytes = self.sent_bytes * (boundary.ratio if coded else 1)
        form = f"{boundary.codec}, {boundary.ratio}" if coded else ""
        return Hop(num_bytes * per_byte_N.max(), latency_N.max() + gather_s, codec_s / 2, codec_s / 2, form)

    def ends_ZxS(self) -> np.ndarray:
        """Return when stages end their last pass: without messages; with those of the tensor axis; and with those between stages too."""
        load = self.load
        latency_G, per_byte_G, *_ = mean_cost(self.cluster, self.devices_NxSxK.reshape(-1, self.layout.tensor))
        reduction_s = latency_G.max() + load.tensor_bytes * per_byte_G.max()
        tensor_Zx1 = np.array([[0.0], [1.0], [1.0]]) * reduction_s
        forward_ZxU = np.array(load.forward_s) + tensor_Zx1 * np.array(load.forward_reductions)
        backward_ZxU = np.array(load.backward_s) + tensor_Zx1 * np.array(load.backward_reductions)
        alike, pays_Z = functools.cache(self.hop), np.array([0.0, 0.0, 1.0])
        hop = lambda send: alike(send._replace(microbatch=0, source_chunk=0, target_chunk=0))
        return run_pipeline(self.layout.passes, forward_ZxU, backward_ZxU, hop, pays_Z, blocking=self.layout.blocking)

    # -- Between workers ----------------------------------------------------------------------------------------------

    def codec_s(self, stage: int) -> float:
        """Return the seconds that a device of a stage encodes and decodes; devices divide `Method.coding_s` by their bytes."""
        method, num_bytes = self.traffic.method, self.load.gradient_bytes[stage]
        if self.traffic.ratio(stage) == 1:
            return 0.0
        if method.coding_s is None:
            return self.cluster.coding_s(num_bytes, method.codec)
        total_bytes = self.layout.tensor * sum(self.load.gradient_bytes)
        return method.coding_s * num_bytes / total_bytes if total_bytes else 0.0

    def exchange(self, round_: Round, stage: int) -> StageExchange:
        """Return what a stage exchanges between workers in a round, with its part of a tied embedding, but without codec time."""
        route = exchange_cost(self.cluster, round_, self.traffic.method.joint_ring, self.devices_NxSxK[:, stage])
        is_holder = stage in (0, self.layout.stages - 1) and not self.traffic.fused_embedding
        num_bytes = self.traffic.ratio(stage) * self.load.gradient_bytes[stage] + (self.load.embedding_bytes if is_holder else 0.0)
        time_s = self.traffic.latencies(stage) * route.latency_N.max() + num_bytes * route.per_byte_N.max()
        return StageExchange(float(time_s), tuple(np.flatnonzero(route.nic_M).tolist()))

    @functools.cached_property
    def joint(self) -> StageExchange:
        """The mean of the embedding's gradient over the first and last stage of each worker, or of all workers if fused."""
        load, fused = self.load, self.traffic.fused_embedding
        if not load.embedding_bytes:
            return SILENCE
        holders_NxHxK = self.devices_NxSxK[:, [0, -1]]
        members_GxH = np.moveaxis(holders_NxHxK, 2, 0).reshape(-1, 2 * self.layout.workers if fused else 2)
        members_GxH = np.sort(members_GxH, axis=1)  # A ring visits the holders on a node one after the other.
        latency_G, per_byte_G, _, nic_M = mean_cost(self.cluster, members_GxH)
        time_s = float(latency_G.max() + load.embedding_bytes * per_byte_G.max())
        return StageExchange(time_s, tuple(np.flatnonzero(nic_M).tolist()))

    def averaged_s(self, ready_s: Sequence[float], exchanges: Sequence[StageExchange]) -> float:
        """Return when all gradients of a worker are exchanged, whose stages have computed at `ready_s`."""
        if self.traffic.fused_embedding:
            return max(take_turns([*ready_s, max(ready_s[0], ready_s[-1])], [*exchanges, self.joint]))
        done_s = take_turns(ready_s, exchanges)
        return max(*done_s, max(done_s[0], done_s[-1]) + self.joint.time_s)

    def as_one_device(self, ready_s: Sequence[float]) -> tuple[float, float, list[float]]:
        """Return the seconds of computing, of a codec in addition, and of the exchange in each phase, if stages compute until `ready_s`.

        A method that averages gradients before the update computes until the gradients are there without an exchange; the exchange
        takes the seconds from then on.
        """
        method, stages = self.traffic.method, range(self.layout.stages)
        computed_s, codec_S = self.averaged_s(ready_s, [SILENCE] * len(stages)), [self.codec_s(stage) for stage in stages]
        costs_s = []
        for round_ in method.topology.rounds if method.topology else ():
            exchanges = [self.exchange(round_, stage) for stage in stages]
            if not method.overlap:
                exchanges = [each._replace(time_s=each.time_s + codec_S[stage]) for stage, each in enumerate(exchanges)]
            if method.message == GRADIENTS and not method.overlap:
                costs_s.append(self.averaged_s(ready_s, exchanges) - computed_s)
            else:
                costs_s.append(max(take_turns([0.0] * len(stages), exchanges)) + (self.load.beside_s if method.overlap else 0.0))
        return computed_s, max(codec_S) if method.overlap else 0.0, costs_s

    def sent(self) -> tuple[float, float, float]:
        """Return (boundary_bytes, workers_bytes, embedding_bytes) of the busiest device in an iteration."""
        layout, traffic, method, workers = self.layout, self.traffic, self.traffic.method, 0.0
        boundary_S = np.zeros(layout.stages)
        for send in (send for sends in layout.passes.sends for send in sends if send.source != send.target):
            boundary = traffic.boundary(send.kind)
            boundary_S[send.source] += self.sent_bytes * (boundary.ratio if boundary.codes(send.in_epilogue) else 1)
        if method.topology is not None:
            devices_NxK = self.devices_NxSxK[:, 0]
            routes = [exchange_cost(self.cluster, round_, method.joint_ring, devices_NxK) for round_ in method.topology.rounds]
            workers = float(np.mean([route.sent_N.max() for route in routes])) / method.every
        workers_bytes = workers * max(traffic.ratio(s) * num_bytes for s, num_bytes in enumerate(self.load.gradient_bytes))
        holders = 2 * layout.workers if traffic.fused_embedding else 2
        shares = 2 * (holders - 1) / holders + (0 if traffic.fused_embedding else workers)
        return float(boundary_S.max()), workers_bytes, self.load.embedding_bytes * shares


def _mean_s(pipelines: Sequence[PipelineCosts], ready_S: np.ndarray) -> list[float]:
    """Return the seconds of an iteration, mean over phases and local steps, of pipelines that differ only in what they send."""
    load, method = pipelines[0].load, pipelines[0].traffic.method
    computed_s, codec_s, costs_s = zip(*(pipeline.as_one_device(ready_S.tolist()) for pipeline in pipelines))
    combine_s, phases = load.combine_s if method.message == PARAMETERS else 0.0, len(costs_s[0])
    cost_s = [np.reshape(phase_K, (1, -1, 1)) for phase_K in zip(*costs_s)]
    step = StepCosts(0.0, (1.0,), (1.0,), load.optimizer_s, combine_s, np.reshape(codec_s, (-1, 1)), [ALIKE] * phases, cost_s)
    warm_up, T = horizon(method, method.period)
    run = simulate(method, step, np.broadcast_to(np.reshape(computed_s, (1, -1, 1)), (T, len(pipelines), 1)))
    return run.step_KxN(warm_up)[:, 0].tolist()


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


def predict_layout(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> LayoutPrediction:
    """Return the predicted time of an iteration of a layout; a ValueError if the numbers of devices, workers or stages disagree.

    Args:
        cluster: of as many workers as the layout has devices.
        load: what devices compute and send, from `work(model, layout, flops)`.
        layout: how devices share the model.
        traffic: what is sent between workers and between stages.

    Examples:
        >>> from decjax.contrib.layouts import Transformer, work
        >>> from decjax.costmodel import Cluster, Link, all_reduce
        >>> four = Cluster("four hosts", 4, 1, Link(0, 1e9), Link(0, 25e6))
        >>> layout = DeviceLayout(stages=4, microbatches=8)
        >>> model = Transformer(8, 64, 2, 256, 128, batch_size=16)
        >>> prediction = predict_layout(four, work(model, layout, 1e9), layout, Traffic(all_reduce(1)))
        >>> f"{prediction.compute_s:.2f} {prediction.time_s:.2f}"
        '1.81 2.45'
    """
    pipeline = PipelineCosts(cluster, load, layout, traffic)
    ends_ZxS = pipeline.ends_ZxS()
    passes_U = np.array(load.forward_s) + np.array(load.backward_s)
    compute_s = layout.microbatches * max(by_stage(layout, passes_U)) + load.optimizer_s
    untied = dataclasses.replace(pipeline, load=dataclasses.replace(load, embedding_bytes=0.0))
    total_s = [compute_s, *(ends_ZxS.max(axis=1) + load.optimizer_s), *_mean_s([untied, pipeline], ends_ZxS[-1])]
    total_s = np.maximum.accumulate(total_s)  # Parts of no time are not negative by rounding.
    return LayoutPrediction._make((float(total_s[-1]), compute_s, *map(float, np.diff(total_s)), *pipeline.sent()))


def choose_compressed_stages(cluster: Cluster, load: Work, layout: DeviceLayout, traffic: Traffic) -> tuple[int, tuple[float, ...]]:
    """Choose how many stages, from the first on, should compress what they send to other workers.

    Stage 0 ends its backward passes last, so the exchanges of later stages overlap with them. Arguments are those of `predict_layout`,
    with the ratio of a compressed stage in the method; `compressed_stages` is ignored.

    Returns:
        The smallest k whose time is within the fraction `GAIN` of the best, and the seconds of an iteration for k = 0, 1, … S.
    """
    variants = [dataclasses.replace(traffic, compressed_stages=k) for k in range(layout.stages + 1)]
    pipelines = [PipelineCosts(cluster, load, layout, variant) for variant in variants]
    times_s = tuple(_mean_s(pipelines, pipelines[0].ends_ZxS()[-1]))
    return next(k for k, time_s in enumerate(times_s) if time_s <= (1 + GAIN) * min(times_s)), times_s
