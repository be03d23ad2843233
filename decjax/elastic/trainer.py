"""The trainers of one member of an elastic run: a `train.Trainer` for each number of workers that take part."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

from decjax import config, tasks
from decjax.elastic.programs import MEMBERS
from decjax.elastic.workers import ElasticWorkers, Group
from decjax.errors import ConfigError, refuse
from decjax.train import state as state_lib
from decjax.train.state import State
from decjax.train.trainer import Trainer
from decjax.typing import PyTree

STAND_INS = ("one_peer_exponential", "ring", "complete")  # for topologies that do not exist for the remaining workers
_AHEAD = 64  # steps, within which all phases of a topology occur


class Trainers:
    """The trainers of a run by number of workers, made on first use; `spec` is that of the run with all its workers, one per slot."""

    def __init__(self, spec: config.RunSpec, group: Group):
        refuse((f"{problem}, or leave out --elastic" for problem in _problems(spec)), ConfigError)
        self.spec, self._group = spec, group
        self._data: tasks.Data | None = None
        self._trainers: dict[int, ElasticTrainer] = {}
        self._prepared: set[int] = set()
        self._making = threading.RLock()

    def of(self, n: int) -> "ElasticTrainer":
        """Return the trainer of n workers."""
        with self._making:
            if n not in self._trainers:
                spec = self.spec
                local_size = spec.local_size if n % spec.local_size == 0 else 1
                batch_size = spec.batch_per_worker * n
                fitted = spec.replace(workers=n, batch_size=batch_size, local_size=local_size, elastic=config.Elastic())
                setup, stand_in = _assembled(fitted, n < spec.workers)
                self._data = self._data or setup.task.load(spec.workers, spec.batch_per_worker, spec.seed)
                setup = dataclasses.replace(setup, data=self._data)
                workers = ElasticWorkers(n, local_size, None, group=self._group)
                self._trainers[n] = ElasticTrainer(setup, workers, spec.workers, stand_in)
            return self._trainers[n]

    def compile_all(self) -> None:
        """Compile the steps for all workers and for one less."""
        for n in (self.spec.workers, self.spec.workers - 1):
            if n:
                self._prepared.add(n)
                self._compile(n, 0)

    def prepare(self, n: int, step: int) -> None:
        """Compile the steps of n workers from `step` on in a thread, so that they are ready if workers are lost."""
        if n and n not in self._prepared:
            self._prepared.add(n)
            threading.Thread(target=self._compile, args=(n, step), name="elastic-prepare", daemon=True).start()

    def _compile(self, n: int, step: int) -> None:
        with contextlib.suppress(Exception):  # It is raised again when the steps are used.
            trainer = self.of(n)
            batch = jax.tree.map(lambda x: np.asarray(x)[None], trainer.data.batch(0, step))
            for ahead in range(_AHEAD):
                trainer.program(trainer.abstract, batch, step + ahead)
            for init in trainer.inits:
                init.lower(trainer.abstract.params)


def _problems(spec: config.RunSpec) -> Iterator[str]:
    """Yield why a run cannot be elastic: options that need several workers or devices in a process."""
    if spec.trait("source", "divided"):
        yield "divided tables with --elastic: the tables of a lost worker would be lost, too; use whole ones"
    for name, value in (("fsdp", spec.fsdp), ("tensor", spec.tensor), ("pipeline.stages", spec.pipeline.stages)):
        if value > 1:
            yield f"{name}={value} with --elastic: each worker is a process with one device; use {name}=1"
    if spec.simulate:
        yield "simulate with --elastic: each worker is a process; use simulate=False"


def _assembled(spec: config.RunSpec, may_stand_in: bool) -> tuple[config.Setup, str]:
    """Return (the setup with the first topology that exists for its workers and suits its mixer, `ElasticTrainer.stand_in`)."""
    if spec.workers == 1 and spec.mixer:
        single = spec.replace(mixer=config.Choice("exact", {}))
        return config.Setup.of(single, MEMBERS), f"topology {spec.topology} does not exist for one worker, which trains alone"
    try:
        return config.Setup.of(spec, MEMBERS), ""
    except ValueError:
        for name in STAND_INS if may_stand_in and spec.topology is not None else ():
            with contextlib.suppress(ValueError):
                setup = config.Setup.of(spec.replace(topology=name), MEMBERS)
                return setup, f"topology {spec.topology} does not exist for {spec.workers} workers; using {name}"
        raise


class ElasticTrainer(Trainer):
    """A trainer whose state is the row of this member.

    Args:
        setup: of a run with as many workers as the view, and the data of all slots.
        workers: those of the view.
        slots: the number of slots.
        stand_in: a message if the workers use another topology than the config's, which does not exist for them; otherwise empty.
    """

    def __init__(self, setup: config.Setup, workers: ElasticWorkers, slots: int, stand_in: str = ""):
        self._workers, self.group, self.slots, self.stand_in = workers, workers.group, slots, stand_in
        super().__init__(dataclasses.replace(setup, workers=workers))

    @property
    def workers(self) -> ElasticWorkers:
        return self._workers

    @functools.cached_property
    def abstract(self) -> State:
        started = jax.eval_shape(self.setup.start, jax.random.key(self.spec.seed))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), started)
        opt_state, source = (self.workers.eval_shape(init, (0,), params) for init in (self.method.tx.init, self.setup.source.init))
        return State(params, opt_state, source)

    def batch(self, step: int, left: int = 0) -> PyTree:
        """Return this member's examples of a step, [1, B, …]; see `View.batch_of`."""
        view = self.group.view
        return self.workers.build(lambda worker: self.data.batch(*view.batch_of(worker, step, self.slots)))

    def adopt(self, before: State | None) -> State:
        """Return the state with which this member begins a view, given its previous state; None if it is fresh.

        Fresh members receive parameters and lasting optimizer state from the source; others keep theirs. Mixers and reducers are reset.
        """
        kept = state_lib.kept(self.abstract if before is None else before, self.setup.source.lasts)
        if before is None:
            kept = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), kept)  # replaced by arrays of these shapes
        state = self._completed(self._handed_over(kept))
        memory = jax.tree.leaves(getattr(state.opt_state, "mixer", ()))
        if self.method.replica_mixer and any(x.ndim > 1 for x in memory):  # Mixers with memories need equal models at the start.
            return self.consensus(state)[0]
        return state

    def fitted(self, state: State) -> State:
        """Return a member's state from another number of workers with the arrays of this trainer.

        Mixers and reducers are reset if these differ.
        """
        if jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, self.abstract):
            return state
        return self._completed(state_lib.kept(state, self.setup.source.lasts))

    def _completed(self, kept: PyTree) -> State:
        return state_lib.resumed(kept, self.start(jax.tree.map(lambda x: x[0], kept["params"])))

    def _handed_over(self, kept: PyTree) -> PyTree:
        """Return `kept`, in fresh members that of the source."""
        view, channel = self.group.view, self.group.channel
        if view.source is None:
            return kept
        source = view.worker_of(view.source.slot)
        for target in map(view.worker_of, view.fresh):
            arrived = [channel.hand_over(np.asarray(x), source, target) for x in jax.tree.leaves(kept)]
            if channel.index == target:
                kept = jax.tree.unflatten(jax.tree.structure(kept), list(map(jax.device_put, arrived)))
        return kept

    # -- Averages -----------------------------------------------------------------------------------------------------

    def average(self, state: State) -> tuple[PyTree, PyTree]:
        params, mixer = state.params, self.method.replica_mixer
        if mixer and mixer.weight:
            weight = np.asarray(jax.vmap(mixer.weight)(state.opt_state.mixer))
            total = self.workers.mean(weight)
            params = jax.tree.map(lambda x: x * weight.reshape(-1, *[1] * (x.ndim - 1)) / total, params)
        averaged = self.workers.mean(params)
        return jax.tree.map(jnp.asarray, (averaged, self.workers.mean(self.setup.source.variables(state.source))))

    def consensus_distance(self, state: State) -> float:
        mean = self.workers.mean(state.params)
        squared = sum(
            float(((np.asarray(x)[0] - m) ** 2).sum())
            for x, m in zip(jax.tree.leaves(state.params), jax.tree.leaves(mean), strict=True)
            if np.issubdtype(m.dtype, np.floating)
        )
        return float(np.sqrt(self.workers.mean(np.full((1,), squared, np.float32))))

    @functools.cached_property
    def _consensus(self) -> tuple[Callable[[State], State], float]:
        mixer = self.method.replica_mixer
        restart = self.workers.jit(mixer.restart, (0, 0)) if mixer else None

        def consensus(state: State) -> State:
            return state_lib.replaced(state, self.average(state)[0], restart)

        n, one = self.workers.num_workers, self.workers.one_device(self.abstract.params)
        return consensus, 2 * (n - 1) / n * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one))
