"""Build trainers and runs from configs, as `launch.train` does; and training states of parts that are in no config."""

from collections.abc import Callable
from typing import Any

import jax

from decjax import config as parts
from decjax import mesh, optim, train

_trainers: dict[tuple[str, bool], train.Trainer] = {}  # the most recent ones of `run_of`


def spec_of(config) -> parts.RunSpec:
    return parts.resolve(config, jax.device_count())


def trainer_of(config) -> train.Trainer:
    return train.Trainer(spec_of(config))


def forget() -> None:
    """Release the trainers that `run_of` keeps."""
    _trainers.clear()


def run_of(config, workdir, resume_from=None) -> train.Run:
    """Return a run; if it continues or repeats one of the last few, reuse that trainer with its compiled programs."""
    key = (config.to_json_best_effort(sort_keys=True), jax.config.jax_enable_x64)
    trainer = _trainers.pop(key, None) or trainer_of(config)
    _trainers[key] = trainer
    while len(_trainers) > 3:
        _trainers.pop(next(iter(_trainers)))
    return train.Run(trainer, workdir, resume_from)


def start(
    params: Any, method: optim.Method, workers: mesh.Workers, source_init: Callable[[Any], Any] = lambda params: ()
) -> train.State:
    """Return the initial state from the parameters of one model; leaves are [S, …] with stages."""
    params = workers.stack(params)
    return train.State(params, workers.jit(method.tx.init, (0,))(params), workers.jit(source_init, (0,))(params))


def shapes(make: Callable[[], Any], workers: mesh.Workers) -> Any:
    """Return shapes, dtypes and shardings of the result of `make()`, without its arrays."""
    found = jax.eval_shape(make)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), found, workers.shardings(found)
    )
