"""Bytes that a step sends on each axis, and an estimate of their size after lossless coding.

    python -m experiments.bench.axis_bytes

A language model (configs/lm.py) trains for some steps with two simulated workers; then the messages of one step of one worker are
extracted, as two stages and two devices in a tensor-parallel group would send them:

    dp    gradients, averaged over two workers
    pp    activations and their gradients, between two stages
    tp    the terms of the sums within the layers, of each of the two devices

The bytes follow from formulas that tests compare with compiled programs. The estimate is the sum of the entropies of the four bytes of a
value (`contrib.codecs.entropy.lossless_bits`), the redundancy that a coder such as MPC exploits. It is that of all messages of an axis
together, without the cost of transmitting frequencies. No lossless coder is used in training.
"""

from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from configs import lm
from decjax import codecs, models, reduce, registry, train
from decjax import config as parts
from decjax.contrib.codecs import entropy
from decjax.contrib.tensor_sums import CodedSums, product
from decjax.typing import PyTree
from experiments import script

FLAGS = flags.FLAGS
WORKERS = STAGES = DEVICES = 2


class Messages:
    """The messages of one step of a model, by axis."""

    def __init__(self, model: dict[str, Any], params: PyTree, tokens_BxT1: jax.Array):
        self.found: dict[str, list[np.ndarray]] = {"dp": [], "pp": [], "tp": []}
        made = models.decoder_lm(**model, product=product(self._contract))
        assert made.parts is not None
        nll, _ = made.parts.functions((made.parts.depth // STAGES,) * STAGES, lambda params, x_BxTxD, v: self._passed(x_BxTxD))
        grads = jax.jit(jax.grad(lambda params: nll(params, tokens_BxT1, None).mean()))(params)
        self.found["dp"] += map(np.asarray, jax.tree.leaves(grads))
        jax.effects_barrier()

    def _keep(self, axis: str, x: jax.Array) -> None:
        jax.debug.callback(lambda x: self.found[axis].append(np.asarray(x)), x)

    def _contract(self, x_RxF: jax.Array, kernel_FxG: jax.Array) -> jax.Array:
        terms_KxRxG = jnp.stack([x @ k for x, k in zip(jnp.split(x_RxF, DEVICES, axis=1), jnp.split(kernel_FxG, DEVICES))])
        self._keep("tp", terms_KxRxG)
        return terms_KxRxG.sum(axis=0)

    def _passed(self, x_BxTxD: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def passed(x):
            self._keep("pp", x)
            return x

        def back(kept, g):
            self._keep("pp", g)
            return (g,)

        passed.defvjp(lambda x: (passed(x), None), back)
        return passed(x_BxTxD)

    def lossless(self, axis: str) -> float:
        """Return the estimated bits of a value."""
        return entropy.lossless_bits(np.concatenate([x.ravel() for x in self.found[axis]]))


def sent(codec: codecs.Codec, model: dict[str, Any], rows: int, params: PyTree) -> dict[str, float]:
    """Return the bytes that a worker sends in a step of one microbatch of so many tokens, by axis."""
    width, reducer = model["width"], reduce.mean() if codec.name == "identity" else reduce.coded(codec=codec)
    return {
        "dp": float(reducer.num_bytes(params, WORKERS)[0]),
        "pp": 2.0 * (STAGES - 1) * DEVICES * codec.num_bytes((rows // DEVICES, width), np.float32),
        "tp": 4.0 * model["depth"] * DEVICES * CodedSums(codec=codec).num_bytes((rows, width), DEVICES),
    }


def main() -> None:
    spec = parts.resolve(lm.get_config(f"workers={WORKERS},simulate,method=allreduce,steps={FLAGS.steps},{FLAGS.arg}".strip(",")))
    trainer = train.Trainer(spec)
    state = trainer.init()
    for step in range(spec.steps):
        state, _ = trainer.step(state, trainer.batch(step), step)
    assert spec.model is not None
    model, (params, _) = dict(spec.model.options), trainer.average(state)
    tokens_BxT1 = trainer.batch(spec.steps)[0]
    messages = Messages(model, params, tokens_BxT1)
    names = ("identity", *FLAGS.codecs)
    by_codec = [sent(registry.make("codec", name), model, spec.batch_per_worker * model["context"], params) for name in names]
    table = script.table("axis", *(f"{name}, kB" for name in names), "lossless, estimated kB", "of float32")
    for axis in messages.found:
        bits = messages.lossless(axis)
        table.add_row(
            axis, *(f"{of[axis] / 1e3:.1f}" for of in by_codec), f"{by_codec[0][axis] * bits / 32e3:.1f}", f"{bits / 32:.2f}"
        )
    script.show(table)


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 200, "Steps of training.", lower_bound=1)
    flags.DEFINE_string("arg", "", "Further shorthand of configs/lm.py, such as smoke.")
    flags.DEFINE_list("codecs", ["zfp(rate=16)", "zfp(rate=8)"], "Codecs whose bytes are shown next to those of float32.")
    script.run(main, (train.TrainingError, ValueError))
