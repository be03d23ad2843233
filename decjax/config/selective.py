"""How many stages of a pipeline should compress what they send to other workers, by the cost model.

Stage 0 is done with its backward passes last. What the stages behind it send may travel until then, as long as their links are
fast enough; the first k, whose messages would be waited for, compress.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from decjax import costmodel, reduce, registry
from decjax.channel import Channel
from decjax.config.assemble import Setup, make_reducer
from decjax.config.spec import RunSpec

VALUE_BYTES = {"float32": 4, "bfloat16": 2}  # of what is computed
SIZES = ("depth", "width", "heads", "vocabulary", "context", "hidden", "tied", "dtype")  # of a transformer


def choose(spec: RunSpec, setup: Setup) -> int:
    """k, the smallest number of stages from which on compressing more would gain nothing.

    Args:
        spec: whose reducer has a `cluster`, a profile of the devices that tells `flops`.
        setup: of the spec, with compression in all stages.

    Returns:
        k ≥ 1.

    Raises:
        ValueError: in one line, if there is no profile, it does not fit, or no stage should compress.
    """
    assert spec.averaging is not None and spec.model is not None
    given, N, size = spec.averaging, spec.workers, spec.model.options
    if not given.cluster:
        raise ValueError(
            "reducer.stages='auto' needs reducer.cluster, a profile as configs/clusters/optimus_a100.json; "
            "python -m launch.calibrate makes one"
        )
    if missing := [name for name in SIZES if name not in size]:
        raise ValueError(
            f"reducer.stages='auto': model {spec.model.name!r} does not tell {missing[0]}, which the cost model of a "
            "transformer needs; give reducer.stages as a number"
        )
    layout, transformer = _layout(spec), _transformer(spec)
    cluster = costmodel.load(given.cluster)[0].resize(layout.num_devices)
    if cluster.flops is None:
        raise ValueError(
            f"cluster {cluster.name!r} does not tell flops, which the time of a pass follows from; enter what a "
            "device sustains, or give reducer.stages as a number"
        )
    reducer = make_reducer(given._replace(start=0, stages=""), Channel(setup.workers.axis))
    params = _one_stage(jax.eval_shape(lambda: setup.start(jax.random.key(0))))
    ratio = float(reducer.num_bytes(params, N)[0] / reduce.mean().num_bytes(params, N)[0]) if N > 1 else 1.0
    codec = str(given.reducer.options.get("codec") or given.reducer.name).partition("(")[0]
    rows = layout.microbatch_size(transformer) * size["context"] // layout.tensor
    backward, forward = boundaries(spec, (rows, size["width"]), size["dtype"])
    traffic = costmodel.Traffic(
        costmodel.all_reduce(N, ratio=ratio, codec=codec),
        backward=backward,
        forward=forward,
        fused_embedding=spec.pipeline.fused_embedding,
    )
    count, _ = costmodel.choose_compressed_stages(cluster, costmodel.work(transformer, layout, cluster.flops), layout, traffic)
    if not count:
        raise ValueError(
            f"reducer.stages='auto': on cluster {cluster.name!r} all-reduce is hidden or cheap enough that no stage "
            f"gains from reducer {given.reducer.name!r}; use reducer 'mean'"
        )
    return count


def _layout(spec: RunSpec) -> costmodel.Layout:
    return costmodel.Layout(
        workers=spec.workers,
        stages=spec.pipeline.stages,
        tensor=spec.tensor,
        microbatches=spec.pipeline.microbatches,
        schedule=spec.pipeline.schedule,
        chunks=spec.pipeline.chunks,
        layers=tuple(int(layers) for layers in spec.pipeline.layers.split(",") if layers),
        remat=spec.pipeline.remat,
    )


def _transformer(spec: RunSpec) -> costmodel.Transformer:
    assert spec.model is not None
    size = spec.model.options
    return costmodel.Transformer(
        size["depth"],
        size["width"],
        size["heads"],
        size["vocabulary"],
        size["context"],
        spec.batch_size,
        hidden=size["hidden"],
        tied=size["tied"],
        value_bytes=VALUE_BYTES[size["dtype"]],
    )


def check_boundary(spec: RunSpec, setup: Setup) -> None:
    """Refuses messages between stages that a codec makes larger."""
    if not spec.boundary:
        return
    tokens = setup.task.examples(spec.each // spec.pipeline.microbatches)
    assert setup.source.division is not None  # Who has a boundary has stages.
    activation = setup.source.division.activation(tokens.shape[0], tokens.shape[1] - 1)
    B, T, D = activation.shape
    for name, message in zip(("backward", "forward"), boundaries(spec, (B * T // spec.tensor, D), activation.dtype), strict=True):
        if message.ratio > 1:
            raise ValueError(
                f"boundary.{name}={spec.boundary[name]!r} makes messages of {message.ratio:.3g} times the bytes of "
                f"{activation.dtype} values as they are; use a lower rank, fewer bits or values, or leave it empty"
            )


def boundaries(spec: RunSpec, shape: tuple[int, int], dtype: Any) -> tuple[costmodel.Boundary, costmodel.Boundary]:
    """Of gradients and of activations between stages, how many bytes of those of an I×J message are sent.

    Args:
        spec: of the run.
        shape: I×J, the rows of a microbatch that one device sends.
        dtype: of activations.
    """
    given = spec.boundary or {}
    if narrow := spec.pipeline.autoencoder:
        message = costmodel.Boundary(narrow / shape[1])
        return message, message
    made = {name: registry.make("codec", given[name]) for name in ("backward", "forward") if given.get(name)}
    shapes = dict.fromkeys(made, shape)
    if given.get("reuse_indices"):
        message = jax.eval_shape(lambda x: made["forward"].encode(x, (), None), jax.ShapeDtypeStruct(shape, jnp.float32))
        shapes["backward"] = message["where"].shape

    def boundary(name, when):
        if name not in made:
            return costmodel.Boundary()
        ratio = made[name].num_bytes(shapes[name], jnp.float32) / (math.prod(shape) * jnp.dtype(dtype).itemsize)
        return costmodel.Boundary(ratio, made[name].name, when)

    # What an epilogue is, and that of "gpipe" every gradient, both know from the schedule.
    backward = given.get("when", "epilogue")
    return boundary("backward", backward), boundary("forward", "always")


def _one_stage(stage_shapes: Any) -> Any:
    """Shapes of what goes through the reducer of a stage, from those of all stages: without tables and norm."""
    return {"blocks": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stage_shapes["blocks"])}
