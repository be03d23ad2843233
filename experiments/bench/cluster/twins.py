"""Twins in PyTorch of runs of decjax: the same parameters to start from, text, batches, schedule and evaluations.

See `torch_train`.
"""

from collections.abc import Mapping
import json
import pathlib
import subprocess
from typing import Any

import jax
import numpy as np

from decjax import config as parts
from decjax import registry
from decjax.tasks import text
from experiments.bench.cluster.group import Failed
from launch import cluster, config_file, processes


def check(python: str) -> None:
    """Raise `Failed` unless an interpreter has experiments/requirements-peers.txt."""
    try:
        done = subprocess.run([python, "-c", "import torch, decent_dp, torchft"], capture_output=True, text=True, check=False)
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except OSError as error:
        problem = [error.strerror]
    if problem:
        raise Failed(f"--peers={python} cannot be used ({problem[0]}); give a Python with experiments/requirements-peers.txt")


def config_of(text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run of decjax, as in its config.json, for `PATH.py:SHORTHAND` and dotted fields."""
    config = config_file.get_config(text)
    config.update_from_flattened_dict(dict(fields))
    return parts.resolve(config, 1).document


def prepare(config: dict[str, Any], workdir: pathlib.Path) -> None:
    """Write the input of `torch_train` into a directory, for the twin of a run of decjax with this config."""
    context, workers = config["model"]["context"], config["workers"]
    corpus = text.load_corpus(config["data"]["path"])
    batch = text.batches(
        corpus, context=context, batch_size=config["batch_size"] // workers, num_workers=workers, seed=config["seed"]
    )
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config))
    tokens_SxNxBxT1 = np.array([[batch(worker, step) for worker in range(workers)] for step in range(config["steps"])], np.uint8)
    limit = config["eval"]["num_windows"]
    valid_WxT1 = text.validation_windows(corpus.valid, context=context, limit=limit).astype(np.uint8)
    np.savez(workdir / "data.npz", train=tokens_SxNxBxT1, valid=valid_WxT1)
    np.savez(workdir / "start.npz", allow_pickle=False, **first_parameters(config))


def first_parameters(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the initial parameters of a run of decjax, by path, such as "blocks/up/kernel"."""
    spec = parts.read(config)
    assert spec.model is not None
    params = registry.make("model", spec.model.name, **spec.model.options).init(jax.random.key(spec.seed))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


def train(network: cluster.Network, python: str, method: str, config: dict[str, Any], workdir: pathlib.Path) -> int:
    """Train a peer on the hosts of a network like a run of decjax, one process a host; return the exit code.

    Args:
        network: the hosts.
        python: an interpreter with experiments/requirements-peers.txt.
        method: one of `torch_train.METHODS`.
        config: of the run of decjax.
        workdir: of the input and output of `torch_train`.
    """
    prepare(config, workdir)
    hosts = config["workers"]
    lines = processes.command_lines(
        "experiments.bench.cluster.torch_train", [f"--workdir={workdir}", f"--method={method}"], hosts, network.addresses[0]
    )
    return processes.run_together([network.inside(k, [python, *line[1:]]) for k, line in enumerate(lines)])
