"""A PyTorch worker of an emulated cluster: decjax.models in PyTorch, alone or under DDP, decent-dp or torchft; see `group`.

Needs requirements-peers.txt and not decjax. One thread computes, as in a decjax worker; gloo has its own.
"""
# pyright: reportMissingImports=false

import argparse
import datetime
import functools
import os
import socket
import time
from typing import Any
import urllib.parse

import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
import torch.nn.functional as F

from experiments.bench.cluster.serve import serve

RMSNorm = functools.partial(nn.RMSNorm, eps=1e-6)


def rotate(x_BxHxTxK: torch.Tensor, cos_TxK2: torch.Tensor, sin_TxK2: torch.Tensor) -> torch.Tensor:
    low, high = x_BxHxTxK.chunk(2, dim=-1)
    return torch.cat([low * cos_TxK2 - high * sin_TxK2, high * cos_TxK2 + low * sin_TxK2], dim=-1)


class Block(nn.Module):
    """x + Attention(norm(x)), then x + MLP(norm(x)); rotary positions, normalized queries and keys."""

    def __init__(self, width: int, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.query_norm, self.key_norm = RMSNorm(width // heads), RMSNorm(width // heads)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x_BxTxD, cos, sin):
        B, T, D = x_BxTxD.shape
        qkv = self.qkv(self.attention_norm(x_BxTxD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(self.query_norm(qkv[0]), cos, sin), rotate(self.key_norm(qkv[1]), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BxTxD = x_BxTxD + self.out(mixed)
        return x_BxTxD + self.down(F.gelu(self.up(self.mlp_norm(x_BxTxD)), approximate="tanh"))


class DecoderLM(nn.Module):
    """The same architecture and sizes as decjax.models.decoder.DecoderLM; returns the loss."""

    def __init__(self, vocabulary: int, context: int, width: int, hidden: int, heads: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        K = width // heads
        angle_TxK2 = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(0, K, 2) / K)
        self.register_buffer("cos", angle_TxK2.cos(), persistent=False)
        self.register_buffer("sin", angle_TxK2.sin(), persistent=False)

    def forward(self, tokens_BxT1):
        x_BxTxD = self.embedding(tokens_BxT1[:, :-1])
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD, self.cos, self.sin)
        logits = self.head(self.norm(x_BxTxD))
        return F.cross_entropy(logits.flatten(0, 1), tokens_BxT1[:, 1:].flatten())


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


class Alone:
    """Steps without communication."""

    def __init__(self, model: nn.Module):
        self.model, self.optimizer = model, adamw(model.parameters())

    def step(self, tokens: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(tokens).backward()
        self.optimizer.step()

    def finish(self) -> None:
        """Wait for messages."""


class DDP(Alone):
    """torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module, **options: object):
        super().__init__(nn.parallel.DistributedDataParallel(model, **options))


class Float16(DDP):
    """DistributedDataParallel with PyTorch's hook that sends gradients in float16; that for bfloat16 needs NCCL."""

    def __init__(self, model: nn.Module, **options: object):
        super().__init__(model, **options)
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


class PowerSGD(DDP):
    """DistributedDataParallel with PyTorch's PowerSGD hook."""

    def __init__(self, model: nn.Module, rank: int, **options: object):
        super().__init__(model, **options)
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class DecentDP(Alone):
    """decent-dp's DecentralizedDataParallel, whose hooks update and send one bucket after the other."""

    def __init__(self, model: nn.Module, **options: object):
        from decent_dp.ddp import DecentralizedDataParallel

        self.model = DecentralizedDataParallel(model, lambda named: adamw([parameter for _, parameter in named]), **options)

    def step(self, tokens: torch.Tensor) -> None:
        self.model(tokens).backward()

    def finish(self) -> None:
        for operation in self.model._comm_ops:
            if operation is not None:
                operation.wait()


def outer_steps(model: nn.Module, optimizer: torch.optim.Optimizer, every: int, learning_rate: float, momentum: float) -> list[Any]:
    """Let torchft's DiLoCo take an outer step after each `every` steps of an optimizer, with SGD and Nesterov momentum.

    Each process is a replica group of its own; process 0 has the lighthouse. Returns servers, which end when they are deleted.
    """
    os.environ.setdefault("RUST_LOG", "warn")  # torchft logs several lines in each outer step.
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    own, groups = socket.gethostbyname(socket.gethostname()), dist.get_world_size()
    servers: list[Any] = [store := dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)]
    lighthouse: list[Any] = [None]
    if dist.get_rank() == 0:
        servers.append(server := LighthouseServer("[::]:0", min_replicas=groups))
        lighthouse = [f"http://{own}:{urllib.parse.urlsplit(server.address()).port}"]
    dist.broadcast_object_list(lighthouse)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=groups,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=lighthouse[0],
        replica_id=str(dist.get_rank()),
        hostname=own,
        heartbeat_interval=datetime.timedelta(seconds=1),  # Other rows are measured meanwhile.
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), learning_rate, momentum, nesterov=momentum > 0)
    DiLoCo(manager, [model], optimizer, outer, every, use_bucketization=True).__enter__()
    return [*servers, manager]


class DiLoCo(Alone):
    """Local steps, and outer steps of torchft's DiLoCo with fp32 messages."""

    def __init__(self, model: nn.Module, every: int, learning_rate: float = 0.7, momentum: float = 0.9):
        super().__init__(model)
        self.servers = outer_steps(model, self.optimizer, every, learning_rate, momentum)


METHODS = {"alone": Alone, "ddp": DDP, "float16": Float16, "power_sgd": PowerSGD, "decent_dp": DecentDP, "diloco": DiLoCo}


class Worker:
    """The handlers of requests to a PyTorch worker."""

    def __init__(self, index: int):
        self.index, self.methods, self.tokens = index, {}, {}

    def prepare(
        self, method: str, kind: str, model: dict[str, int], batch_size: int, period: int = 1, **options: object
    ) -> dict[str, Any]:
        """Build a method; return its period, in steps, and its number of parameters."""
        torch.manual_seed(0)
        net, generator = DecoderLM(**model), torch.Generator().manual_seed(self.index)
        self.methods[method] = METHODS[kind](net, **options)
        self.tokens[method] = torch.randint(256, (batch_size, model["context"] + 1), generator=generator)
        return {"period": period, "parameters": sum(x.numel() for x in net.parameters())}

    def steps(self, method: str, count: int) -> list[float]:
        """Return the seconds of each of `count` steps."""
        stepper, times_s = self.methods[method], []
        for _ in range(count):
            begun = time.perf_counter()
            stepper.step(self.tokens[method])
            times_s.append(time.perf_counter() - begun)
        stepper.finish()
        return times_s


def join(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Join the group of processes that the command line describes; return its arguments."""
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--process_index", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    address = f"tcp://{options.coordinator}"
    dist.init_process_group("gloo", init_method=address, world_size=options.num_processes, rank=options.process_index)
    return options


if __name__ == "__main__":
    worker = Worker(join(argparse.ArgumentParser(description=__doc__)).process_index)
    serve({"prepare": worker.prepare, "steps": worker.steps})
