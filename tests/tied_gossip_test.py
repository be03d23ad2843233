"""A tied table under coded gossip: the copies on the first and the last stage stay equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import lm
from tests.runs import trainer_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS = 20
TINY = {"model.width": 8, "model.hidden": 8, "model.context": 4, "clip_norm": 0.0}


def gradients(params, step):
    """Synthetic gradients of all stages and workers; those of the two copies of the table are equal, as they are once summed."""
    rng = np.random.default_rng(step)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    return grads | {"table_VxD": np.repeat(grads["table_VxD"][:, :1], 2, axis=1)}


@pytest.mark.parametrize(
    "argument",
    [
        "codec=int8",
        "codec=int4(rounding=stochastic)",
        "mixer=choco,codec=topk(fraction=0.1)",
        "mixer=deepsqueeze,codec=int8",
        "mixer=dcd,codec=int8",
        "mixer=beer,codec=topk(fraction=0.1)",
        "mixer=push_sum,codec=int8",
    ],
)
def test_both_copies_of_a_tied_table_stay_equal(argument):
    """Bit for bit, whatever the other parameters; and different on every worker."""
    config = lm.get_config(f"smoke,simulate,workers=2,stages=2,tied,optimizer=sgdm,{argument}")
    config.update_from_flattened_dict(TINY)
    trainer = trainer_of(config)
    workers, method = trainer.workers, trainer.method
    start = trainer.init()

    def step(params, opt_state, grads):
        updates, opt_state = method.tx.update(grads, opt_state, params, phase=0)
        return optax.apply_updates(params, updates), opt_state

    params, state, step = start.params, start.opt_state, workers.jit(step, (0, 0, 0))
    assert method.phase(0) == method.phase(1) == 0  # two workers: one round
    before = np.asarray(params["table_VxD"])
    for number in range(STEPS):
        params, state = step(params, state, jax.tree.map(jnp.asarray, gradients(params, number)))
    table_NxSxVxD = np.asarray(params["table_VxD"])
    np.testing.assert_array_equal(table_NxSxVxD[:, 0], table_NxSxVxD[:, 1])
    assert np.abs(table_NxSxVxD[0] - table_NxSxVxD[1]).max() > 1e-4 < np.abs(table_NxSxVxD - before).max()
