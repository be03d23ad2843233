"""0/1 Adam: Adam whose variance is refreshed ever more rarely, whose momenta travel in one bit, and which goes on alone in between.

With T_v the steps that refresh the variance, T_u those that synchronize, t' the last of T_u, C a codec with error feedback:

    v ← β2 v + (1−β2) ḡ²                                    in steps of T_v, ḡ the exact mean gradient
    m_i ← β1 m_i + (1−β1) g_i;   x_i ← x_i − γ m_i / (√v + ε);   u_i ← u_i + γ m_i          in every step
    ū = (1/N) Σ_i C(u_i);   m_i ← ū / Σ_{t'..t} γ;   x_i ← x_t' − ū / (√v + ε);   u_i ← 0     in steps of T_u

T_v = {k_j}, k_{j+1} − k_j = 2^⌊j/κ⌋, until v is frozen. T_u is every step until then; after it, steps between two of T_u double from
time to time, up to a limit. v is the same on all workers, and x after each step of T_u.

Reference: Lu et al. 2022, arXiv 2202.06009, algorithm 1 and the policies of its section on T_v and T_u. As in the authors' program,
v is refreshed before it is used, ε stands outside of the root, and there is no bias correction. Ours: a coordinate with v = 0 stays.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import reduce, registry
from decjax.buckets import in_float32, of_floating
from decjax.optim.memories import communicating, increment, init_memory, transformation, transient
from decjax.optim.method import OldMethod, check_update, known_phase

REFRESH, SYNC = 1, 2  # what a phase adds up to, minus one, so that a step of neither is `reduce.SILENT`


@communicating
@transient("reducer")
class ZeroOneAdamState(NamedTuple):
    """State of the method `zero_one_adam`; the trees have the shapes of the parameters.

    Attributes:
        step: steps so far, an int32 scalar.
        mu: m_i.
        nu: v, the same on all workers.
        moved: u_i, what this worker's momenta have added up to since the last synchronization.
        rates: Σ γ since then, a scalar.
        anchor: x_t', the parameters after it, the same on all workers.
        reducer: state of the reducer.
    """

    step: jax.Array
    mu: Any
    nu: Any
    moved: Any
    rates: jax.Array
    anchor: Any
    reducer: Any


@registry.register(
    "method",
    "zero_one_adam",
    chooses=("reducer",),
    warm=True,
    default_reducer="codec(codec=scaled_sign,form='shards')",
    messages="momenta, 1 bit a value; gradients, ever more rarely",
    memory="4 copies",
    source="arXiv 2202.06009",
)
def zero_one_adam(
    reducer: reduce.Reducer,
    num_workers: int,
    learning_rate: optax.Schedule,
    clip: optax.GradientTransformation,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    refresh: int = 16,
    doubling: int = 100,
    local_steps: int = 16,
) -> OldMethod:
    """0/1 Adam: a shared variance, refreshed ever more rarely; 1-bit momenta; and later, local steps between synchronizations.

        u_i ← u_i + γ m_i;   at times m_i ← mean C(u_i) / Σγ;   x ← x_t' − mean C(u_i) / (√v + ε)

    A worker sends 2(N−1)/N of a message of one bit a value (times the codec's scales) in each step, later in 1 of up to `local_steps`,
    and before step `reducer.start` in some steps 2(N−1)/N of the gradient. Any data; no graph.

    Args:
        b1: β1 in [0, 1), decay of the momentum.
        b2: β2 in [0, 1), decay of the variance at each refresh.
        eps: ε, added outside of the root.
        weight_decay: λ, decoupled; of the parameters at the start of a block of local steps, once they are synchronized.
        refresh: κ; so many refreshes of the variance, then the steps between two of them double. None from step `reducer.start` on.
        doubling: steps after which the number of local steps doubles, from step `reducer.start` on.
        local_steps: the most steps from one synchronization to the next, a power of two.

    Reference: Lu et al. 2022, arXiv 2202.06009, algorithm 1.
    """
    if len(reducer.phases) != 2 or reducer.phases[0] != reduce.BEFORE or reducer.usage:
        raise ValueError(
            "method 'zero_one_adam' needs steps in which the variance is refreshed, and a reducer of one phase: give reducer.start of at "
            "least 1, and reducer 'codec'"
        )
    for name, value in (("refresh", refresh), ("doubling", doubling)):
        if value < 1:
            raise ValueError(f"method 'zero_one_adam' with {name}={value}: must be at least 1")
    if local_steps < 1 or local_steps & (local_steps - 1):
        raise ValueError(
            f"method 'zero_one_adam' with local_steps={local_steps}: must be a power of two, since local steps double; use 16"
        )
    form = _ZeroOneAdam(reducer, num_workers, learning_rate, (b1, b2, eps, weight_decay), refresh, doubling, local_steps)
    tx = optax.chain(clip, transformation(form.init, form.update, moves=False))
    return OldMethod(tx, form.phase, form.num_bytes)


@dataclasses.dataclass(frozen=True)
class _ZeroOneAdam:
    """The functions of the method."""

    reducer: reduce.Reducer
    num_workers: int
    learning_rate: optax.Schedule
    numbers: tuple[float, float, float, float]  # β1, β2, ε, λ
    refresh: int
    doubling: int
    most: int

    def phase(self, step: int) -> int:
        if self.reducer.phase(step) == reduce.BEFORE:
            block = (step // self.refresh + 1).bit_length() - 1  # of κ refreshes with 2^block steps from each to the next
            refreshes = (step - self.refresh * (2**block - 1)) % 2**block == 0
            return SYNC + REFRESH * refreshes - 1
        alone = step - self.start
        return SYNC - 1 if (alone + 1) % min(self.most, 2 ** min(alone // self.doubling, 30)) == 0 else reduce.SILENT

    @property
    def start(self) -> int:
        """The first step with a frozen variance."""
        first, last = 0, 1
        while self.reducer.phase(last) == reduce.BEFORE:
            first, last = last, 2 * last
        while first < last:
            middle = (first + last) // 2
            first, last = (middle + 1, last) if self.reducer.phase(middle) == reduce.BEFORE else (first, middle)
        return first

    def num_bytes(self, params: Any, phase: int | None) -> np.ndarray:
        assert phase is not None  # It is known beforehand.
        exact, coded = (self.reducer.num_bytes(params, self.num_workers, own) for own in self.reducer.phases)
        return exact * bool(phase + 1 & REFRESH) + coded * bool(phase + 1 & SYNC)

    def init(self, params):
        mu, nu, moved = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        anchor, memory = jax.tree.map(jnp.copy, params), init_memory(self.reducer.init, params)
        return ZeroOneAdamState(jnp.zeros((), jnp.int32), mu, nu, moved, jnp.zeros(()), anchor, memory)

    def update(self, grads, state, params: Any = None, *, phase=None, **extra):
        del extra
        check_update(params)
        phase = known_phase(phase)
        (b1, b2, eps, decay), memory, nu = self.numbers, state.reducer, state.nu
        if phase + 1 & REFRESH:
            mean, memory = self.reducer.reduce(grads, memory, self.reducer.phases[0])
            nu = of_floating(lambda v, g: b2 * v + (1 - b2) * g**2, nu, mean)
        rate: Any = self.learning_rate(state.step)
        rates = state.rates + rate
        mu = of_floating(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        moved = of_floating(lambda u, m: u + rate * m, state.moved, mu)
        new = state._replace(step=increment(state.step), mu=mu, nu=nu, moved=moved, rates=rates)
        direction = lambda m, v: jnp.where((v > 0) | ~jnp.isfinite(m), m / (jnp.sqrt(v) + eps), 0)
        if phase + 1 & SYNC:
            averaged, memory = self.reducer.reduce(moved, memory, self.reducer.phases[1])
            anchor = of_floating(lambda x, u, v: x - decay * rates * x - direction(u, v), state.anchor, averaged, nu)
            mu = of_floating(lambda m, u: jnp.where(rates > 0, u / jnp.where(rates > 0, rates, 1), m), mu, averaged)
            nothing = jax.tree.map(jnp.zeros_like, moved)
            new = new._replace(mu=mu, moved=nothing, rates=jnp.zeros_like(rates), anchor=anchor)
            updates = in_float32(jnp.subtract, anchor, params)
        else:
            updates = in_float32(lambda m, v, x: -rate * (direction(m, v) + decay * x), mu, nu, params)
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new._replace(reducer=()))]).all()
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new._replace(reducer=()), state._replace(reducer=()))
        return updates, new._replace(reducer=memory)
