"""Which accelerator each process of a group on this machine gets."""

from collections.abc import Mapping
import importlib.util
import os
import pathlib

from launch import command

_DEVICES = pathlib.Path("/dev")
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # without one of them JAX uses no NVIDIA GPU
_OF_GPUS = {"cuda", "gpu"}  # how JAX_PLATFORMS names them


def environments(count: int, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Variables for each of `count` processes: process i gets the i-th of the GPUs that are visible here, all run on the CPU if
    there is none. Where the user has set JAX_PLATFORMS, that is left as it is.

    Raises:
        UserError: if there are GPUs, but fewer than processes.
    """
    platforms = {name.strip() for name in environment.get("JAX_PLATFORMS", "").split(",")} - {""}
    found = [] if platforms and not platforms & _OF_GPUS else _gpus(environment)
    if not found:
        return [{} if platforms else {"JAX_PLATFORMS": "cpu"}] * count
    if len(found) < count:
        raise command.UserError(
            f"{count} processes for {len(found)} visible GPU{'s' * (len(found) > 1)}: each process needs one of its own; "
            f"start {len(found)}, or set JAX_PLATFORMS=cpu to run on the CPU"
        )
    return [{"CUDA_VISIBLE_DEVICES": name} for name in found[:count]]


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that JAX can use here, as CUDA_VISIBLE_DEVICES names them."""
    if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return []
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in (part.strip() for part in chosen.split(",")) if name not in ("", "-1")]
    return [str(index) for index in range(count_gpus())]


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, by the files of their driver."""
    return len([*_DEVICES.glob("nvidia[0-9]*")])
