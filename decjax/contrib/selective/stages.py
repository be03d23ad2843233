"""How many stages of a pipeline should compress what they send to other workers, decided by the cost model.

Stage 0 finishes its backward passes last. Until then the messages of later stages are hidden, if their links are fast enough. The
first k stages, whose messages would be waited for, compress.
"""

import jax
import jax.numpy as jnp

from decjax import costmodel, reduce, registry
from decjax.channel import Channel
from decjax.config.setup import boundary_codecs, boundary_ratios, make_reducer
from decjax.config.spec import Averaging, RunSpec
from decjax.contrib import layouts
from decjax.errors import ConfigError
from decjax.typing import DType

SIZES = ("depth", "width", "heads", "vocabulary", "context", "hidden", "tied")  # options of a transformer


@registry.register("stages", "auto")
def choose(spec: RunSpec) -> int:
    """The smallest number k ≥ 1 of compressing stages at which compressing more gains nothing, by the cost model.

    Args:
        spec: of a run whose reducer has a `cluster`, the profile of a cluster with `flops`, and compresses in all stages.

    Raises:
        ValueError: if the profile or the model lacks what the cost model needs, or no stage should compress.
    """
    assert spec.reducer is not None and spec.model is not None
    N, size = spec.workers, spec.model.options
    if not spec.averaging.cluster:
        raise ValueError(
            "reducer.stages='auto' needs reducer.cluster, a profile as configs/clusters/optimus_a100.json; "
            "python -m launch.calibrate makes one"
        )
    if missing := [name for name in (*SIZES, "dtype") if name not in size]:
        raise ValueError(
            f"reducer.stages='auto': model {spec.model.name!r} has no option {missing[0]!r}, which the cost model of a "
            "transformer needs; give reducer.stages as a number"
        )
    layout, model = _layout(spec), transformer(spec)
    cluster = costmodel.load(spec.averaging.cluster)[0].resize(layout.num_devices)
    if cluster.flops is None:
        raise ValueError(
            f"cluster {cluster.name!r} has no flops, from which the time of a pass is computed; enter what a device "
            "sustains, or give reducer.stages as a number"
        )
    reducer = make_reducer(spec.reducer, Averaging(), Channel())
    blocks = jax.eval_shape(lambda: spec.setup.start(jax.random.key(0)))["blocks"]
    params = {"blocks": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)}  # of one stage, without tables
    ratio = float(reducer.num_bytes(params, N)[0] / reduce.mean().num_bytes(params, N)[0]) if N > 1 else 1.0
    codec = str(spec.reducer.options.get("codec") or spec.reducer.name).partition("(")[0]
    rows = layout.microbatch_size(model) * size["context"] // layout.tensor
    backward, forward = boundaries(spec, (rows, size["width"]), size["dtype"])
    traffic = layouts.Traffic(
        costmodel.all_reduce(N, ratio=ratio, codec=codec),
        backward=backward,
        forward=forward,
        fused_embedding=spec.pipeline.fused_embedding,
    )
    count, _ = layouts.choose_compressed_stages(cluster, layouts.work(model, layout, cluster.flops), layout, traffic)
    if not count:
        raise ValueError(
            f"reducer.stages='auto': on cluster {cluster.name!r} all-reduce is hidden or cheap enough that no stage "
            f"gains from reducer {spec.reducer.name!r}; use reducer 'mean'"
        )
    return count


def _layout(spec: RunSpec) -> layouts.DeviceLayout:
    return layouts.DeviceLayout(
        workers=spec.workers,
        stages=spec.pipeline.stages,
        tensor=spec.tensor,
        microbatches=spec.pipeline.microbatches,
        schedule=spec.pipeline.schedule,
        chunks=spec.pipeline.chunks,
        layers=spec.pipeline.layer_counts,
        remat=spec.pipeline.remat,
    )


def transformer(spec: RunSpec) -> layouts.Transformer:
    """The run's model and global batch size as the cost model describes a transformer; a ConfigError if it is none."""
    if spec.model is None or not spec.model.options.keys() >= {*SIZES, "dtype"}:
        name = f"model {spec.model.name!r}" if spec.model else f"task {spec.task.name!r}"
        raise ConfigError(f"{name} is no transformer, and layouts are planned for those only; use a config with model 'decoder'")
    size, value_bytes = spec.model.options, jnp.dtype(spec.model.options["dtype"]).itemsize
    return layouts.Transformer(batch_size=spec.batch_size, value_bytes=value_bytes, **{name: size[name] for name in SIZES})


def boundaries(spec: RunSpec, shape: tuple[int, int], dtype: DType) -> tuple[layouts.Boundary, layouts.Boundary]:
    """(gradients, activations): how messages between stages are compressed; the arguments are those of `boundary_ratios`."""
    made = {} if spec.pipeline.autoencoder else boundary_codecs(spec)
    backward, forward = boundary_ratios(spec, shape, dtype)
    name = {kind: codec.name for kind, codec in made.items()}
    # The cost model, too, takes from the schedule which gradients "epilogue" means.
    when = spec.boundary.when if "backward" in made else layouts.ALWAYS
    return layouts.Boundary(backward, name.get("backward", ""), when), layouts.Boundary(forward, name.get("forward", ""))
