"""Methods for heterogeneous data against dense NumPy references written as in the papers, in float64."""

import functools
import itertools
from typing import Any

import numpy as np
import optax
import pytest

from decjax import registry
from decjax import topology as topology_lib
from decjax.channel import Channel
from tests.heterogeneous import MODES, X0, N, P, Path, assert_follows, error, gradients

RATE, STEPS = 0.1, 30
STATIC, MOVING = "ring", "one_peer_exponential"
pytestmark = pytest.mark.usefixtures("quick_compilation")


# -- Dense references -------------------------------------------------------------------------------------------------


def dsgd(W, rate=RATE):
    x = np.tile(X0, (N, 1))
    for t in itertools.count():
        x = W(t) @ (x - rate * gradients(x))
        yield x


def dmsgd(W, rate=RATE, beta=0.9):
    x, m = np.tile(X0, (N, 1)), np.zeros((N, P))
    for t in itertools.count():
        m = beta * m + gradients(x)
        x = W(t) @ (x - rate * m)
        yield x


def qg_dsgdm(W, rate=RATE, beta=0.9, mu=0.9, nesterov=False):
    x, m = np.tile(X0, (N, 1)), np.zeros((N, P))
    for t in itertools.count():
        g = gradients(x)
        d = beta * m + g
        half = x - rate * (g + beta * d if nesterov else d)
        new = W(t) @ half
        m = mu * m + (1 - mu) * (x - new) / rate
        x = new
        yield x


def qg_dadam(W, rate=RATE, b1=0.9, b2=0.99, eps=1e-8):
    x, m_hat, v_hat = np.tile(X0, (N, 1)), np.zeros((N, P)), np.zeros((N, P))
    for t in itertools.count():
        g = gradients(x)
        m, v = b1 * m_hat + (1 - b1) * g, b2 * v_hat + (1 - b2) * g**2
        half = x - rate * (m / (1 - b1 ** (t + 1))) / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps)
        new = W(t) @ half
        d = (x - new) / np.linalg.norm(x - new, axis=1, keepdims=True)
        m_hat, v_hat = b1 * m_hat + (1 - b1) * d, b2 * v_hat + (1 - b2) * d**2
        x = new
        yield x


def decentlam(W, rate=RATE, beta=0.9):
    x, m = np.tile(X0, (N, 1)), np.zeros((N, P))
    for t in itertools.count():
        m = beta * m + (x - W(t) @ (x - rate * gradients(x))) / rate
        x = x - rate * m
        yield x


def exact_diffusion(W, rate=RATE, share=0.5):
    x = psi = np.tile(X0, (N, 1))
    for t in itertools.count():
        before, psi = psi, x - rate * gradients(x)
        x = (share * W(t) + (1 - share) * np.eye(N)) @ (psi + x - before)
        yield x


def d2(W, rate=RATE):
    old, old_g = np.tile(X0, (N, 1)), gradients(np.tile(X0, (N, 1)))
    x = W(0) @ (old - rate * old_g)
    for t in itertools.count(1):
        yield x
        g = gradients(x)
        x, old, old_g = W(t) @ (2 * x - old - rate * (g - old_g)), x, g


def tracking(W, rate=RATE, order="atc", adam=False):
    """One exchange per step, of parameters and of trackers that lag by one step."""
    x, y, old = np.tile(X0, (N, 1)), np.zeros((N, P)), np.zeros((N, P))
    m = v = 0.0
    for t in itertools.count():
        g = gradients(x)
        y = (W(t) @ y if order == "awc" else y) + g - old
        old, d = g, y
        if adam:
            m, v = 0.9 * m + 0.1 * y, 0.99 * v + 0.01 * y**2
            d = m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - 0.99 ** (t + 1))) + 1e-8)
        x = W(t) @ x - rate * d if order == "awc" else W(t) @ (x - rate * d)
        y = y if order == "awc" else W(t) @ y
        yield x


def mc_dsgt(W, rate=RATE, rounds=1):
    """h ← W…W (h + g − g₋), with h = g at first;  x ← W…W (x − ηh), with the R matrices of the step."""
    x, h, old = np.tile(X0, (N, 1)), np.zeros((N, P)), np.zeros((N, P))
    several = lambda t, x: functools.reduce(lambda x, r: W(t * rounds + r) @ x, range(rounds), x)
    for t in itertools.count():
        g = gradients(x)
        h = g if t == 0 else several(t, h + g - old)
        x, old = several(t, x - rate * h), g
        yield x


def gt_nsgdm(W, rate=RATE, beta=0.9):
    """Like MC-DSGT with one round, with momenta and steps of equal length."""
    x, y, v = np.tile(X0, (N, 1)), np.zeros((N, P)), np.zeros((N, P))
    for t in itertools.count():
        v, old = beta * v + (1 - beta) * gradients(x), v
        y = v if t == 0 else W(t) @ (y + v - old)
        x = W(t) @ (x - rate * y / np.linalg.norm(y, axis=1, keepdims=True))
        yield x


def relay(W, rate=RATE):
    """RelaySGD on a static tree, message by message."""
    tree = (W(0) != 0) & ~np.eye(N, dtype=bool)
    edges = [(int(i), int(j)) for i, j in np.argwhere(tree)]
    x, sums, counts = np.tile(X0, (N, 1)), dict.fromkeys(edges, np.zeros(P)), dict.fromkeys(edges, 0)
    for _ in itertools.count():
        half = x - rate * gradients(x)
        others = {(i, j): [(k, to) for k, to in edges if to == i and k != j] for i, j in edges}
        sums = {edge: half[edge[0]] + sum(sums[other] for other in others[edge]) for edge in edges}
        counts = {edge: 1 + sum(counts[other] for other in others[edge]) for edge in edges}
        into = [[edge for edge in edges if edge[1] == i] for i in range(N)]
        missing = [N - sum(counts[edge] for edge in into[i]) for i in range(N)]
        x = np.stack([(sum(sums[edge] for edge in into[i]) + missing[i] * half[i]) / N for i in range(N)])
        yield x


class Direction:
    """Return the direction of SGD, momentum or Adam after as many calls."""

    def __init__(self, momentum=0.0, adam=False):
        self.momentum, self.adam, self.t, self.m, self.v = momentum, adam, 0, 0.0, 0.0

    def __call__(self, g):
        self.t += 1
        if not self.adam:
            self.m = self.momentum * self.m + g
            return self.m
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.99 * self.v + 0.01 * g**2
        return self.m / (1 - 0.9**self.t) / (np.sqrt(self.v / (1 - 0.99**self.t)) + 1e-8)


def sgp(W, rate=RATE, **optimizer):
    x, y, d = np.tile(X0, (N, 1)), np.ones((N, 1)), Direction(**optimizer)
    for t in itertools.count():
        half = x - rate * d(gradients(x / y))
        x, y = W(t) @ half, W(t) @ y
        yield x / y


def osgp(W, rate=RATE, **optimizer):
    """A worker keeps its own share immediately; what it sends arrives in the next step."""
    x, y, d = np.tile(X0, (N, 1)), np.ones((N, 1)), Direction(**optimizer)
    flying, flying_y = np.zeros((N, P)), np.zeros((N, 1))
    for t in itertools.count():
        half, own = x - rate * d(gradients(x / y)), np.diag(np.diag(W(t)))
        x, new_y = own @ half + flying, own @ y + flying_y
        flying, flying_y = (W(t) - own) @ half, (W(t) - own) @ y
        y = new_y
        assert np.isclose(y.sum() + flying_y.sum(), N)
        yield x / y


# -- The methods, by a config's names ---------------------------------------------------------------------------------

REFERENCES = {
    "DSGD": (dsgd, "decentralized", dict(order="atc")),
    "DmSGD": (dmsgd, "decentralized", dict(order="atc", inner="sgdm")),
    "QG-DSGDm": (qg_dsgdm, "qg_dsgdm", {}),
    "QG-DSGDm-N": (functools.partial(qg_dsgdm, mu=0.8, nesterov=True), "qg_dsgdm", dict(quasi_momentum=0.8, nesterov=True)),
    "QG-DAdam": (qg_dadam, "qg_dadam", {}),
    "DecentLaM": (decentlam, "decentlam", {}),
    "exact diffusion": (exact_diffusion, "exact_diffusion", {}),
    "D2": (d2, "d2", {}),
    "GT": (tracking, "tracking", dict(order="atc")),
    "GT, awc": (functools.partial(tracking, order="awc"), "tracking", dict(order="awc")),
    "GT-Adam": (functools.partial(tracking, adam=True), "tracking", dict(order="atc", inner="adam(b2=0.99)")),
    "GT-NSGDm": (gt_nsgdm, "gt_nsgdm", {}),
    "MC-DSGT": (functools.partial(mc_dsgt, rounds=2), "mc_dsgt", dict(mixer="exact(rounds=2)")),
    "MC-DSGT, R = 1": (mc_dsgt, "mc_dsgt", dict(mixer="exact")),
    "RelaySGD": (relay, "decentralized", dict(order="atc", mixer="relay")),
}
OPTIMIZERS = {"SGD": {}, "momentum": dict(momentum=0.9), "Adam": dict(adam=True)}
NAMES = {"SGD": "sgdm(momentum=0.0)", "momentum": "sgdm", "Adam": "adam(b2=0.99)"}
for optimizer, given in OPTIMIZERS.items():
    of = dict(inner=NAMES[optimizer])
    REFERENCES[f"SGP, {optimizer}"] = functools.partial(sgp, **given), "decentralized", of | dict(order="atc", mixer="push_sum")
    REFERENCES[f"OSGP, {optimizer}"] = functools.partial(osgp, **given), "decentralized", of | dict(mixer="overlap_push_sum")
STATIC_ONLY = ("exact diffusion", "D2", "RelaySGD")
# A ring of 8 has the eigenvalue -1/3.
GRAPH = {name: "random_digraph" if "SGP" in name else "ring" for name in REFERENCES} | dict.fromkeys(("D2", "RelaySGD"), "line")


def made(name, graph="ring", rate: Any = RATE, inner="sgdm(momentum=0.0)", mixer="exact", **options):
    """`channel -> Method` of a registered method, with a constant learning rate unless `rate` is a function."""

    def make(channel):
        schedule = rate if callable(rate) else optax.constant_schedule(rate)
        context = dict(num_workers=N, learning_rate=schedule, clip=optax.identity())
        context["inner"] = registry.make("optimizer", inner, learning_rate=schedule)
        context["mixer"] = registry.make("mixer", mixer, topology_lib.make(graph, N), channel)
        return registry.make("method", name, **context, **options)

    return make


@functools.cache
def path(name, graph="", mode="simulated", steps=STEPS, rate=RATE):
    _, method, options = REFERENCES[name]
    return Path(made(method, graph or GRAPH[name], rate, **options), steps, mode)


@pytest.mark.parametrize("name", REFERENCES)
def test_the_path_is_that_of_the_paper(name):
    """On simulated workers and on devices."""
    reference = REFERENCES[name][0]
    simulated, mapped = (path(name, mode=mode) for mode in MODES)
    assert_follows(simulated, reference(topology_lib.make(GRAPH[name], N).matrix))
    np.testing.assert_allclose(mapped.x, simulated.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name not in STATIC_ONLY])
@pytest.mark.parametrize("graph", ["one_peer_exponential"])
def test_the_path_on_a_time_varying_graph_is_that_of_the_paper(name, graph):
    assert_follows(path(name, graph), REFERENCES[name][0](topology_lib.make(graph, N).matrix))


@pytest.mark.parametrize("name", REFERENCES)
def test_declared_bytes_are_those_of_the_compiled_program(name):
    sent_N, declared_N = path(name, mode="devices").sent_and_declared()
    np.testing.assert_allclose(sent_N, declared_N, rtol=1e-12)
    assert (sent_N > 0).all()


@pytest.mark.parametrize("graph", ["star", "binary_tree"])
def test_relay_on_other_trees_is_that_of_the_paper_and_exact(graph):
    found = Path(made("decentralized", graph, order="atc", mixer="relay"), 1000)
    assert error(found.x[-1]) < 1e-20
    found.x = found.x[: STEPS + 1]
    assert_follows(found, relay(topology_lib.make(graph, N).matrix))


@pytest.mark.parametrize("graph", ["double_binary_tree", "torus", "one_peer_ring"])
def test_relay_finds_trees_in_any_graph(graph):
    """Two trees with half of the parameters each; a shortest-path tree; a tree in the edges of all rounds."""
    found = Path(made("decentralized", graph, order="atc", mixer="relay"), 1000, "devices")
    assert error(found.x[-1]) < 1e-20
    sent_N, declared_N = found.sent_and_declared()
    np.testing.assert_allclose(sent_N, declared_N, rtol=1e-12)
    messages = 2 * 7 * 8 * (2 * 3 if graph == "double_binary_tree" else P)  # two trees of halves, padded to 3 values
    assert sent_N.sum() == messages


# -- What they reach, and their limits --------------------------------------------------------------------------------


def floor(name, rate, graph="", steps=2000):
    """Return the final mean squared distance from the optimum."""
    return error(path(name, graph, steps=steps, rate=rate).x[-1])


def test_momentum_amplifies_the_bias_of_different_data_and_corrections_restore_it():
    """On the ring: the bias of DSGD is of order η²; that of DmSGD, η/(1−β); that of DecentLaM and QG-DSGDm, η."""
    large, small = floor("DSGD", 0.1), floor("DSGD", 0.01)
    assert large > 1 and 30 * small < large
    assert floor("DmSGD", 0.01) == pytest.approx(large, rel=1e-6)
    assert floor("DecentLaM", 0.01) == pytest.approx(small, rel=1e-6)
    assert floor("QG-DSGDm", 0.01) == pytest.approx(small, rel=1e-6)
    assert floor("QG-DSGDm-N", 0.01) < 0.1 * large


@pytest.mark.parametrize("name", ["exact diffusion", "D2", "GT", "GT, awc", "MC-DSGT", "MC-DSGT, R = 1", "RelaySGD"])
def test_corrections_without_bias_are_exact(name):
    assert floor(name, 0.1) < 1e-20


@pytest.mark.parametrize("graph", ["one_peer_exponential", "one_peer_ring"])
@pytest.mark.parametrize("name", ["GT", "GT, awc", "MC-DSGT, R = 1"])
def test_tracking_is_exact_on_time_varying_graphs(name, graph):
    """Also where neither a single round nor two rounds one apart connect all workers."""
    assert floor(name, 0.05, graph, steps=3000) < 1e-20


@pytest.mark.parametrize("graph", ["equitopo_ou", "equitopo_od", "base_k(k=2)", "alternating_exponential_ring(local_size=2)"])
@pytest.mark.parametrize("order", ["atc", "awc"])
def test_tracking_is_that_of_the_paper_and_exact_on_the_graphs_of_other_papers(order, graph):
    found = Path(made("tracking", graph, rate=0.05, order=order), 2000)
    assert error(found.x[-1]) < 1e-20
    found.x = found.x[: STEPS + 1]
    assert_follows(found, tracking(topology_lib.make(graph, N).matrix, rate=0.05, order=order))


def test_several_rounds_are_exact_where_the_centre_of_a_sun_moves():
    """On the graphs of the lower bound, where accelerated rounds are refused."""
    graph = "sun(rounds=2)"
    found = Path(made("mc_dsgt", graph, mixer="exact(rounds=2)"), 400)
    assert error(found.x[-1]) < 1e-20
    found.x = found.x[: STEPS + 1]
    assert_follows(found, mc_dsgt(topology_lib.make(graph, N).matrix, rounds=2))


def test_normalized_tracking_is_exact_with_steps_that_shrink():
    assert floor("GT-NSGDm", lambda t: 0.3 / (1 + 0.1 * t), steps=4000) < 1e-6 < floor("GT-NSGDm", 0.1)


@pytest.mark.parametrize("name", ["qg_dsgdm", "decentlam"])
def test_without_momentum_they_are_dsgd(name):
    for graph in ("ring", "one_peer_exponential"):
        found = Path(made(name, graph, momentum=0.0), STEPS)
        np.testing.assert_allclose(found.x, path("DSGD", graph).x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["D2", "GT", "MC-DSGT"])
def test_on_the_complete_graph_they_are_all_reduce(name):
    x = path(name, "complete").x
    expected = X0
    for x_NxP in x[1:]:
        expected = expected - RATE * gradients(np.tile(expected, (N, 1))).mean(axis=0)
        np.testing.assert_allclose(x_NxP, np.tile(expected, (N, 1)), rtol=0, atol=1e-12)


def test_on_the_complete_graph_momenta_are_those_of_all_reduce():
    """There, QG-DSGDm with μ = 0 is heavy ball, and so is DecentLaM from the second step on."""
    quasi_global = Path(made("qg_dsgdm", "complete", quasi_momentum=0.0), STEPS).x
    x, before = X0, X0
    for x_NxP in quasi_global[1:]:
        x, before = x - RATE * gradients(np.tile(x, (N, 1))).mean(axis=0) + 0.9 * (x - before), x
        np.testing.assert_allclose(x_NxP, np.tile(x, (N, 1)), rtol=0, atol=1e-11)
    np.testing.assert_allclose(path("DecentLaM", "complete").x, quasi_global, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["qg_dsgdm", "decentlam"])
def test_a_rate_of_zero_changes_nothing_and_is_survived(name):
    """As in the first step of a warm-up."""
    found = Path(made(name, rate=lambda t: RATE * (t > 0)), STEPS)
    np.testing.assert_allclose(found.x[1], found.x[0], rtol=0, atol=1e-15)
    np.testing.assert_allclose(found.x[2:], path(name_of(name)).x[1:-1], rtol=0, atol=1e-12)


def name_of(method):
    return {"qg_dsgdm": "QG-DSGDm", "decentlam": "DecentLaM"}[method]


def test_quasi_global_momentum_may_exchange_while_the_gradient_is_taken():
    """Order "awc": x⁺ = W x − η (β m̂ + g)."""
    W, x, m = topology_lib.make("one_peer_exponential", N).matrix, np.tile(X0, (N, 1)), np.zeros((N, P))
    found = Path(made("qg_dsgdm", "one_peer_exponential", order="awc"), STEPS)
    for t, x_NxP in enumerate(found.x[1:]):
        new = W(t) @ x - RATE * (0.9 * m + gradients(x))
        m, x = 0.9 * m + 0.1 * (x - new) / RATE, new
        np.testing.assert_allclose(x_NxP, x, rtol=0, atol=1e-11)


# -- What fits together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, graph, options, complaint",
    [
        ("exact_diffusion", "one_peer_exponential", {}, "needs a static graph, got mixer 'exact'; use topology 'ring'"),
        ("exact_diffusion", "exponential", {}, "needs a symmetric graph"),
        ("exact_diffusion", "ring", dict(mixer="choco"), "needs mixing that is linear.*use mixer 'exact'"),
        ("exact_diffusion", "ring", dict(mixer="exact(codec=int8)"), "needs mixing that is linear"),
        ("d2", "ring", {}, "more than -1/3, got least_eigenvalue '-0.333.*; use .* method 'exact_diffusion'"),
        ("d2", "hypercube", {}, "got least_eigenvalue '-0.5"),
        (
            "exact_diffusion",
            "ring",
            dict(mixer="overlap_push_sum"),
            "needs mixing that is linear.*use mixer 'exact' without a codec",
        ),
        ("exact_diffusion", "ring", dict(mixer="power_gossip"), "needs mixing that is linear"),
        ("decentlam", "ring", dict(mixer="push_sum"), "need not see every step.* use mixer 'exact' or 'choco'"),
        (
            "decentlam",
            "ring",
            dict(mixer="overlap_push_sum"),
            "needs a mixer that can mix after the step, got mixer .*; use mixer 'exact'",
        ),
        ("gt_nsgdm", "ring", dict(mixer="dcd(codec=int8)"), "need not see every step"),
        ("mc_dsgt", "ring", dict(mixer="push_sum"), "need not see every step"),
        ("mc_dsgt", "ring", dict(mixer="consensus_control"), "known beforehand, got mixer 'consensus_control'; use mixer 'exact'"),
        ("mc_dsgt", "line", dict(mixer="relay"), "a mixer of this step's parameters.* use mixer 'exact' or 'choco'"),
        ("tracking", "line", dict(order="atc", mixer="relay"), "also mixes trackers.* use mixer 'exact' or 'beer'"),
        ("tracking", "ring", dict(order="atc", mixer="overlap_push_sum"), "also mixes trackers"),
        ("decentralized", "line", dict(order="awc", mixer="relay"), "order 'awc': mixer 'relay' is made for order 'atc'; use that"),
        (
            "decentralized",
            "exponential",
            dict(order="atc", mixer="relay"),
            "an undirected graph, .* got topology 'exponential'; use 'line'",
        ),
        ("decentralized", "hierarchical", dict(order="atc", mixer="relay"), "single workers as nodes, got topology 'hierarchical'"),
        ("decentralized", "ring", dict(order="atc", mixer="overlap_push_sum"), "made for order 'awc'"),
        ("decentralized", "hierarchical", dict(mixer="overlap_push_sum"), "single workers as nodes, got topology 'hierarchical'"),
        ("decentlam", "line", dict(mixer="relay"), "a mixer of this step's parameters, got mixer .*; use mixer 'exact'"),
        ("decentlam", "ring", dict(mixer="delayed"), "a mixer of this step's parameters, got mixer .*; use mixer 'exact'"),
        (
            "decentralized",
            "ring",
            dict(mixer="delayed(draw=sometimes)"),
            "draw='sometimes' is unknown; use one of constant, uniform, geo",
        ),
        ("mc_dsgt", "sun", dict(mixer="accelerated"), "mixer 'accelerated' needs a static graph, got topology 'sun'"),
        ("qg_dsgdm", "ring", dict(order="sync"), "order.'sync' is unknown; use one of awc, atc"),
    ],
)
def test_what_does_not_fit_is_refused(name, graph, options, complaint):
    with pytest.raises(ValueError, match=complaint) as refusal:
        made(name, graph, **options)(Channel())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["exact_diffusion", "d2"])
def test_mixing_that_is_linear_may_have_several_rounds(name):
    """On any symmetric graph two rounds have positive eigenvalues; accelerated rounds are a polynomial of W."""
    for mixer in ("exact(rounds=2)", "accelerated(rounds=4)"):
        assert error(Path(made(name, "ring", mixer=mixer), 1000).x[-1]) < 1e-20


@pytest.mark.parametrize("name", ["qg_dsgdm", "qg_dadam", "decentlam", "gt_nsgdm", "mc_dsgt"])
def test_messages_may_be_compressed(name):
    """With CHOCO, the path stays near that of exact gossip."""
    coded, plain = (Path(made(name, mixer=mixer, rate=0.01), 60).x for mixer in ("choco(codec=int8)", "exact"))
    assert 0 < np.abs(coded - plain).max() < 0.05


def test_directed_graphs_by_push_sum():
    """QG-DSGDm follows the parameters z, where gradients are evaluated."""
    found = Path(made("qg_dsgdm", "random_digraph", mixer="push_sum", rate=0.01), 1500).x[-1]
    assert error(found) < 0.2
