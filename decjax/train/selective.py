"""How many stages of a pipeline should compress what they send to other workers, by the cost model.

Stage 0 is done with its backward passes last. What the stages behind it send may travel until then, as long as their links are
fast enough; the first k, whose messages would be waited for, compress.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from decjax import costmodel, models, reduce
from decjax.train import methods

VALUE_BYTES = {"float32": 4, "bfloat16": 2}  # of what is computed


def choose(config: ml_collections.ConfigDict, model: models.Model, stage_params: Any, reducer: reduce.Reducer) -> int:
    """k, the smallest number of stages from which on compressing more would gain nothing.

    Args:
        config: with `reducer.cluster`, a profile of the devices that tells `flops`.
        model: which is trained.
        stage_params: shapes of what one stage sends through the reducer.
        reducer: of the compressed stages.

    Returns:
        k ≥ 1.

    Raises:
        ValueError: in one line, if there is no profile, it does not fit, or no stage should compress.
    """
    given, N = config.reducer, config.workers
    if not given.cluster:
        raise ValueError(
            "reducer.stages='auto' needs reducer.cluster, a profile as configs/clusters/optimus_a100.json; "
            "python -m launch.calibrate makes one"
        )
    layout = costmodel.Layout(
        workers=N,
        stages=config.pipeline.stages,
        tensor=config.tensor,
        microbatches=config.pipeline.microbatches,
        schedule=config.pipeline.schedule,
        chunks=config.pipeline.chunks,
        layers=tuple(int(layers) for layers in config.pipeline.layers.split(",") if layers),
        remat=config.pipeline.remat,
    )
    cluster = costmodel.load(given.cluster)[0].resize(layout.num_devices)
    if cluster.flops is None:
        raise ValueError(
            f"cluster {cluster.name!r} does not tell flops, which the time of a pass follows from; enter what a "
            "device sustains, or give reducer.stages as a number"
        )
    size = config.model
    transformer = costmodel.Transformer(
        size.depth,
        size.width,
        size.heads,
        size.vocabulary,
        model.context,
        config.batch_size,
        hidden=size.hidden,
        tied=size.tied,
        value_bytes=VALUE_BYTES[size.dtype],
    )
    ratio = float(reducer.num_bytes(stage_params, N)[0] / reduce.mean().num_bytes(stage_params, N)[0]) if N > 1 else 1.0
    codec = given.codec.partition("(")[0] or given.name
    rows = layout.microbatch_size(transformer) * model.context // layout.tensor
    backward, forward = boundaries(config, (rows, size.width))
    traffic = costmodel.Traffic(
        costmodel.all_reduce(N, ratio=ratio, codec=codec),
        backward=backward,
        forward=forward,
        fused_embedding=config.pipeline.fused_embedding,
    )
    count, _ = costmodel.choose_compressed_stages(cluster, costmodel.work(transformer, layout, cluster.flops), layout, traffic)
    if not count:
        raise ValueError(
            f"reducer.stages='auto': on cluster {cluster.name!r} all-reduce is hidden or cheap enough that no stage "
            f"gains from reducer {given.name!r}; use reducer 'mean'"
        )
    return count


def boundaries(config: ml_collections.ConfigDict, shape: tuple[int, int]) -> tuple[costmodel.Boundary, costmodel.Boundary]:
    """Of gradients and of activations between stages, how many bytes of those of an I×J message are sent.

    Args:
        config: of the run.
        shape: I×J, the rows of a microbatch that one device sends.
    """
    given, dtype = config.boundary, config.model.dtype
    if narrow := config.pipeline.autoencoder:
        return (costmodel.Boundary(narrow / shape[1]),) * 2
    made = {name: methods.make_codec(given[name]) for name in ("backward", "forward") if given[name]}
    shapes = dict.fromkeys(made, shape)
    if given.reuse_indices:
        message = jax.eval_shape(lambda x: made["forward"].encode(x, (), None), jax.ShapeDtypeStruct(shape, jnp.float32))
        shapes["backward"] = message["where"].shape

    def boundary(name, when):
        if name not in made:
            return costmodel.Boundary()
        ratio = made[name].num_bytes(shapes[name], jnp.float32) / (math.prod(shape) * jnp.dtype(dtype).itemsize)
        return costmodel.Boundary(ratio, made[name].name, when)

    # What an epilogue is, and that of "gpipe" every gradient, both know from the schedule.
    return boundary("backward", given.when), boundary("forward", "always")


def one_stage(stage_shapes: Any) -> Any:
    """Shapes of what goes through the reducer of a stage, from those of all stages: without tables and norm."""
    return {"blocks": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stage_shapes["blocks"])}
