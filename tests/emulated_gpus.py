"""A task on a node with emulated GPUs: joins the others like launch.train, and prints the GPUs that JAX would use.

    CUDA_VISIBLE_DEVICES=0,1 SLURM_PROCID=0 … python -m tests.emulated_gpus

There is no other process and no GPU: JAX connects to a stand-in, and has the devices selected by its own options.
"""

import os
from unittest import mock

import jax
from jax._src import distributed, xla_bridge

from launch import command, join


def taken() -> list:
    """The GPUs that JAX would turn into devices, as numbered by CUDA."""
    visible, chosen = os.environ["CUDA_VISIBLE_DEVICES"].split(","), xla_bridge.CUDA_VISIBLE_DEVICES.value
    names = visible if chosen == "all" else [visible[int(index)] for index in chosen.split(",")]
    return [mock.Mock(platform="gpu", gpu=name) for name in names]


def main(argv):
    command.options_only(argv)
    jax.config.update("jax_enable_preemption_service", False)  # it needs a real client
    for name in ("get_distributed_runtime_client", "get_distributed_runtime_service"):
        mock.patch.object(distributed._jax, name).start()
    mock.patch.object(jax, "local_devices", taken).start()
    mock.patch.object(jax, "local_device_count", lambda: len(taken())).start()
    join.set_up_devices(0)
    assert jax.distributed.is_initialized()
    print(*(device.gpu for device in taken()))


if __name__ == "__main__":
    command.run(main)
