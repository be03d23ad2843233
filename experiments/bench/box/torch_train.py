"""PyTorch's DDP on the data, schedule and evaluations of a run of decjax; one of the processes of experiments.time_to_loss.

Needs requirements-peers.txt and nothing of decjax. `--workdir` holds config.json and data.npz: train [S, N, B, T + 1] and valid [W, T + 1],
bytes. Writes metrics.jsonl and summary.json in the form of launch.train, as far as experiments.time_to_loss reads them.
"""
# pyright: reportMissingImports=false

import argparse
import json
import math
import pathlib
import time
from typing import Any

import numpy as np
import torch
from torch import nn
import torch.distributed as dist

from experiments.bench.box.torch_worker import DecoderLM


def learning_rate(step: int, schedule: dict[str, Any], steps: int) -> float:
    """Linear warm-up, then a cosine, as decjax.schedules's."""
    warmup, peak, final = schedule["warmup_steps"], schedule["learning_rate"], schedule["final_fraction"]
    if step < warmup:
        return peak * step / warmup
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def evaluate(model: nn.Module, valid_WxT1: torch.Tensor) -> float:
    """Mean validation loss, nats/byte; each process takes its share of the windows."""
    own_WxT1 = valid_WxT1[dist.get_rank() :: dist.get_world_size()]
    with torch.no_grad():
        total = torch.tensor([sum(model(window[None]).item() for window in own_WxT1), float(len(own_WxT1))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train(workdir: pathlib.Path) -> None:
    """Trains from the first step to the last: a run that is cut short begins anew."""
    config, data = json.loads((workdir / "config.json").read_text()), np.load(workdir / "data.npz")
    valid_WxT1 = torch.from_numpy(data["valid"]).long()
    tokens_SxBxT1 = torch.from_numpy(data["train"][:, dist.get_rank()]).long()
    torch.manual_seed(config["seed"])
    own = DecoderLM(**{name: config["model"][name] for name in ("vocabulary", "context", "width", "hidden", "heads", "depth")})
    model = nn.parallel.DistributedDataParallel(own)
    options = config["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(options["b1"], options["b2"]), weight_decay=options["weight_decay"])
    steps, every, rows = config["steps"], config["eval"]["every"], []
    tokens = config["batch_size"] * config["model"]["context"]
    taken_s, loss = 0.0, math.nan
    for step in range(steps):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config["schedule"], steps)
        optimizer.zero_grad()
        model(tokens_SxBxT1[step]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["clip_norm"])
        optimizer.step()
        taken_s += time.perf_counter() - begun
        if (step + 1) % every == 0 or step + 1 == steps:
            since = (step % every) + 1
            loss = evaluate(own, valid_WxT1)
            rows.append({"step": step + 1, "kind": "train", "tokens_per_s": since * tokens / taken_s})
            rows.append({"step": step + 1, "kind": "eval", "loss": loss})
            taken_s = 0.0
    if dist.get_rank() == 0:
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (workdir / "summary.json").write_text(json.dumps({"eval_loss": loss}) + "\n")
        print(f"validation loss {loss:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--process_index", type=int, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    address = f"tcp://{chosen.coordinator}"
    dist.init_process_group("gloo", init_method=address, world_size=chosen.num_processes, rank=chosen.process_index)
    train(chosen.workdir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
