"""0/1 Adam: 1-bit momenta, a variance that is refreshed ever more rarely, and local steps."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decjax import reduce
from decjax.buckets import in_float32, of_floating
from decjax.optim.memories import communicating, increment, init_memory, transient
from decjax.optim.method import KNOWN_AVERAGES, Reducing, check_update, known_phase
from decjax.options import Count, Decay, NonNegative
from decjax.registry import Requirement
from decjax.typing import PyTree

REFRESH, SYNC = 1, 2  # a phase is their sum minus one, so that a step with neither is `reduce.SILENT`
WARM = Requirement(
    "reducer",
    "a reducer that is exact in the first steps",
    lambda reducer: len(reducer.phases) > 1 and reducer.phases[0] == reduce.BEFORE,
    "give reducer.start of at least 1, or reduce.start_at(…)",
)


@communicating
@transient("reducer")
class ZeroOneAdamState(NamedTuple):
    """State of the method `zero_one_adam`; the trees have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar.
        inner: state of the transformation of the gradient, as clipping.
        mu: m_i.
        nu: v, the same on all workers.
        moved: u_i, the sum of this worker's steps since the last synchronization.
        rates: Σ γ since then, a scalar.
        anchor: x_t', the parameters after it, the same on all workers.
        reducer: state of the reducer.
    """

    step: jax.Array
    inner: PyTree
    mu: PyTree
    nu: PyTree
    moved: PyTree
    rates: jax.Array
    anchor: PyTree
    reducer: PyTree


class ZeroOneAdam(Reducing, name="zero_one_adam"):
    """0/1 Adam: a shared variance, refreshed ever more rarely; 1-bit momenta; and later, local steps between synchronizations.

        v ← β2 v + (1−β2) ḡ²                                    in steps of T_v, ḡ the exact mean gradient
        m_i ← β1 m_i + (1−β1) g_i;   x_i ← x_i − γ m_i / (√v + ε);   u_i ← u_i + γ m_i          in every step
        ū = (1/N) Σ_i C(u_i);   m_i ← ū / Σ_{t'..t} γ;   x_i ← x_t' − ū / (√v + ε);   u_i ← 0     in steps of T_u

    t' is the last step of T_u, and C a codec with error feedback. T_v = {k_j}, k_{j+1} − k_j = 2^⌊j/κ⌋, until step `reducer.start`, from
    which v is frozen. T_u has every step until then; later the steps between two of T_u double from time to time, up to a limit.
    v is the same on all workers, and so is x after each step of T_u.

    A worker sends 2(N−1)/N of a message of one bit per value (and the codec's scales) in each step of T_u, and 2(N−1)/N of the gradient in
    each step of T_v. As in the authors' program, v is refreshed before it is used, ε is outside of the root, and there is no bias
    correction. Unlike there, a coordinate with v = 0 is not updated.

    Attributes:
        learning_rate: γ, by step.
        clip: of each worker's gradient.
        b1: β1, decay of the momentum.
        b2: β2, decay of the variance at each refresh.
        eps: ε.
        weight_decay: λ, decoupled; of the parameters at the start of a block of local steps, once they are synchronized.
        refresh: κ, refreshes of the variance after which the steps between two of them double.
        doubling: steps after which the number of local steps doubles, from step `reducer.start` on.
        local_steps: the most steps from one synchronization to the next, a power of two.

    Reference: Lu et al. 2022, arXiv 2202.06009, algorithm 1, and the policies of its section on T_v and T_u.
    """

    warm = True
    default_reducer = "codec(codec=scaled_sign,form='shards')"
    messages = "momenta, 1 bit a value; gradients, ever more rarely"
    memory = "4 copies"
    requires = (
        WARM,
        KNOWN_AVERAGES,
        Requirement(
            "reducer", "a reducer of one phase after its start", lambda reducer: len(reducer.phases) == 2, "use reducer 'codec'"
        ),
        Requirement("local_steps", "a power of two, since local steps double", lambda most: most & (most - 1) == 0, "use 16"),
    )

    learning_rate: optax.Schedule
    clip: optax.GradientTransformation
    b1: Decay = 0.9
    b2: Decay = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    refresh: Count = 16
    doubling: Count = 100
    local_steps: Count = 16

    def phase(self, step: int) -> int:
        if self.reducer.phase(step) == reduce.BEFORE:
            block = (step // self.refresh + 1).bit_length() - 1  # of κ refreshes with 2^block steps from each to the next
            refreshes = (step - self.refresh * (2**block - 1)) % 2**block == 0
            return SYNC + REFRESH * refreshes - 1
        alone = step - self.start
        return SYNC - 1 if (alone + 1) % min(self.local_steps, 2 ** min(alone // self.doubling, 30)) == 0 else reduce.SILENT

    @functools.cached_property
    def start(self) -> int:
        """The first step with a frozen variance."""
        first, last = 0, 1
        while self.reducer.phase(last) == reduce.BEFORE:
            first, last = last, 2 * last
        while first < last:
            middle = (first + last) // 2
            first, last = (middle + 1, last) if self.reducer.phase(middle) == reduce.BEFORE else (first, middle)
        return first

    def num_bytes(self, params, phase):
        phase = known_phase(phase)
        exact, coded = (self.reducer.num_bytes(params, self.num_workers, own) for own in self.reducer.phases)
        return exact * bool(phase + 1 & REFRESH) + coded * bool(phase + 1 & SYNC)

    def init(self, params):
        mu, nu, moved = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        anchor, memory = jax.tree.map(jnp.copy, params), init_memory(self.reducer.init, params)
        return ZeroOneAdamState(jnp.zeros((), jnp.int32), self.clip.init(params), mu, nu, moved, jnp.zeros(()), anchor, memory)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        check_update(params)
        phase = known_phase(phase)
        grads, inner = self.clip.update(grads, state.inner, params)
        memory, nu = state.reducer, state.nu
        if phase + 1 & REFRESH:
            mean, memory = self.reducer.reduce(grads, memory, self.reducer.phases[0])
            nu = of_floating(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, nu, mean)
        rate = jnp.asarray(self.learning_rate(state.step))
        rates = state.rates + rate
        mu = of_floating(lambda m, g: self.b1 * m + (1 - self.b1) * g, state.mu, grads)
        moved = of_floating(lambda u, m: u + rate * m, state.moved, mu)
        new = state._replace(step=increment(state.step), mu=mu, nu=nu, moved=moved, rates=rates)
        direction = lambda m, v: jnp.where((v > 0) | ~jnp.isfinite(m), m / (jnp.sqrt(v) + self.eps), 0)
        if phase + 1 & SYNC:
            averaged, memory = self.reducer.reduce(moved, memory, self.reducer.phases[1])
            anchor = of_floating(lambda x, u, v: x - self.weight_decay * rates * x - direction(u, v), state.anchor, averaged, nu)
            mu = of_floating(lambda m, u: jnp.where(rates > 0, u / jnp.where(rates > 0, rates, 1), m), mu, averaged)
            nothing = jax.tree.map(jnp.zeros_like, moved)
            new = new._replace(mu=mu, moved=nothing, rates=jnp.zeros_like(rates), anchor=anchor)
            updates = in_float32(jnp.subtract, anchor, params)
        else:
            updates = in_float32(lambda m, v, x: -rate * (direction(m, v) + self.weight_decay * x), mu, nu, params)
        new, old = (whole._replace(inner=(), reducer=()) for whole in (new, state))
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new)]).all()
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        return updates, new._replace(inner=inner, reducer=memory)
