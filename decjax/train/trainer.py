"""The trainer: takes a run's steps, averages its replicas and evaluates them, without logs or files.

    state = trainer.init()
    for step in range(spec.steps):
        state, loss_N = trainer.step(state, trainer.batch(step), step)

`train.run` is the same loop with a work directory, signals and logs. The step itself is `Step.train_step` in `train.step`; how it
is compiled and dispatched is in `train.engine`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from decjax import config, gossip, reduce, tasks
from decjax.errors import ConfigError, TrainingError
from decjax.program import hlo
from decjax.train import engine, evaluate
from decjax.train import state as state_lib
from decjax.train.state import State
from decjax.train.step import Step


class Trainer:
    """Takes the steps of a run, and averages and evaluates its replicas.

    Args:
        spec: the run, from `config.resolve`, or its parts, from `config.build`.
        devices: for the workers, unless they are simulated; None: `jax.devices()`.

    Raises:
        ConfigError: if devices, memory or data do not suffice.
    """

    def __init__(self, spec: config.RunSpec | config.Setup, devices: Sequence[jax.Device] | None = None):  # pyright: ignore[reportInvalidTypeForm]
        self.setup = setup = spec if isinstance(spec, config.Setup) else config.build(spec, devices)
        self.spec, self.workers, self.method = setup.spec, setup.workers, setup.method
        self.step_parts = Step(setup.source.gradient, setup.method, setup.workers, setup.spec.seed)
        try:
            self.program_of = engine.compile_per_phase(self.step_parts, setup.spec.engine)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._between_steps = setup.method.between_steps and setup.method.between_steps(setup.workers)

    # -- State --------------------------------------------------------------------------------------------------------

    def init(self) -> State:
        """The state before the first step: the same parameters on every worker."""
        return self.start(jax.jit(self.setup.start)(jax.random.key(self.spec.seed)))

    def start(self, params: Any) -> State:
        """The state before the first step, from given parameters of one model; leaves [S, …] with stages."""
        if self.setup.source.divided:
            params = jax.jit(self.setup.stacked, out_shardings=self.workers.shardings(jax.eval_shape(self.setup.stacked, params)))(
                params
            )
        else:
            params = self.workers.stack(params)
        return State(params, *(init(params) for init in self._inits))

    @functools.cached_property
    def _inits(self) -> tuple[Callable, Callable]:
        return self.workers.jit(self.method.tx.init, (0,)), self.workers.jit(self.setup.source.init, (0,))

    @functools.cached_property
    def abstract(self) -> State:
        """Shapes, dtypes and shardings of the state, without its arrays."""
        shapes = jax.eval_shape(self.init)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, self.workers.shardings(shapes)
        )

    @property
    def data(self) -> tasks.Data:
        """The data that it trains on."""
        assert self.setup.data is not None  # `config.build` has loaded it.
        return self.setup.data

    # -- Steps --------------------------------------------------------------------------------------------------------

    def batch(self, step: int, left: int = 0) -> Any:
        """The examples of a step, [N, B, …], shifted by `left` batches of earlier steps that no worker has taken."""
        n = self.workers.num_workers

        def of(worker):
            number = step * n + worker - left
            return self.data.batch(number % n, number // n)

        return self.workers.build(of)

    def step(self, state: State, batch: Any, step: int) -> tuple[State, jax.Array]:
        """(next state, every worker's loss before it, [N]); the arrays of the given state cannot be used afterwards."""
        return self.take(self.program(state, batch, step), state, batch, step)

    def take(self, program: engine.Program, state: State, batch: Any, step: int) -> tuple[State, jax.Array]:
        """`step`, for who has its program already."""
        state, loss_N = program.run(state, batch, np.int32(step))
        if self._between_steps:
            state = state._replace(opt_state=self._between_steps(state.opt_state, loss_N, step))
        return state, loss_N

    def program(self, state: State, batch: Any, step: int) -> engine.Program:
        """The compiled program of a step; there is one for each phase. Arrays may be `ShapeDtypeStruct`s."""
        return self.program_of(self.method.phase(step), state, batch, np.int32(step))

    def check_exchanges(self) -> None:
        """Sends known values between workers and between stages, and raises a `TrainingError` if one does not arrive."""
        try:
            if self.setup.topology:
                assert self.method.replica_mixer is not None
                gossip.check_exchange(self.workers.whole, self.setup.topology, self.method.replica_mixer.permutations)
            if self.setup.source.permutations:
                gossip.check_stage_exchange(self.workers, self.setup.source.permutations)
        except RuntimeError as error:
            raise TrainingError(str(error)) from error

    def bytes_by_usage(self, state: State) -> float:
        """Bytes that a worker has sent so far and that `Program.sent` does not hold, since the state decides on them: all of methods
        whose state decides on the phase of a step, and what messages of divided tables had beyond their usual size."""
        return self._bytes_by_phase(state) + (float(self.workers.fetch(self._more(state.source)).mean()) if self._more else 0.0)

    @functools.cached_property
    def _more(self) -> Callable[[Any], jax.Array] | None:
        more = self.setup.source.extra_bytes
        return more and self.workers.jit(more, (0,))

    def _bytes_by_phase(self, state: State) -> float:
        if not self.method.usage:
            return 0.0
        usage, bytes_P = self._usage
        used = self.workers.fetch(usage(state.opt_state))  # [N, (stages,) P], steps of each phase
        return float(used.reshape(-1, len(bytes_P)).mean(axis=0) @ bytes_P) * self.workers.stages

    @functools.cached_property
    def _usage(self) -> tuple[Callable[[Any], jax.Array], list[float]]:
        """(program that reads `method.usage`, bytes that a device sends in a step of each phase)."""
        assert self.method.usage is not None
        one = self.workers.one_device(self.abstract.params)
        bytes_P = [float(self.method.num_bytes(one, phase).mean()) for phase in self.method.phases]
        return self.workers.jit(self.method.usage, (0,)), bytes_P

    # -- Averages -----------------------------------------------------------------------------------------------------

    def models(self, state: State) -> tuple[Any, Any]:
        """Every worker's whole model as (parameters, variables), leaves [N, …]."""
        return self._join(state.params), self.setup.source.variables(state.source)

    @functools.cached_property
    def _join(self):
        join = self.setup.source.models
        if self.workers.stages == 1 and not self.setup.source.divided:
            return lambda params: params
        return jax.jit(join, out_shardings=self.workers.whole.shardings(jax.eval_shape(join, self.abstract.params)))

    def average(self, state: State) -> tuple[Any, Any]:
        """The averaged model as (parameters, variables), in float32 at least, on every device."""
        return self._average(state)

    @functools.cached_property
    def _average(self):
        source = self.setup.source

        def average(state):
            params = state_lib.averaged(
                state._replace(params=source.models(state.params)), self.method.replica_mixer, self.workers.num_axes
            )
            return params, state_lib.mean_over_workers(source.variables(state.source))

        return jax.jit(average, out_shardings=self.workers.replicated)

    def consensus_distance(self, state: State) -> float:
        """The consensus distance of the replicas, Ξ = sqrt( (1/N) Σ_i ‖x_i − x̄‖² )."""
        return float(self._distance(state.params))

    @functools.cached_property
    def _distance(self):
        whole = self.setup.source.models
        return jax.jit(lambda params: state_lib.consensus_distance(whole(params)), out_shardings=self.workers.replicated)

    def consensus(self, state: State) -> tuple[State, float]:
        """(state with every replica replaced by the average, bytes that a worker sent for it).

        The arrays of the given state cannot be used afterwards.
        """
        compiled, num_bytes = self._consensus
        return compiled(state), num_bytes

    @functools.cached_property
    def _consensus(self) -> tuple[Callable[[State], State], float]:
        workers = self.workers
        consensus = functools.partial(state_lib.consensus, mixer=self.method.replica_mixer, workers=workers)
        shardings = workers.shardings(self.abstract)
        compiled = jax.jit(consensus, out_shardings=shardings, donate_argnums=0).lower(self.abstract).compile()
        if workers.simulated:
            one = workers.one_device(self.abstract.params)
            sent_N = workers.stages * reduce.mean().num_bytes(one, workers.num_workers)
        else:
            sent_N = hlo.bytes_by_axis(hlo.text(compiled), workers.sizes)["worker"]
        return compiled, float(sent_N.mean())

    # -- Evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, state: State, limit: int = 0, local: bool = True) -> evaluate.Evaluation:
        """Metrics of the averaged model, and with `local` of every worker's own, on `limit` validation examples; 0: all."""
        return self._evaluate(limit, local)(self.models(state), self.average(state))

    def measure(self, model: tuple[Any, Any]) -> Mapping[str, float]:
        """Metrics of one model, (parameters, variables), on all validation examples, which the workers share out."""
        return self._evaluate(0, False)(None, model).averaged

    @functools.cache  # noqa: B019  A trainer usually exists until its process ends.
    def _evaluate(self, limit, local):
        measure, coded, examples = self.setup.task.measure, self.setup.source.coded, self.data.validation(limit)
        return evaluate.make_evaluate(measure, self.workers.whole, examples, self.spec.eval.batch_size, coded, local)
