"""Model FLOPs utilization (MFU): floating-point operations that the model requires ÷ those that its devices could do meanwhile.

    MFU = F / (L t P)

F are the operations of a worker's step, L its devices, t the time of a step, P the peak of a device. F is three times the operations of all
matrix products and convolutions in the loss, since a backward pass has twice as many as a forward pass. Recomputed ones do not count.
For a decoder this is 6 × parameters × tokens without the embedding, plus attention over all T × T pairs.

Reference: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
"""

import jax

from decjax import config
from decjax.program import jaxpr
from decjax.typing import Device

# Dense bf16 FLOP/s by the beginning of a device's kind without its maker; the first match counts.
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def peak_flops(device: Device) -> float | None:
    """Return the peak FLOP/s of a device in bf16; None if it is unknown, as that of CPUs and of slices of GPUs."""
    kind = device.device_kind.removeprefix("NVIDIA ")
    return None if "MIG" in kind else next((peak for name, peak in PEAKS.items() if kind.startswith(name)), None)


def model_flops(setup: config.Setup) -> float:
    """Return the floating-point operations that the model requires in a step, per device."""
    spec, task, key = setup.spec, setup.task, jax.random.key(0)
    loss = lambda params, batch: task.loss(params, task.variables(), batch, key)
    traced = jaxpr.trace(loss, jax.eval_shape(task.init, key), task.examples(spec.batch_per_worker))
    return 3 * jaxpr.flops(traced.program) * spec.workers / spec.devices
