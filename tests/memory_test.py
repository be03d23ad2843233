"""Memory of a device: as predicted from a config, as in the compiled program of the step, and as launch.plan prints it."""

import jax
import jax.numpy as jnp
import pytest

from configs import llama, lm
from decjax import costmodel, train
from decjax.program import hlo, jaxpr, liveness
from launch import plan_report
from tests.runs import spec_of, trainer_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZE = {"model.width": 256, "model.heads": 4, "model.depth": 4, "model.context": 256}
DECODER = SIZE | {"model.hidden": 1024}
LLAMA = SIZE | {"model.hidden": 768, "model.vocabulary": 1024, "data.tokenizer": "bytes", "model.kv_heads": 2}
# Batches are so large that activations take several times the memory of the state. Where state dominates, the prediction is up to 22 %
# below the program of a CPU, whose compiler keeps a copy of moments and estimates during the step before it updates them.
RUNS = {
    "all-reduce with remat": (llama, "method=allreduce,workers=2,fsdp=4,batch_size=256", LLAMA | {"model.remat": "full"}),
    "gossip": (lm, "topology=ring,optimizer=adamw,workers=4,fsdp=2,batch_size=64", DECODER),
    "CHOCO": (lm, "topology=ring,mixer=choco,codec=int8,workers=4,fsdp=2,batch_size=64", DECODER),
    "PowerSGD": (lm, "method=allreduce,reducer=powersgd,rank=4,workers=2,fsdp=2,batch_size=32", DECODER),
    "DiLoCo": (lm, "method=diloco,workers=4,batch_size=64", DECODER),
}


def config_of(module, argument, fields):
    made = module.get_config(f"smoke,{argument}")
    made.update_from_flattened_dict(fields)
    return made


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_that_of_the_compiled_program(name):
    trainer = trainer_of(config_of(*RUNS[name]))
    (executable,) = trainer.program(trainer.abstract, trainer.batch(0), 0).executables
    held = executable.memory_analysis()
    assert held is not None
    predicted = train.predict_memory(trainer.spec)
    assert predicted.total == pytest.approx(hlo.device_bytes(executable), rel=0.1)
    assert 0 <= held.argument_size_in_bytes - predicted.state < 0.01 * predicted.state, "the state is exact; the rest is the batch"


# Low-rank factors are those of shards; all stages and devices of a tensor-parallel group hold equally much.
@pytest.mark.parametrize(
    "argument",
    [
        "workers=2,fsdp=4,method=allreduce,reducer=powersgd,rank=2,batch_size=8",
        "workers=4,fsdp=2,topology=ring,mixer=choco,codec=int4",
        "workers=2,stages=2,tensor=2",
        "workers=8,method=onebit_adam",
        "workers=2,fsdp=4,optimizer=muon,batch_size=8",
    ],
)
def test_state_is_that_of_the_trainer(argument):
    trainer = trainer_of(config_of(lm, argument, {"model.width": 64, "model.hidden": 128}))
    bytes_of = lambda x: x.dtype.itemsize * jnp.prod(jnp.array(x.sharding.shard_shape(x.shape)))
    held = {name: sum(map(bytes_of, jax.tree.leaves(part))) for name, part in trainer.abstract._asdict().items()}
    predicted = train.predict_memory(trainer.spec)
    assert predicted.parameters == predicted.gradients == held["params"] and predicted.state == sum(held.values())


def test_memory_does_not_depend_on_simulation():
    argument = "workers=4,fsdp=2,topology=ring"
    assert train.predict_memory(spec_of(config_of(lm, f"{argument},simulate", {}))) == train.predict_memory(
        spec_of(config_of(lm, argument, {}))
    )


A = jnp.zeros((64, 64))
BYTES = 4 * 64 * 64


@pytest.mark.parametrize(
    "fn, arrays",
    [
        (lambda x: jnp.tanh(x + 1) * 2, 1),  # one fused operation
        (lambda x: (x + 1) @ (x - 1), 3),  # a product reads its operands from memory
        (lambda x: jnp.sum(jnp.exp(x) - x), 0),
        (lambda x: (x @ x) @ (x @ x) + 1, 3),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, c), x, length=4), 6),  # stacked results, the carry and the next one
        (lambda x: jax.lax.scan(lambda c, _: (c @ (jnp.zeros_like(x) + 1), None), x, length=4)[0], 3),  # a constant, made once
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x), 3),
        (lambda x: jax.jit(lambda x: x @ x)(x) @ jax.jit(lambda x: x @ x)(x), 3),
    ],
)
def test_liveness(fn, arrays):
    found = liveness.peak_bytes(jaxpr.trace(fn, A).program) / BYTES
    assert found == pytest.approx(arrays, abs=0.01)


def test_what_launch_plan_prints():
    needed = train.DeviceMemory(1e9, 2e9, 0, 1e9, 0, 6e9, 1e9)
    cluster = costmodel.grouped(costmodel.load("configs/clusters/a40_ethernet.json")[0], 2)
    first, *others = plan_report.memory(needed, cluster).splitlines()
    assert first == "Memory per device: 10 GB = parameters 1 GB + optimizer 2 GB + gradients 1 GB + activations 6 GB"
    assert not others
    _, second = plan_report.memory(needed._replace(update=400e9), cluster).splitlines()
    assert second.startswith("A device has 48 GB, 8.42 times too little: use a larger --fsdp")
