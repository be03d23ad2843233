"""PyTorch's DDP, decent-dp or torchft on the data, schedule and evaluations of a run of decjax; a process of experiments.race_peers.

Needs requirements-peers.txt and not decjax. `--workdir` holds config.json; data.npz: train [S, N, B, T + 1] and valid
[W, T + 1], bytes; and start.npz, the initial parameters. Writes metrics.jsonl and summary.json with the fields that
experiments.race_peers reads. Clipping differs: DDP clips the averaged gradient, decent-dp that of each bucket, others that of each worker.
"""
# pyright: reportMissingImports=false

import argparse
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from experiments.bench.cluster.torch_worker import DecoderLM, join, outer_steps


def learning_rate(step: int, schedule: dict[str, Any], steps: int) -> float:
    """Return the learning rate of `decjax.optim.optimizers.cosine`: linear warm-up, then a cosine."""
    warmup, peak, final = schedule["warmup_steps"], schedule["learning_rate"], schedule["final_fraction"]
    if step < warmup:
        return peak * step / warmup
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


@torch.no_grad()
def start(model: DecoderLM, given: Mapping[str, np.ndarray]) -> None:
    """Set the parameters to those of `decjax.models.decoder`, by path: layers are stacked, kernels [in, out], qkv [in, H, 3, K]."""

    def set_to(parameter: nn.Parameter, values: np.ndarray) -> None:
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    set_to(model.embedding.weight, given["embedding/embedding"])
    set_to(model.norm.weight, given["norm/scale"])
    set_to(model.head.weight, given["head/kernel"].T)
    for layer, block in enumerate(model.blocks):
        own = {name.removeprefix("blocks/"): values[layer] for name, values in given.items() if name.startswith("blocks/")}
        D, K = block.qkv.in_features, len(own["attention/key_norm/scale"])
        set_to(block.qkv.weight, own["attention/qkv/kernel"].reshape(D, -1, 3, K).transpose(2, 1, 3, 0).reshape(3 * D, D))
        for name in ("up", "down"):
            set_to(getattr(block, name).weight, own[f"{name}/kernel"].T)
        set_to(block.out.weight, own["attention/out/kernel"].T)
        for norm in ("attention_norm", "mlp_norm", "attention/query_norm", "attention/key_norm"):
            set_to(getattr(block, norm.removeprefix("attention/")).weight, own[f"{norm}/scale"])


def evaluate(model: nn.Module, valid_WxT1: torch.Tensor) -> float:
    """Return the mean validation loss, nats/byte; each process evaluates its share of the windows."""
    own_WxT1 = valid_WxT1[dist.get_rank() :: dist.get_world_size()]
    with torch.no_grad():
        total = torch.tensor([sum(model(window[None]).item() for window in own_WxT1), float(len(own_WxT1))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


class Steps:
    """AdamW on clipped gradients."""

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        self.config, self.model, self.optimizer = config, model, adamw(model.parameters(), config)

    def step(self, tokens_BxT1: torch.Tensor, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config["schedule"], self.config["steps"])
        self.optimizer.zero_grad()
        self.model(tokens_BxT1).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config["clip_norm"])
        self.optimizer.step()


class AllReduce(Steps):
    """The same under torch's DistributedDataParallel."""

    def __init__(self, own: DecoderLM, config: dict[str, Any]):
        super().__init__(nn.parallel.DistributedDataParallel(own), config)
        self.hook()

    def hook(self) -> None:
        """Register a communication hook; here none."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which the parameters are those of the averaged model, as always here."""
        return contextlib.nullcontext()


class Float16(AllReduce):
    """The same with gradients in float16; the hook for bfloat16 needs NCCL."""

    def hook(self) -> None:
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


class PowerSGD(AllReduce):
    """The same with PyTorch's PowerSGD of rank 4, from the third step, which is the first that it allows."""

    def hook(self) -> None:
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class DiLoCo(Steps):
    """The same with outer steps of torchft's DiLoCo."""

    def __init__(self, own: DecoderLM, config: dict[str, Any]):
        super().__init__(own, config)
        method = config["method"]
        outer = method["outer_learning_rate"], method["outer_momentum"]
        self.servers = outer_steps(own, self.optimizer, method["every"], *outer)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which the parameters are those of the averaged model."""
        own = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        mean = own / dist.get_world_size()
        dist.all_reduce(mean)
        nn.utils.vector_to_parameters(mean, self.model.parameters())
        yield
        nn.utils.vector_to_parameters(own, self.model.parameters())


class Gossip:
    """AdamW under decent-dp's DecentralizedDataParallel, over the one-peer exponential graph; it updates inside of the backward pass."""

    def __init__(self, own: DecoderLM, config: dict[str, Any]):
        from decent_dp.ddp import DecentralizedDataParallel

        schedule, steps = config["schedule"], config["steps"]

        def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            peak = schedule["learning_rate"]
            return torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: learning_rate(min(step, steps), schedule, steps) / peak
            )

        self.model = DecentralizedDataParallel(
            own,
            lambda named: adamw([parameter for _, parameter in named], config),
            scheduled,
            topology="one-peer-exp",
            grad_clip_norm=config["clip_norm"],
            _local_world_size=1,
        )

    def step(self, tokens_BxT1: torch.Tensor, step: int) -> None:
        self.model(tokens_BxT1).backward()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which the parameters are those of the averaged model."""
        self.model.global_avg()
        yield
        self.model.revert_global_avg()


METHODS = {"ddp": AllReduce, "float16": Float16, "power_sgd": PowerSGD, "decent_dp": Gossip, "diloco": DiLoCo}


def adamw(parameters: Iterable[nn.Parameter], config: dict[str, Any]) -> torch.optim.Optimizer:
    options, rate = config["optimizer"], config["schedule"]["learning_rate"]
    return torch.optim.AdamW(parameters, rate, betas=(options["b1"], options["b2"]), weight_decay=options["weight_decay"])


def train(workdir: pathlib.Path, name: str) -> None:
    """Train from the first step to the last; an interrupted run starts again."""
    config, data = json.loads((workdir / "config.json").read_text()), np.load(workdir / "data.npz")
    valid_WxT1 = torch.from_numpy(data["valid"]).long()
    tokens_SxBxT1 = torch.from_numpy(data["train"][:, dist.get_rank()]).long()
    own = DecoderLM(**{name: config["model"][name] for name in ("vocabulary", "context", "width", "hidden", "heads", "depth")})
    start(own, np.load(workdir / "start.npz"))
    method = METHODS[name](own, config)
    steps, every, rows = config["steps"], config["eval"]["every"], []
    tokens = config["batch_size"] * config["model"]["context"]
    taken_s, loss = 0.0, math.nan
    for step in range(steps):
        begun = time.perf_counter()
        method.step(tokens_SxBxT1[step], step)
        taken_s += time.perf_counter() - begun
        if (step + 1) % every == 0 or step + 1 == steps:
            with method.averaged():
                loss = evaluate(own, valid_WxT1)
            rows.append({"step": step + 1, "kind": "train", "tokens_per_s": ((step % every) + 1) * tokens / taken_s})
            rows.append({"step": step + 1, "kind": "eval", "loss": loss})
            taken_s = 0.0
    if dist.get_rank() == 0:
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (workdir / "summary.json").write_text(json.dumps({"eval_loss": loss}) + "\n")
        print(f"validation loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--method", required=True, choices=list(METHODS))
    options = join(parser)
    train(options.workdir, options.method)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads sometimes abort a process that ends in the usual way.
