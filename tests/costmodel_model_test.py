"""The cost model against formulas, a per-worker reference, and measurements."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from decjax import costmodel
from decjax import topology as tp
from decjax.costmodel import Cluster, Jitter, Link, Method, Workload, all_reduce, exchange, gossip, model, no_communication, predict
from decjax.costmodel.simulator import simulate

EIGHT = Cluster("two nodes", 2, 4, Link(1e-5, 2e9), Link(1e-4, 1e9), all_reduce_efficiency=0.8, codec_Bps=1e9)
HALF_DUPLEX = Cluster("box", 8, 1, Link(0, 1e12), Link(1e-3, 2e7), full_duplex_pairs=False)
LOAD = Workload(0.010, (0.006, 0.004, 0.010), (8e6, 4e6, 12e6), optimizer_s=0.003, combine_s=0.002)


def with_jitter(jitter, workload=LOAD):
    return Workload(workload.forward_s, workload.backward_s, workload.num_bytes, workload.optimizer_s, workload.combine_s, jitter)


def topology(name, n=8, **options):
    return tp.make(name, n, **options)


METHODS = [
    no_communication(),
    all_reduce(8),
    all_reduce(8, bucketed=True),
    all_reduce(8, overlap=True),
    all_reduce(8, overlap=True, bucketed=True),
    all_reduce(8, every=3),
    all_reduce(8, ratio=0.5),
    *(
        gossip(topology(name, **options), order=order, bucketed=bucketed, name=f"{name} {order} {bucketed}")
        for name, options in [
            ("ring", {}),
            ("one_peer_exponential", {}),
            ("one_peer_exponential", dict(pairwise=True)),
            ("exponential", {}),
            ("star", {}),
            ("base_k", {}),
            ("random_digraph", {}),
            ("alternating_exponential_ring", dict(local_size=4)),
            ("hierarchical", dict(local_size=2, outer="ring")),
        ]
        for order, bucketed in itertools.product(("awc", "atc"), (False, True))
    ),
    gossip(topology("alternating_exponential_ring", local_size=4), joint_ring=True, bucketed=True, name="aer joint ring"),
    gossip(topology("one_peer_exponential"), every=3, ratio=0.25, name="one_peer_exponential every 3, a quarter of the bytes"),
]


# -- A plain reference, worker by worker ----------------------------------------------------------------------------


def reference_ring(cluster, members):
    """(node, next node) of each hop of a ring over the workers."""
    hops = zip(members, [*members[1:], members[0]])
    return [(a // cluster.workers_per_node, b // cluster.workers_per_node) for a, b in hops]


def reference_cost(cluster, round_, num_bytes, joint_ring):
    """Seconds of every worker for one message of the round."""
    g, N = round_.group_size, round_.num_workers
    node = [i // cluster.workers_per_node for i in range(N)]
    groups = [list(range(k * g, (k + 1) * g)) for k in range(N // g)]
    pairs = [{(s, t) for s, t in shift.pairs} for shift in round_.shifts]
    members_of = []
    if joint_ring and pairs:
        met = {s for s, _ in pairs[0]}
        members_of = [groups[s] + groups[t] for s, t in pairs[0] if s < t]
        own = [groups[k] for k in range(N // g) if k not in met]
    else:
        own = groups
    cost = [0.0] * N
    for rings in (members_of, own):  # rings of groups and of idle nodes do not share a NIC
        out = {}
        for members in rings:
            for a, b in reference_ring(cluster, members):
                if a != b:
                    out[a] = out.get(a, 0) + 1
        for members in rings:
            if len(members) == 1:
                continue
            slowest = latency = 0.0
            for a, b in reference_ring(cluster, members):
                slowest = max(slowest, out[a] / cluster.inter.bandwidth_Bps if a != b else 1 / cluster.intra.bandwidth_Bps)
                latency = max(latency, (cluster.inter if a != b else cluster.intra).latency_s)
            m = len(members)
            for i in members:
                cost[i] = 2 * (m - 1) * (latency + num_bytes / m * slowest / cluster.all_reduce_efficiency)
    if joint_ring and pairs:
        return cost
    sent = [
        (s * g + k, t * g + k, 1 + ((t, s) in shift and not cluster.full_duplex_pairs))
        for shift in pairs
        for s, t in shift
        for k in range(g)
    ]
    for i in range(N):
        longest, latency = 0.0, 0.0
        for s, t, weight in sent:
            if t != i:
                continue
            if node[s] != node[t]:
                leaving = sum(w for a, b, w in sent if node[a] == node[s] and node[b] != node[a])
                entering = sum(w for a, b, w in sent if node[b] == node[t] and node[b] != node[a])
                link, load = cluster.inter, max(leaving, entering)
            else:
                leaving = sum(w for a, b, w in sent if a == s and node[b] == node[a])
                entering = sum(w for a, b, w in sent if b == t and node[b] == node[a])
                link, load = cluster.intra, max(leaving, entering)
            longest = max(longest, load * num_bytes / g / link.bandwidth_Bps)
            latency += link.latency_s
        cost[i] += longest + latency
    return cost


def reference_starts(cluster, workload, method, compute_TxN):
    """The recursion in the module's docstring, with the dense matrix defining who depends on whom."""
    forward, backward, num_bytes = workload.forward_s, list(workload.backward_s), list(workload.num_bytes)
    if not method.bucketed:
        backward, num_bytes = [sum(backward)], [sum(num_bytes)]
    total, N = sum(num_bytes), compute_TxN.shape[1]
    nominal = forward + sum(backward)
    codec = total / cluster.codec_Bps if method.ratio != 1 and cluster.codec_Bps else 0.0
    start, free, pending, starts = [0.0] * N, [0.0] * N, None, []

    def exchange(phase, ready_NxB):
        W_NxN = method.topology.matrix(phase)
        arrivals = [[] for _ in range(N)]
        for b, size in enumerate(num_bytes):
            c = reference_cost(cluster, method.topology.round(phase), method.ratio * size, method.joint_ring)
            now = [max(max(ready_NxB[j][b], free[j]) for j in range(N) if W_NxN[i, j] or i == j) + c[i] for i in range(N)]
            for i in range(N):
                arrivals[i].append(now[i])
                free[i] = now[i]
        return arrivals

    def phase_of(step):
        if method.topology is None or (step + 1) % method.every:
            return None
        return (step // method.every) % method.topology.period

    for t, compute_N in enumerate(compute_TxN):
        here, following = phase_of(t), phase_of(t + 1)
        sends = (following if method.overlap else here) is not None
        ready, u = [], []
        for i in range(N):
            scale = compute_N[i] / nominal
            now, own = start[i] + scale * forward, []
            for b, size in enumerate(num_bytes):
                now += scale * backward[b]
                if method.message == "parameters":
                    now += size / total * workload.optimizer_s
                    if method.overlap and pending:
                        now = max(now, pending[i][b])
                    if method.overlap and here is not None:
                        now += size / total * workload.combine_s
                now += size / total * codec * sends
                own.append(now)
            ready.append(own)
            u.append(now)
        local_s = workload.optimizer_s  # averaged gradients are not packed with anything
        if method.message == "gradients":
            if method.overlap:
                u = [(max(u[i], pending[i][-1]) if pending else u[i]) + local_s for i in range(N)]
            else:
                u = [e[-1] + local_s for e in exchange(here, ready)] if here is not None else [x + local_s for x in u]
        elif not method.overlap and here is not None:
            u = [e[-1] + workload.combine_s for e in exchange(here, ready)]
        if method.overlap:
            pending = exchange(following, ready) if following is not None else None
        start = u
        starts.append(u)
    return np.array(starts)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("cluster", [EIGHT, HALF_DUPLEX], ids=lambda cluster: cluster.name)
def test_recursion_equals_the_plain_reference(cluster, method):
    compute_TxKxN = Jitter("exponential", scale_s=0.01).sample(np.random.default_rng(3), LOAD.compute_s, (22, 2, 8))
    run = simulate(method, model.single_stage(cluster, LOAD, method), compute_TxKxN)
    for k in range(2):
        expected = reference_starts(cluster, LOAD, method, compute_TxKxN[:, k])
        np.testing.assert_allclose(run.start_TxKxN[1:, k], expected, rtol=1e-12, atol=0)


# -- Closed forms ----------------------------------------------------------------------------------------------------


def closed_form(cluster, workload, method):
    """Mean seconds per iteration by a formula; None where there is none.

    There are formulas for messages of one bucket in every step (p = 1) between workers that are equally fast:

        nothing sent                         C + opt                                        any jitter; C its mean
        all-reduce, C constant or C + s·Exp  C + s H_N + c + opt,  H_N = Σ_{k≤N} 1/k        mean of the slowest of N
        all-reduce one step stale            max(C + opt, c)                                C constant
        gossip, adapt while communicating    mean over phases of max(C + opt, c) + combine  C constant, c equal for all
        gossip, adapt then communicate       C + opt + combine + mean over phases of c      C constant, c equal for all
    """
    if method.every > 1 or (method.bucketed and len(workload.num_bytes) > 1):
        return None
    compute_s, optimizer_s = expected_compute_s(cluster, workload, method), workload.optimizer_s
    if compute_s is None or method.topology is None:
        return None if compute_s is None else compute_s + optimizer_s
    step = model.single_stage(cluster, workload, method)
    cost_s = np.stack(step.cost_s)[:, 0, 0]  # [phases, N]
    if np.ptp(cost_s, axis=1).max() > 1e-12 * cost_s.max():
        return None
    c, more_s = cost_s[:, 0], step.combine_s + float(step.codec_s)
    if not method.overlap:
        return float(compute_s + c.mean() + optimizer_s + more_s)
    if method.message == "parameters":
        return float(np.maximum(compute_s + optimizer_s, c).mean() + more_s)
    return float(max(compute_s + optimizer_s + more_s, c[0])) if len(c) == 1 else None


def expected_compute_s(cluster, workload, method):
    """Expected seconds until a worker and all that it waits for have computed; None where there is no formula."""
    jitter, compute_s = workload.jitter, workload.compute_s
    if jitter.is_deterministic or method.topology is None:
        return jitter.mean_s(compute_s)
    waits_for_all = method.message == "gradients" and not method.overlap
    if waits_for_all and jitter.kind == "exponential":
        return compute_s + jitter.scale_s * sum(1 / k for k in range(1, cluster.num_workers + 1))
    return None


def simulated_mean(cluster, workload, method, num_steps, num_replicas=1, seed=0):
    shape = (num_steps, num_replicas, cluster.num_workers)
    compute_TxKxN = workload.jitter.sample(np.random.default_rng(seed), workload.compute_s, shape)
    run = simulate(method, model.single_stage(cluster, workload, method), compute_TxKxN)
    half = num_steps // 2
    return (run.start_TxKxN[-1] - run.start_TxKxN[half]).mean() / (num_steps - half)


@pytest.mark.parametrize("cluster", [EIGHT, HALF_DUPLEX], ids=lambda cluster: cluster.name)
def test_closed_forms_of_constant_compute(cluster):
    found = 0
    for method in METHODS:
        exact_s = closed_form(cluster, LOAD, method)
        if exact_s is not None:
            found += 1
            assert exact_s == pytest.approx(predict(cluster, LOAD, method).mean_s, rel=1e-9), method.name
            assert exact_s == pytest.approx(simulated_mean(cluster, LOAD, method, 24 * method.period), rel=1e-9), method.name
    assert found >= 8


def test_computing_slows_what_overlaps_with_it():
    """`beside_s` is added to an overlapped exchange; it is hidden where computing takes longer than both."""
    link = costmodel.Link(0.0, 1e9)
    cluster = costmodel.Cluster("box", 2, 1, link, link)
    load = Workload(0.010, (0.020,), (0.2e9,), optimizer_s=0.003, combine_s=0.002, beside_s=0.007)  # a message takes 0.2 s
    pair = topology("one_peer_exponential", 2)
    assert predict(cluster, load, gossip(pair)).mean_s == pytest.approx(0.2 + 0.007 + 0.002)
    assert predict(cluster, load, gossip(pair, order="atc")).mean_s == pytest.approx(0.030 + 0.003 + 0.2 + 0.002)
    assert predict(cluster, load, gossip(pair, ratio=0.1, coding_s=0.0)).mean_s == pytest.approx(0.033 + 0.002)
    assert predict(cluster, load, gossip(pair, ratio=0.14, coding_s=0.0)).mean_s == pytest.approx(0.028 + 0.007 + 0.002)


def test_closed_forms_are_the_formulas():
    n, P = 8, LOAD.total_bytes
    ring_s = 2 * (n - 1) * 1e-4 + 2 * (n - 1) / n * P / (0.8 * 1e9)  # the NIC is the slowest hop
    assert closed_form(EIGHT, LOAD, all_reduce(n)) == pytest.approx(0.030 + 0.003 + ring_s)
    assert closed_form(EIGHT, LOAD, all_reduce(n, overlap=True)) == pytest.approx(max(0.033, ring_s))
    # XOR hops 1 and 2 stay within the node; hop 4 sends four messages through each NIC.
    hops = np.array([1e-5 + P / 2e9, 1e-5 + P / 2e9, 1e-4 + 4 * P / 1e9])
    pairwise = topology("one_peer_exponential", pairwise=True)
    assert closed_form(EIGHT, LOAD, gossip(pairwise)) == pytest.approx(np.maximum(0.033, hops).mean() + 0.002)
    assert closed_form(EIGHT, LOAD, gossip(pairwise, order="atc")) == pytest.approx(0.035 + hops.mean())
    jittery = with_jitter(Jitter("exponential", scale_s=0.02))
    harmonic = sum(1 / k for k in range(1, 9))
    assert closed_form(EIGHT, jittery, all_reduce(n)) == pytest.approx(0.033 + 0.02 * harmonic + ring_s)


@pytest.mark.parametrize(
    "jitter",
    [Jitter("exponential", 0.02), Jitter("lognormal", 0.02), Jitter("trace", trace_s=(0.03, 0.04, 0.1))],
    ids=lambda jitter: jitter.kind,
)
def test_monte_carlo_meets_the_expectation(jitter):
    workload = with_jitter(jitter)
    mean_s = closed_form(EIGHT, workload, no_communication())
    assert mean_s == pytest.approx(simulated_mean(EIGHT, workload, no_communication(), 2000, 16), rel=0.01)


def test_all_reduce_waits_for_the_largest_of_n():
    workload = with_jitter(Jitter("exponential", scale_s=0.02))
    exact_s = closed_form(EIGHT, workload, all_reduce(8))
    assert simulated_mean(EIGHT, workload, all_reduce(8), 2000, 16) == pytest.approx(exact_s, rel=0.01)
    # The largest of three equally likely values: P(max ≤ v_k) = (k/3)^8.
    trace = with_jitter(Jitter("trace", trace_s=(0.03, 0.04, 0.1)))
    largest_s = 0.03 * 3**-8 + 0.04 * (2**8 - 1) * 3**-8 + 0.1 * (3**8 - 2**8) * 3**-8
    assert predict(EIGHT, trace, all_reduce(8)).mean_s == pytest.approx(
        exact_s - 0.03 - 0.02 * sum(1 / k for k in range(1, 9)) + largest_s, rel=0.01
    )


@pytest.mark.parametrize("kind, expected", [("normal", (0.05, 0.01)), ("exponential", (0.06, 0.01)), ("lognormal", (0.05, 0.01))])
def test_jitter_has_its_moments(kind, expected):
    times_s = Jitter(kind, scale_s=0.01).sample(np.random.default_rng(0), 0.05, (1000, 4, 50))
    assert (times_s.mean(), times_s.std()) == pytest.approx(expected, rel=0.02)
    assert times_s.min() >= 0


# -- What must hold in general ---------------------------------------------------------------------------------------

JITTERY = with_jitter(Jitter("lognormal", scale_s=0.01))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_prediction_is_consistent(method):
    prediction = predict(EIGHT, JITTERY, method, num_steps=60, num_replicas=2)
    parts_s = prediction.compute_s + prediction.waiting_s + prediction.exposed_s
    assert prediction.mean_s == pytest.approx(parts_s, rel=1e-9)
    assert prediction.exposed_s >= -1e-12 and list(prediction.quantiles_s.values()) == sorted(prediction.quantiles_s.values())
    bare = predict(EIGHT, JITTERY, no_communication(), num_steps=60, num_replicas=2)
    assert prediction.mean_s > 0.97 * bare.mean_s


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_better_links_are_never_slower(method):
    def mean_s(inter=1.0, intra=1.0, latency=1.0):
        cluster = Cluster("c", 2, 4, Link(latency * 1e-5, intra * 2e9), Link(latency * 1e-4, inter * 1e9), codec_Bps=1e9)
        return predict(cluster, JITTERY, method, num_steps=40, num_replicas=2).mean_s

    base = mean_s()
    assert all(better <= base * (1 + 1e-12) for better in (mean_s(inter=4), mean_s(intra=4), mean_s(latency=0)))


@pytest.mark.parametrize("jitter", [Jitter(), Jitter("exponential", 0.02)], ids=lambda jitter: jitter.kind)
def test_overlap_is_never_slower(jitter):
    workload = with_jitter(jitter)
    for name in ("ring", "one_peer_exponential", "exponential", "hypercube", "base_k"):
        graph = topology(name)
        awc, atc = (predict(EIGHT, workload, gossip(graph, order=order), num_steps=120) for order in ("awc", "atc"))
        assert awc.mean_s <= atc.mean_s * (1 + 1e-9)
    plain, bucketed, stale = (
        predict(EIGHT, workload, all_reduce(8, **options), num_steps=120).mean_s
        for options in ({}, dict(bucketed=True), dict(overlap=True))
    )
    assert stale <= plain and bucketed <= plain + 3 * 14e-4  # each bucket pays the latency


def test_local_steps_interpolate():
    times_s = [predict(EIGHT, LOAD, all_reduce(8, every=p), num_steps=96).mean_s for p in (1, 2, 4)]
    alone = predict(EIGHT, LOAD, no_communication()).mean_s
    shares = [(time_s - alone) / (times_s[0] - alone) for time_s in times_s]
    assert shares == pytest.approx([1, 1 / 2, 1 / 4])


def test_messages_of_a_node_share_its_nic():
    n, P = 16, LOAD.total_bytes
    slow = Cluster("slow", 4, 4, Link(0, 1e12), Link(0, 1e8))
    costs = [model.exchange_cost(slow, round_).per_byte_N * 1e8 for round_ in topology("one_peer_exponential", n).rounds]
    assert [cost.max().round(3) for cost in costs] == [1, 2, 4, 4]  # hop 1, 2, 4, 8: messages of that many workers leave the node
    assert costs[0].min() < 0.01  # within the node
    aer = topology("alternating_exponential_ring", n, local_size=4)
    shards, ring = (model.exchange_cost(slow, aer.rounds[0], joint_ring) for joint_ring in (False, True))
    assert shards.nic_M.max() == 1 and ring.nic_M.max() == 1.75  # P versus 2(2L−1)/2L·P leaving a node
    assert predict(slow, LOAD, gossip(aer)).bytes_per_nic == pytest.approx(
        P * np.mean([model.exchange_cost(slow, round_).nic_M for round_ in aer.rounds], axis=0).max()
    )


def test_hierarchical_means_leave_a_node_once():
    nodes, L = 4, 4
    ring = Cluster("ring", nodes, L, Link(1e-6, 1e10), Link(1e-4, 1e9))
    tree = dataclasses.replace(ring, hierarchical_all_reduce=True)
    everybody = topology("complete", 16).rounds[0]
    flat, levels = model.exchange_cost(ring, everybody), model.exchange_cost(tree, everybody)
    assert flat.nic_M == pytest.approx([2 * 15 / 16] * 4) and levels.nic_M == pytest.approx([2 * 3 / 4] * 4)
    assert levels.sent_N == pytest.approx([2 * 3 / 4 + 2 * 3 / 4 / L] * 16)
    assert levels.per_byte_N == pytest.approx([1.5e-9] * 16) and flat.per_byte_N == pytest.approx([1.875e-9] * 16)
    assert levels.latency_N == pytest.approx([6 * 1e-4 + 6 * 1e-6] * 16) and flat.latency_N == pytest.approx([30 * 1e-4] * 16)
    aer = topology("alternating_exponential_ring", 16, local_size=L).rounds[0]
    joint = model.exchange_cost(tree, aer, joint_ring=True)
    assert joint.nic_M.max() == 1 and joint.per_byte_N.max() == pytest.approx(1e-9)


def test_pairs_take_turns_where_half_duplex():
    slow = HALF_DUPLEX.inter.bandwidth_Bps
    shift, pair = (
        model.exchange_cost(HALF_DUPLEX, round_).per_byte_N * slow for round_ in topology("one_peer_exponential").rounds[1:]
    )
    assert shift == pytest.approx(np.ones(8)) and pair == pytest.approx(2 * np.ones(8))
    ring = model.exchange_cost(HALF_DUPLEX, topology("ring").rounds[0]).per_byte_N * slow
    assert ring == pytest.approx(2 * np.ones(8))  # two messages; its shifts are one-way


def test_a_persistent_straggler_slows_every_synchronous_scheme():
    workload = with_jitter(Jitter(slow_workers=1, slow_factor=3.0))
    fast = Cluster("fast", 8, 1, Link(0, 1e15), Link(0, 1e15))
    slow_s = 3 * workload.compute_s + workload.optimizer_s
    assert predict(fast, workload, all_reduce(8)).mean_s == pytest.approx(slow_s)
    assert predict(fast, workload, gossip(topology("ring"))).mean_s == pytest.approx(slow_s + workload.combine_s, rel=1e-3)


# Measured ms/iteration with eight processes: 50 ms of computing plus jitter; the exchange costs what it adds without jitter.
MEASURED_MS = {"exponential": (98, 215, 161, 160, 129, 119), "a tenth": (97, 363, 251, 270, 238, 189)}


@pytest.mark.parametrize(
    "kind, jitter", [("exponential", Jitter("exponential", 0.05)), ("a tenth", Jitter("trace", trace_s=(0.05,) * 9 + (0.55,)))]
)
def test_stragglers_as_measured(kind, jitter):
    workload = Workload(0.02, (0.03,), (1.0,), jitter=jitter)
    exp = topology("one_peer_exponential")
    methods = [
        (0, no_communication()),
        (0.031 / 14, all_reduce(8)),
        (0.011, gossip(topology("directed_ring"), order="atc")),
        (0.012, gossip(exp, order="atc")),
        (0.031 / 14, all_reduce(8, overlap=True)),
        (0.012, gossip(exp)),
    ]
    predicted = [
        1e3 * predict(Cluster("8 processes", 8, 1, Link(0, 1e12), Link(latency_s, 1e12)), workload, method).mean_s
        for latency_s, method in methods
    ]
    assert predicted == pytest.approx(MEASURED_MS[kind], rel=0.09)
    stale, exchange = predicted[-2:]
    assert stale / exchange == pytest.approx(MEASURED_MS[kind][-2] / MEASURED_MS[kind][-1], rel=0.15) and exchange < stale


# -- Data ------------------------------------------------------------------------------------------------------------


def test_profiles_survive_json(tmp_path):
    path = tmp_path / "profile.json"
    for workload in (None, with_jitter(Jitter("trace", trace_s=(0.1, 0.25), together=2, slow_workers=1, slow_factor=2.0))):
        costmodel.save(path, EIGHT, workload)
        assert costmodel.load(path) == (EIGHT, workload)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "a list instead of a JSON object"),
        ('{"name": "x"}', "'num_nodes' is missing"),
        ('{"name": "x", "num_nodes": 1, "workers_per_node": 1, "intra": 3, "inter": {}}', "intra"),
        (
            '{"name": "x", "num_nodes": 1, "workers_per_node": 1, "intra": {"latency_s": 0, "bandwidth_Bps": 0}, "inter": {}}',
            "bandwidth_Bps=0 must be at least",
        ),
        ('{"name": "x", "num_nodes": 1, "workers_per_node": 1, "colour": 2}', "unknown field 'colour'"),
    ],
)
def test_bad_profiles_are_one_line(tmp_path, text, problem):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        costmodel.load(path)
    assert problem in str(error.value) and "\n" not in str(error.value) and "profile.json" in str(error.value)


@pytest.mark.parametrize(
    "build, problem",
    [
        (lambda: Link(-1, 1), "latency_s=-1"),
        (lambda: Link(0, math.nan), "bandwidth_Bps=nan"),
        (lambda: Cluster("c", 0, 1, Link(0, 1), Link(0, 1)), "num_nodes=0"),
        (lambda: Cluster("c", 1, 1.5, Link(0, 1), Link(0, 1)), "workers_per_node=1.5"),
        (lambda: Cluster("c", 1, 1, Link(0, 1), Link(0, 1), all_reduce_efficiency=1.5), "at most 1"),
        (lambda: Cluster("c", 1, 1, Link(0, 1), Link(0, 1), codec_Bps=0), "codec_Bps=0 must be at least 1e-18"),
        (lambda: EIGHT.resize(6), "use 4 or 8"),
        (lambda: Jitter("gaussian"), "use one of constant, normal"),
        (lambda: Jitter("trace"), "'trace' needs trace_s"),
        (lambda: Jitter("constant", 0.1), "scale_s=0.1 does not fit"),
        (lambda: Jitter("trace", trace_s=(0.1, 0.2, 0.3), together=2), "together=2 does not fit"),
        (lambda: Jitter("normal", 0.1, together=2), "together=2 does not fit"),
        (lambda: Jitter(together=0), "together=0"),
        (lambda: Jitter("normal", -0.1), "scale_s=-0.1"),
        (lambda: Jitter(slow_workers=1, slow_factor=0.5), "slow_factor=0.5"),
        (lambda: Workload(0.1, (0.1, 0.1), (1e6,)), "one number for each of"),
        (lambda: Workload(0.0, (0.0,), (1e6,)), "forward_s + backward_s=0.0 must be at least"),
        (lambda: Workload(0.1, 0.1, (1e6,)), "backward_s=0.1 must be a sequence"),
        (lambda: gossip(topology("ring"), order="now"), "use one of awc, atc"),
        (lambda: Method("x", None, message="hope"), "use one of gradients, parameters"),
        (lambda: all_reduce(8, every=0), "every=0"),
        (lambda: all_reduce(8, ratio=0), "ratio=0"),
        (lambda: predict(EIGHT, LOAD, all_reduce(4)), "use cluster.resize(4)"),
        (lambda: predict(EIGHT, LOAD, all_reduce(8), num_steps=0), "num_steps=0"),
        (
            lambda: predict(EIGHT, LOAD, gossip(topology("hierarchical", local_size=2, outer="ring"), joint_ring=True)),
            "meet in pairs",
        ),
    ],
)
def test_mistakes_are_one_line(build, problem):
    with pytest.raises(ValueError) as error:
        build()
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_one_worker_talks_to_nobody():
    alone = Cluster("one", 1, 1, Link(0, 1e9), Link(0, 1e9))
    for method in (all_reduce(1), gossip(topology("ring", 1))):
        prediction = predict(alone, LOAD, method)
        assert (prediction.exposed_s, prediction.waiting_s) == pytest.approx((0, 0), abs=1e-12)
        assert prediction.bytes_per_worker == prediction.bytes_per_nic == 0


# -- Workers of several devices -----------------------------------------------------------------------------------------

DEVICES = Cluster("four nodes", 4, 8, Link(1e-6, 1e9), Link(1e-4, 1e8), codec_Bps={"int8": 1e9}, flops=1e12, memory_bytes=16e9)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("name", ["ring", "one_peer_exponential", "complete", "hierarchical"])
@pytest.mark.parametrize("L", [1, 2, 4, 8])
def test_the_message_of_a_worker_is_that_of_its_devices_in_shards(L, name, hierarchical):
    devices = dataclasses.replace(DEVICES, hierarchical_all_reduce=hierarchical)
    workers = costmodel.grouped(devices, L)
    N = workers.num_workers
    for round_ in topology(name, N, **({"local_size": 8 // L} if name == "hierarchical" else {})).rounds:
        found = exchange.exchange_cost(workers, round_)
        shards = exchange.exchange_cost(devices, round_, devices_NxK=np.arange(N * L).reshape(N, L))
        np.testing.assert_allclose(found.per_byte_N, shards.per_byte_N / L)
        np.testing.assert_allclose(found.latency_N, shards.latency_N)
        np.testing.assert_allclose(found.nic_M, shards.nic_M / L)
        np.testing.assert_allclose(found.sent_N, shards.sent_N)


def test_devices_of_a_worker_gather_parameters_and_add_up_gradients():
    workers = costmodel.grouped(DEVICES, 4)
    assert (workers.num_workers, workers.flops, workers.memory_bytes, workers.codec_rate("int8")) == (8, 4e12, 64e9, 4e9)
    step = costmodel.divided(LOAD, workers)
    gather_s = [3 * 1e-6 + 3 / 4 * num_bytes / 1e9 for num_bytes in LOAD.num_bytes]
    assert step.forward_s == pytest.approx(LOAD.forward_s + sum(gather_s))
    assert step.backward_s == pytest.approx([own_s + 2 * moved_s for own_s, moved_s in zip(LOAD.backward_s, gather_s)])
    assert (step.optimizer_s, step.combine_s) == pytest.approx((LOAD.optimizer_s / 4, LOAD.combine_s / 4))
    assert costmodel.divided(LOAD, DEVICES) == LOAD
    with pytest.raises(
        ValueError, match=r"fsdp=3 does not divide the 8 devices of a node of 'four nodes'.*use one of \[1, 2, 4, 8\]"
    ):
        costmodel.grouped(DEVICES, 3)
