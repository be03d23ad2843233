"""The arithmetic of PyTorch's `powerSGD_hook` on one core, without its collectives; `experiments.bench.powersgd` starts it with the
shapes of the gradients.
"""
# pyright: reportMissingImports=false

import collections
import json
import sys
import time

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from experiments.bench.cluster.serve import serve
from launch import memory

RANK = 4


class Hook:
    """The hook's computation on one bucket of all gradients, by default with warm start, error feedback, and equal shapes batched."""

    def __init__(self, shapes: list[list[int]]):
        generator = torch.Generator().manual_seed(0)
        self.grads = [torch.randn(shape, generator=generator) for shape in shapes]
        self.bucket = torch.cat([g.flatten() for g in self.grads])
        parts = self.bucket.split([g.numel() for g in self.grads])
        self.views = [part.view(g.shape) for part, g in zip(parts, self.grads)]
        self.error = torch.zeros_like(self.bucket)
        self.qs = None

    def step(self) -> float:
        """Return the seconds of one reduction."""
        for view, g in zip(self.views, self.grads):
            view.copy_(g)
        begun = time.perf_counter()
        self.bucket.add_(self.error)
        before = self.bucket.detach().clone()
        groups = collections.defaultdict(list)
        for view in self.views:
            if view.dim() > 1:
                groups[view.shape].append(view)
        tensors = [torch.stack(same) if len(same) > 1 else same[0].unsqueeze(0) for same in groups.values()]
        if self.qs is None:
            self.qs = [torch.randn(t.shape[0], t.shape[2], RANK) for t in tensors]
        for q in self.qs:
            powerSGD_hook._orthogonalize(q)
        ps = [torch.bmm(t, q) for t, q in zip(tensors, self.qs)]
        for p in ps:
            powerSGD_hook._orthogonalize(p)
        for t, p, q in zip(tensors, ps, self.qs):
            torch.bmm(t.transpose(1, 2), p, out=q)
        for t, p, q in zip(tensors, ps, self.qs):
            torch.bmm(p, q.transpose(1, 2), out=t)
        for t, same in zip(tensors, groups.values()):
            if len(same) > 1:
                for i, view in enumerate(same):
                    view.copy_(t[i])
        self.error = before - self.bucket
        return time.perf_counter() - begun


def main() -> None:
    memory.keep_freed()
    torch.set_num_threads(1)
    hook = Hook(json.loads(sys.argv[1]))
    serve({"version": lambda: torch.__version__, "step": hook.step})


if __name__ == "__main__":
    main()
