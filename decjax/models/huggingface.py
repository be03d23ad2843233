"""Models in the files of Hugging Face: config.json, and safetensors with the names of Llama and Qwen2.

A folder as `transformers` writes it becomes options and parameters of the model "llama", and the reverse. Tensors may be divided among
several files. Other architectures are refused, and so are options of these that the model lacks, such as scaled rotary frequencies.
"""

from collections.abc import Callable, Mapping
import contextlib
import importlib
import json
import os
import pathlib
import shutil
from typing import Any, NoReturn

import jax
import numpy as np

from decjax import files
from decjax.typing import PyTree

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}  # the latter has biases of queries, keys and values
FIELDS = {  # options of the model by the names of config.json
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_hidden_layers": "depth",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "epsilon",
}
DEFAULTS = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}  # `transformers` leaves out values that equal its defaults
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
LINEAR = {"self_attn.o_proj": ("attention", "out"), "mlp.gate_proj": ("gate",), "mlp.up_proj": ("up",), "mlp.down_proj": ("down",)}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")

Path = str | os.PathLike[str]


def _refuse(folder: Path, problem: str, fix: str) -> NoReturn:
    raise ValueError(f"pretrained model {os.fspath(folder)!r} {problem}; {fix}")


def _safetensors(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError("models of Hugging Face need the package safetensors: pip install safetensors") from error


# -- config.json ------------------------------------------------------------------------------------------------------


def options(folder: Path) -> dict[str, Any]:
    """Return the options of the model "llama" for a folder of Hugging Face.

    Raises:
        ValueError: if there is no config.json, or it describes a model that "llama" is not.
    """
    try:
        given = files.read_json(pathlib.Path(folder).expanduser() / CONFIG)
    except ValueError as error:
        _refuse(folder, f"has no readable {CONFIG} ({error})", f"give a folder with {CONFIG} and {WEIGHTS}")
    kind = given.get("model_type")
    if kind not in FAMILIES:
        _refuse(folder, f"is of the architecture {kind!r}", f"use one of {', '.join(FAMILIES)}")
    given = {"num_key_value_heads": given.get("num_attention_heads"), **DEFAULTS, **given}
    for name in FIELDS:
        if given.get(name) is None:
            _refuse(folder, f"lacks {name} in {CONFIG}", "give the folder of a complete model")
    rotary = given.get("rope_parameters") or given.get("rope_scaling") or {}
    for name, value, only in (
        ("hidden_act", given.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(given.get("attention_bias")), False),
        ("mlp_bias", bool(given.get("mlp_bias")), False),
        ("use_sliding_window", bool(given.get("use_sliding_window")), False),
        ("rope_type", rotary.get("rope_type", rotary.get("type", "default")), "default"),
        ("head_dim", given.get("head_dim") or _head_size(given), _head_size(given)),
    ):
        if value != only:
            _refuse(folder, f"has {name}={value!r} in {CONFIG}", f"use a model with {name}={only!r}")
    theta = given.get("rope_theta", rotary.get("rope_theta", 10_000.0))
    return {own: given[name] for name, own in FIELDS.items()} | {"theta": float(theta), "qkv_bias": kind == "qwen2"}


def _head_size(given: Mapping[str, Any]) -> Any:
    width, heads = given["hidden_size"], given["num_attention_heads"]
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json for options of the model "llama"."""
    kind = "qwen2" if given["qkv_bias"] else "llama"
    return {
        "architectures": [FAMILIES[kind]],
        "model_type": kind,
        **{name: given[own] for name, own in FIELDS.items()},
        "rope_theta": given["theta"],
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


# -- Tensors ----------------------------------------------------------------------------------------------------------


def tensors(params: PyTree, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a model "llama" with these options by the names of Hugging Face; weights are transposed."""
    blocks, named = params["blocks"], {}
    stacked = {f"{name}.weight": blocks[own]["scale"] for name, own in NORMS.items()}
    for name, path in LINEAR.items():
        stacked[f"{name}.weight"] = _at(blocks, path)["kernel"].swapaxes(1, 2)
    for leaf, x in blocks["attention"]["qkv"].items():  # Columns, last, are ordered by groups: H / G queries, a key and a value.
        rows = x.swapaxes(1, 2) if leaf == "kernel" else x
        G, K = given["kv_heads"], given["width"] // given["heads"]
        rows = rows.reshape(len(x), G, -1, K, *rows.shape[2:])
        for name, part in {"q": rows[:, :, :-2], "k": rows[:, :, -2], "v": rows[:, :, -1]}.items():
            suffix = "weight" if leaf == "kernel" else "bias"
            stacked[f"self_attn.{name}_proj.{suffix}"] = part.reshape(len(x), -1, *rows.shape[4:])
    for name, x in stacked.items():
        named |= {f"model.layers.{layer}.{name}": x[layer] for layer in range(given["depth"])}
    named["model.embed_tokens.weight"], named["model.norm.weight"] = params["embedding"]["embedding"], params["norm"]["scale"]
    return named if given["tied"] else named | {"lm_head.weight": params["head"]["kernel"].T}


def params(get: Callable[[str], np.ndarray], given: Mapping[str, Any]) -> PyTree:
    """Return the parameters of a model "llama" with these options, the inverse of `tensors`; `get` returns a tensor by its name."""
    L, G, K = given["depth"], given["kv_heads"], given["width"] // given["heads"]
    stack = lambda name: np.stack([get(f"model.layers.{layer}.{name}") for layer in range(L)])
    blocks: dict[str, Any] = {own: {"scale": stack(f"{name}.weight")} for name, own in NORMS.items()}
    for name, path in LINEAR.items():
        *above, last = path
        place = _at(blocks, above, create=True)
        place[last] = {"kernel": stack(f"{name}.weight").swapaxes(1, 2)}
    qkv = blocks["attention"]["qkv"] = {}
    for leaf in ("kernel", "bias") if given["qkv_bias"] else ("kernel",):
        suffix = "weight" if leaf == "kernel" else "bias"
        parts = [stack(f"self_attn.{name}_proj.{suffix}") for name in "qkv"]
        rows = np.concatenate([x.reshape(L, G, -1, K, *x.shape[2:]) for x in parts], axis=2)
        rows = rows.reshape(L, -1, *parts[0].shape[2:])
        qkv[leaf] = rows.swapaxes(1, 2) if leaf == "kernel" else rows
    whole = {"embedding": {"embedding": get("model.embed_tokens.weight")}, "norm": {"scale": get("model.norm.weight")}}
    head = {} if given["tied"] else {"head": {"kernel": get("lm_head.weight").T}}
    return {"blocks": blocks, **whole, **head}


def _at(tree: PyTree, path: Any, create: bool = False) -> Any:
    for name in path:
        tree = tree.setdefault(name, {}) if create else tree[name]
    return tree


# -- Files ------------------------------------------------------------------------------------------------------------


def write(folder: Path, params: PyTree, given: Mapping[str, Any]) -> None:
    """Write the parameters of a model "llama" with these options as model.safetensors and config.json.

    Raises:
        OSError: if the folder or a file cannot be written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors(params, given).items()}
    numpy, error_type = _safetensors("safetensors.numpy"), _safetensors("safetensors").SafetensorError
    files.write_whole(folder / CONFIG, json.dumps(config(given), indent=2) + "\n")
    temporary = folder / f"{WEIGHTS}.tmp"
    try:
        numpy.save_file(named, temporary, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, temporary)  # The library lets only the owner read it.
        temporary.replace(folder / WEIGHTS)
    except error_type as error:
        raise OSError(f"{temporary} cannot be written ({_line(error)}); make room there, or choose another path") from error
    finally:
        temporary.unlink(missing_ok=True)


def read(folder: Path, given: Mapping[str, Any], like: PyTree) -> PyTree:
    """Return the parameters in a folder as those of a model "llama" with these options, float32.

    Args:
        folder: with config.json and safetensors.
        given: the options of the model.
        like: shapes of the parameters.

    Raises:
        ValueError: as `check`.
    """
    with contextlib.ExitStack() as held:
        opened = check(folder, given, like, held)
        return params(lambda name: opened[name].get_tensor(name).astype(np.float32), given)


def check(folder: Path, given: Mapping[str, Any], like: PyTree, held: contextlib.ExitStack | None = None) -> dict[str, Any]:
    """Check the headers of the files in a folder; return the open file of each tensor.

    Args:
        folder: with config.json and safetensors.
        given: the options of the model.
        like: shapes of the parameters.
        held: closes the files; None: they are closed on return.

    Raises:
        ValueError: if the model in the folder has other options, a file is damaged, or a tensor is missing or of another shape.
    """
    stored = options(folder)
    for name in stored.keys() - {"context"}:
        if given[name] != stored[name]:
            fix = f"use model.{name}={stored[name]!r}"
            _refuse(folder, f"has {name}={stored[name]!r}, and model.{name}={given[name]!r}", fix)
    with contextlib.ExitStack() as closed:
        opened = _opened(pathlib.Path(folder).expanduser(), held or closed)
        for name, expected in jax.eval_shape(lambda tree: tensors(tree, given), like).items():
            if name not in opened:
                _refuse(folder, f"lacks the tensor {name}", "give the folder of a complete model")
            found = opened[name].get_slice(name)
            if tuple(found.get_shape()) != expected.shape:
                problem = f"has {name} of shape {tuple(found.get_shape())}, and {CONFIG} implies {expected.shape}"
                _refuse(folder, problem, f"give the {CONFIG} of these weights")
            if found.get_dtype() not in FLOATING:
                _refuse(folder, f"has {name} of type {found.get_dtype()}", "give weights that are not quantized")
        return opened


def _opened(folder: pathlib.Path, held: contextlib.ExitStack) -> dict[str, Any]:
    """The open file of each tensor in a folder, by name."""
    found, names = {}, [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        try:
            parts = files.read_json(folder / INDEX).get("weight_map")
            names = sorted({pathlib.PurePath(name).name for name in parts.values()}) if isinstance(parts, dict) else []
        except (ValueError, TypeError) as error:
            _refuse(folder, f"has an unreadable {INDEX} ({error})", "download it again")
    library = _safetensors("safetensors")
    for name in names:
        try:
            files.check_regular(folder / name)
            file = held.enter_context(library.safe_open(folder / name, framework="np"))
        except (OSError, library.SafetensorError) as error:
            _refuse(folder, f"has no whole {name} ({_line(error)})", "download it again, or give another folder")
        found |= dict.fromkeys(file.keys(), file)
    return found


def _line(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).removeprefix("Error while deserializing header: ").split())[
        :200
    ]
