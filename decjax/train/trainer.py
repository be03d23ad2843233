"""The trainer: takes a run's steps, averages its replicas and evaluates them, without logs or files.

    state = trainer.init()
    for step in range(spec.steps):
        state, loss_N = trainer.step(state, trainer.batch(step), step)

`train.run` is the same loop with a work directory, signals and logs. `train.step` is the step, which `train.engine` compiles.
"""

from collections.abc import Callable, Mapping, Sequence
import functools

import jax
import numpy as np

from decjax import config, gossip, mesh, options, reduce, tasks
from decjax.errors import TrainingError, config_errors
from decjax.program import hlo
from decjax.train import engine, evaluate, utilization
from decjax.train import state as state_lib
from decjax.train.state import State
from decjax.train.step import Step
from decjax.typing import Device, Jitted, PyTree


@options.checked_class
class Trainer:
    """Takes the steps of a run, and averages and evaluates its replicas.

    Args:
        spec: the run, from `config.resolve`, or its parts on devices, from `config.Setup.place`.
        devices: for the workers, unless they are simulated; None: `jax.devices()`.

    Raises:
        ConfigError: if devices, memory or data do not suffice.
    """

    def __init__(self, spec: config.RunSpec | config.Setup, devices: Sequence[Device] | None = None):
        self.setup = setup = spec if isinstance(spec, config.Setup) else spec.setup.place(devices)
        self.spec, self.method = setup.spec, setup.method
        self.step_parts = Step.of(setup, setup.workers)
        with config_errors():
            self.program_of = engine.compile_per_phase(self.step_parts, setup.spec.engine)
        self._between_steps = setup.method.between_steps and setup.method.between_steps(setup.workers)

    @property
    def workers(self) -> mesh.Workers:
        """The workers that it trains."""
        return self.setup.workers

    # -- State --------------------------------------------------------------------------------------------------------

    def init(self) -> State:
        """Return the state before the first step: the same parameters on every worker."""
        key = jax.random.key(self.spec.seed)
        if self.workers.fsdp == 1:
            return self.start(jax.jit(self.setup.start)(key))
        stacked = lambda key: self.setup.stacked(self.setup.start(key))  # The whole model may not fit one device.
        return self._first(jax.jit(stacked, out_shardings=self.workers.shardings(jax.eval_shape(stacked, key)))(key))

    def start(self, params: PyTree) -> State:
        """Return the state before the first step for the parameters of one model; leaves [S, …] with stages."""
        if self.setup.source.divided:
            stacked = self.setup.stacked
            params = jax.jit(stacked, out_shardings=self.workers.shardings(jax.eval_shape(stacked, params)))(params)
        else:
            params = self.workers.stack(params)
        return self._first(params)

    def _first(self, params: PyTree) -> State:
        return State(params, *(init(params) for init in self.inits))

    @functools.cached_property
    def inits(self) -> tuple[Jitted, Jitted]:
        """The programs that make the states of the optimizer and of the gradient source from parameters."""
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
        assert self.setup.data is not None  # `Setup.place` has loaded it.
        return self.setup.data

    # -- Steps --------------------------------------------------------------------------------------------------------

    def batch(self, step: int, left: int = 0) -> PyTree:
        """Return the examples of a step, [N, B, …], shifted by `left` batches of earlier steps that no worker has taken."""
        n = self.workers.num_workers

        def of(worker):
            number = step * n + worker - left
            return self.data.batch(number % n, number // n)

        return self.workers.build(of)

    def step(self, state: State, batch: PyTree, step: int) -> tuple[State, jax.Array]:
        """Return (next state, each worker's loss before it, [N]); the arrays of the given state cannot be used afterwards."""
        return self.take(self.program(state, batch, step), state, batch, step)

    def take(self, program: engine.Program, state: State, batch: PyTree, step: int) -> tuple[State, jax.Array]:
        """Take a step as `step` does, for callers that hold the compiled program."""
        state, loss_N = program.run(state, batch, np.int32(step))
        if self._between_steps:
            state = state._replace(opt_state=self._between_steps(state.opt_state, loss_N, step))
        return state, loss_N

    def program(self, state: State, batch: PyTree, step: int) -> engine.Program:
        """Return the compiled program of a step's phase. Arrays may be `ShapeDtypeStruct`s."""
        return self.program_of(self.method.phase(step), state, batch, np.int32(step))

    def check_exchanges(self) -> None:
        """Send known values between workers and between stages; raise a `TrainingError` if one does not arrive."""
        try:
            if self.setup.topology:
                assert self.method.replica_mixer is not None
                gossip.check_exchange(self.workers.whole, self.setup.topology, self.method.replica_mixer.permutations)
            if self.setup.source.permutations:
                gossip.check_stage_exchange(self.workers, self.setup.source.permutations)
        except RuntimeError as error:
            raise TrainingError(str(error)) from error

    def bytes_by_usage(self, state: State) -> float:
        """Return the bytes that a worker has sent so far and that `Program.sent` lacks, since they depend on the state.

        These are all bytes of methods whose state determines the phase of a step, and those by which messages of divided tables
        exceeded their usual size.
        """
        total = float(self.workers.fetch(self._extra_bytes(state.source)).mean()) if self._extra_bytes else 0.0
        if self.method.usage:
            usage, bytes_P = self._usage
            used = self.workers.fetch(usage(state.opt_state))  # [N, (stages,) P], steps of each phase
            total += float(used.reshape(-1, len(bytes_P)).mean(axis=0) @ bytes_P) * self.workers.stages
        return total

    @functools.cached_property
    def _extra_bytes(self) -> Jitted | None:
        extra = self.setup.source.extra_bytes
        return extra and self.workers.jit(extra, (0,))

    @functools.cached_property
    def _usage(self) -> tuple[Jitted, list[float]]:
        """Return (program that reads `method.usage`, bytes that a device sends in a step of each phase)."""
        assert self.method.usage is not None
        one = self.workers.one_device(self.abstract.params)
        bytes_P = [float(self.method.num_bytes(one, phase).mean()) for phase in self.method.phases]
        return self.workers.jit(self.method.usage, (0,)), bytes_P

    @functools.cached_property
    def model_flops(self) -> float:
        """Floating-point operations that the model requires in a step, per device."""
        return utilization.model_flops(self.setup)

    # -- Averages -----------------------------------------------------------------------------------------------------

    def models(self, state: State) -> tuple[PyTree, PyTree]:
        """Return every worker's whole model as (parameters, variables), leaves [N, …]."""
        return self._join(state.params), self.setup.source.variables(state.source)

    @functools.cached_property
    def _join(self):
        join = self.setup.source.models
        if self.workers.stages == 1 and not self.setup.source.divided:
            return lambda params: params
        return jax.jit(join, out_shardings=self.workers.whole.shardings(jax.eval_shape(join, self.abstract.params)))

    def average(self, state: State) -> tuple[PyTree, PyTree]:
        """Return the averaged model as (parameters, variables), in float32 at least, as `Workers.shared` lays it out."""
        return self._average(state)

    @functools.cached_property
    def _average(self):
        source = self.setup.source

        def average(state):
            params = state_lib.averaged(
                state._replace(params=source.models(state.params)), self.method.replica_mixer, self.workers.num_axes
            )
            return params, state_lib.mean_over_workers(source.variables(state.source))

        return jax.jit(average, out_shardings=self.workers.shared(jax.eval_shape(average, self.abstract)))

    def consensus_distance(self, state: State) -> float:
        """Return the consensus distance of the replicas, Ξ = sqrt( (1/N) Σ_i ‖x_i − x̄‖² )."""
        return float(self._distance(state.params))

    @functools.cached_property
    def _distance(self):
        whole = self.setup.source.models
        return jax.jit(lambda params: state_lib.consensus_distance(whole(params)), out_shardings=self.workers.replicated)

    def consensus(self, state: State) -> tuple[State, float]:
        """Return (state with every replica replaced by the average, bytes that a worker sent for it).

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
        """Return metrics of the averaged model, and with `local` of each worker's, on `limit` validation examples; 0: all."""
        return self._evaluate(limit, local)(self.models(state), self.average(state))

    def measure(self, model: tuple[PyTree, PyTree]) -> Mapping[str, float]:
        """Return metrics of one model, (parameters, variables), on all validation examples, which are divided among the workers."""
        return self._evaluate(0, False)(None, model).averaged

    @functools.cache  # noqa: B019  A trainer usually exists until its process ends.
    def _evaluate(self, limit, local):
        measure, coded, examples = self.setup.task.measure, self.setup.source.coded, self.data.validation(limit)
        return evaluate.make_evaluate(measure, self.workers.whole, examples, self.spec.eval.batch_size, coded, local)
