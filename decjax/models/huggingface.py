"""Models in the files of Hugging Face: config.json, and safetensors with the names of Llama, Qwen2 and GPT-2.

A folder as `transformers` writes it becomes options and parameters of a registered model, and the reverse. Tensors may be divided among
several files. Other architectures are refused, and so are options that the models lack, such as scaled rotary frequencies.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import json
import os
import pathlib
import shutil
from typing import Any, ClassVar, NoReturn

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from decjax import files, registry
from decjax.errors import optional
from decjax.models.decoder import Model
from decjax.typing import PyTree

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
QKV = "blocks/attention/qkv"  # path of the layer of queries, keys and values in the parameters
FLOATING = ("F64", "F32", "F16", "BF16")

Path = str | os.PathLike[str]


def _refuse(folder: Path, problem: str, fix: str) -> NoReturn:
    raise ValueError(f"pretrained model {os.fspath(folder)!r} {problem}; {fix}")


def _safetensors(name: str) -> Any:
    return optional(name, "a model of Hugging Face")


# -- Architectures ----------------------------------------------------------------------------------------------------


class Architecture:
    """How the files of Hugging Face describe a registered model.

    Attributes:
        kinds: for each `model_type` of config.json the class of `transformers`, and the options of the model that it implies.
        fields: options of the model by the names of config.json.
        fixed: values of fields of config.json that the model implies.
        modules: names of tensors without their ends, by the paths of layers in the parameters. `{layer}` is the number of a layer, and
            `{qkv}` one of "q", "k" and "v"; without it, their columns are in one tensor in this order.
        transposed: whether kernels are [outputs, inputs].
    """

    kinds: ClassVar[dict[str, tuple[str, dict[str, Any]]]]
    fields: ClassVar[dict[str, str]]
    fixed: ClassVar[dict[str, Any]]
    modules: ClassVar[dict[str, str]]
    transposed: ClassVar[bool]

    @classmethod
    def fused(cls) -> bool:
        """Whether queries, keys and values are in one tensor."""
        return "{qkv}" not in cls.modules[QKV]

    @staticmethod
    def completed(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with the fields that `transformers` leaves out, since they have its defaults."""
        raise NotImplementedError

    @classmethod
    def required(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the only possible values of fields of a completed config.json."""
        return cls.fixed


class LlamaFiles(Architecture):
    """Llama, and Qwen2, which has biases of queries, keys and values."""

    kinds: ClassVar = {"llama": ("LlamaForCausalLM", {"qkv_bias": False}), "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True})}
    fields: ClassVar = {
        "vocab_size": "vocabulary",
        "max_position_embeddings": "context",
        "hidden_size": "width",
        "intermediate_size": "hidden",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "num_hidden_layers": "depth",
        "tie_word_embeddings": "tied",
        "rms_norm_eps": "epsilon",
        "rope_theta": "theta",
    }
    fixed: ClassVar = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    modules: ClassVar = {
        "embedding": "model.embed_tokens",
        "blocks/attention_norm": "model.layers.{layer}.input_layernorm",
        "blocks/attention/qkv": "model.layers.{layer}.self_attn.{qkv}_proj",
        "blocks/attention/out": "model.layers.{layer}.self_attn.o_proj",
        "blocks/mlp_norm": "model.layers.{layer}.post_attention_layernorm",
        "blocks/gate": "model.layers.{layer}.mlp.gate_proj",
        "blocks/up": "model.layers.{layer}.mlp.up_proj",
        "blocks/down": "model.layers.{layer}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }
    transposed: ClassVar = True

    @staticmethod
    def completed(given):
        rotary = given.get("rope_parameters") or given.get("rope_scaling") or {}
        defaults = {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": given.get("num_attention_heads"),
            "rope_theta": rotary.get("rope_theta", 10_000.0),
            "rope_type": rotary.get("rope_type", rotary.get("type")),
        }
        return {**defaults, **given}

    @classmethod
    def required(cls, given):
        width, heads = given["hidden_size"], given["num_attention_heads"]
        size = width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None
        return cls.fixed | {"rope_type": "default", "head_dim": size}


class GPT2Files(Architecture):
    """GPT-2, whose kernels are [inputs, outputs]."""

    kinds: ClassVar = {"gpt2": ("GPT2LMHeadModel", {})}
    fields: ClassVar = {
        "vocab_size": "vocabulary",
        "n_positions": "context",
        "n_embd": "width",
        "n_inner": "hidden",
        "n_head": "heads",
        "n_layer": "depth",
        "layer_norm_epsilon": "epsilon",
    }
    fixed: ClassVar = {
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    modules: ClassVar = {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks/attention_norm": "transformer.h.{layer}.ln_1",
        "blocks/attention/qkv": "transformer.h.{layer}.attn.c_attn",
        "blocks/attention/out": "transformer.h.{layer}.attn.c_proj",
        "blocks/mlp_norm": "transformer.h.{layer}.ln_2",
        "blocks/up": "transformer.h.{layer}.mlp.c_fc",
        "blocks/down": "transformer.h.{layer}.mlp.c_proj",
        "norm": "transformer.ln_f",
    }
    transposed: ClassVar = False

    @staticmethod
    def completed(given):
        inner = given.get("n_inner") or (4 * given["n_embd"] if isinstance(given.get("n_embd"), int) else None)
        return {"layer_norm_epsilon": 1e-5, **given, "n_inner": inner}


ARCHITECTURES: dict[str, type[Architecture]] = {"llama": LlamaFiles, "gpt2": GPT2Files}  # by the registered name of the model
KINDS = {kind: model for model, architecture in ARCHITECTURES.items() for kind in architecture.kinds}


# -- config.json ------------------------------------------------------------------------------------------------------


def options(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (registered name, options) of the model in a folder of Hugging Face.

    Raises:
        ValueError: if there is no config.json, or it describes none of these models.
    """
    try:
        given = files.read_json(pathlib.Path(folder).expanduser() / CONFIG)
    except ValueError as error:
        _refuse(folder, f"has no readable {CONFIG} ({error})", f"give a folder with {CONFIG} and {WEIGHTS}")
    kind = given.get("model_type")
    if kind not in KINDS:
        _refuse(folder, f"is of the architecture {kind!r}", f"use one of {', '.join(KINDS)}")
    architecture = ARCHITECTURES[KINDS[kind]]
    given = architecture.completed(given)
    for name in architecture.fields:
        if given.get(name) is None:
            _refuse(folder, f"lacks {name} in {CONFIG}", "give the folder of a complete model")
    for name, only in architecture.required(given).items():
        if (value := given.get(name)) not in (None, only):
            _refuse(folder, f"has {name}={value!r} in {CONFIG}", f"use a model with {name}={only!r}")
    _, implied = architecture.kinds[kind]
    return KINDS[kind], {own: given[name] for name, own in architecture.fields.items()} | implied


def config(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json for a registered model with these options."""
    architecture = ARCHITECTURES[model]
    kind, name = next((kind, name) for kind, (name, implied) in architecture.kinds.items() if implied.items() <= given.items())
    values = {name: given[own] for name, own in architecture.fields.items()}
    return {"architectures": [name], "model_type": kind, **values, **architecture.fixed, "torch_dtype": "float32"}


# -- Tensors ----------------------------------------------------------------------------------------------------------


def tensors(params: PyTree, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a registered model with these options by the names of Hugging Face."""
    architecture, named = ARCHITECTURES[model], {}
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    for path, x in flat.items():
        name = _name(architecture, path)
        parts = {"": x}
        if path.startswith(QKV):
            columns = _split(x, given)
            parts = {"": jnp.concatenate(columns, axis=-1)} if architecture.fused() else dict(zip("qkv", columns, strict=True))
        for qkv, part in parts.items():
            part = part.swapaxes(-2, -1) if architecture.transposed and path.endswith("kernel") else part
            layers = dict(enumerate(part)) if "{layer}" in name else {0: part}
            named |= {name.format(layer=layer, qkv=qkv): tensor for layer, tensor in layers.items()}
    return named


def params(get: Callable[[str], np.ndarray], model: str, given: Mapping[str, Any], like: PyTree) -> PyTree:
    """Return the parameters, the inverse of `tensors`.

    Args:
        get: returns a tensor by its name.
        model: registered name.
        given: options of the model.
        like: shapes of the parameters.
    """
    architecture = ARCHITECTURES[model]

    def read(path, qkv=""):
        name = _name(architecture, path)
        numbers = range(given["depth"]) if "{layer}" in name else ()
        x = np.stack([get(name.format(layer=layer, qkv=qkv)) for layer in numbers]) if numbers else get(name)
        return x.swapaxes(-2, -1) if architecture.transposed and path.endswith("kernel") else x

    def whole(path):
        if not path.startswith(QKV):
            return read(path)
        parts = np.split(read(path), 3, axis=-1) if architecture.fused() else [read(path, qkv) for qkv in "qkv"]
        return _joined(parts, given)

    flat = {path: whole(path) for path in traverse_util.flatten_dict(like, sep="/")}
    return traverse_util.unflatten_dict(flat, sep="/")


def _name(architecture: type[Architecture], path: str) -> str:
    module, _, leaf = path.rpartition("/")
    return f"{architecture.modules[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def _split(x: Any, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The columns of queries, keys and values; a group's, one after the other, are those of H / G queries, a key and a value."""
    groups = x.reshape(*x.shape[:-1], given.get("kv_heads", given["heads"]), -1, given["width"] // given["heads"])
    return tuple(part.reshape(*x.shape[:-1], -1) for part in (groups[..., :-2, :], groups[..., -2, :], groups[..., -1, :]))


def _joined(parts: list[np.ndarray], given: Mapping[str, Any]) -> np.ndarray:
    """The inverse of `_split`."""
    G, K = given.get("kv_heads", given["heads"]), given["width"] // given["heads"]
    groups = [part.reshape(*part.shape[:-1], G, -1, K) for part in parts]
    return np.concatenate(groups, axis=-2).reshape(*parts[0].shape[:-1], -1)


# -- Files ------------------------------------------------------------------------------------------------------------


def pretrained(folder: str, **changes: Any) -> Model:
    """Return the model in a folder of Hugging Face; its `init` returns the stored parameters.

    Args:
        folder: with config.json and safetensors, of Llama, Qwen2 or GPT-2.
        **changes: options of the model that are not stored, such as a shorter context, a dtype or remat.

    Raises:
        ValueError: if the model is of another architecture or cannot be read.
    """
    model, given = options(folder)
    return registry.make("model", model, **(given | changes), pretrained=folder)


def started_from(folder: Path, model: Model, name: str, given: Mapping[str, Any]) -> Model:
    """Return a model with the parameters in a folder as the initial ones.

    Args:
        folder: with config.json and safetensors.
        model: the model.
        name: its registered name.
        given: its options.

    Raises:
        ValueError: as `check`.
    """
    check(folder, name, given)
    like = jax.eval_shape(model.init, jax.random.key(0))

    def initial():
        return jax.tree.map(lambda x, wanted: x[: len(wanted)], read(folder, name, given), like)  # Fewer positions may be needed.

    # A callback, so that neither tracing reads the weights nor a program holds them as constants.
    return model._replace(init=lambda key: jax.pure_callback(initial, like))


def write(folder: Path, params: PyTree, model: str, given: Mapping[str, Any]) -> None:
    """Write the parameters of a registered model with these options as model.safetensors and config.json.

    Raises:
        OSError: if the folder or a file cannot be written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors(params, model, given).items()}
    numpy, error_type = _safetensors("safetensors.numpy"), _safetensors("safetensors").SafetensorError
    files.write_whole(folder / CONFIG, json.dumps(config(model, given), indent=2) + "\n")
    temporary = folder / f"{WEIGHTS}.tmp"
    try:
        numpy.save_file(named, temporary, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, temporary)  # The library lets only the owner read it.
        temporary.replace(folder / WEIGHTS)
    except error_type as error:
        raise OSError(f"{temporary} cannot be written ({_line(error)}); make room there, or choose another path") from error
    finally:
        temporary.unlink(missing_ok=True)


def read(folder: Path, model: str, given: Mapping[str, Any]) -> PyTree:
    """Return the parameters in a folder as those of a registered model with these options, float32.

    Args:
        folder: with config.json and safetensors.
        model: registered name.
        given: the options of the model; with a shorter context, there are more positions than it reads.

    Raises:
        ValueError: as `check`.
    """
    with contextlib.ExitStack() as held:
        get, like = check(folder, model, given, held)
        return params(lambda name: get[name]().astype(np.float32), model, given, like)


def check(
    folder: Path, model: str, given: Mapping[str, Any], held: contextlib.ExitStack | None = None
) -> tuple[dict[str, Callable[[], np.ndarray]], PyTree]:
    """Check the headers of the files in a folder.

    Args:
        folder: with config.json and safetensors.
        model: registered name.
        given: the options of the model.
        held: closes the files; None: they are closed on return.

    Returns:
        A function for each tensor, which reads it, and the shapes of the parameters.

    Raises:
        ValueError: if the model in the folder has other options, a file is damaged, or a tensor is missing or of another shape.
    """
    name, stored = options(folder)
    if name != model:
        _refuse(folder, f"is a model {name!r}, and model.name={model!r}", f"use model.name={name!r}")
    for option in stored.keys() - {"context"}:
        if given[option] != stored[option]:
            problem = f"has {option}={stored[option]!r}, and model.{option}={given[option]!r}"
            _refuse(folder, problem, f"use model.{option}={stored[option]!r}")
    if "positions" in ARCHITECTURES[model].modules and given["context"] > stored["context"]:
        _refuse(folder, f"has {stored['context']} positions, and model.context={given['context']}", "use a shorter context")
    like = jax.eval_shape(registry.make("model", model, **stored).init, jax.random.key(0))
    with contextlib.ExitStack() as closed:
        opened, get = _opened(pathlib.Path(folder).expanduser(), held or closed), {}
        for name, expected in jax.eval_shape(lambda tree: tensors(tree, model, given), like).items():
            place = name if name in opened else name.partition(".")[2]  # Files of a model without its output layer lack the prefix.
            if place not in opened:
                _refuse(folder, f"lacks the tensor {name}", "give the folder of a complete model")
            found = opened[place].get_slice(place)
            if tuple(found.get_shape()) != expected.shape:
                problem = f"has {name} of shape {tuple(found.get_shape())}, and {CONFIG} implies {expected.shape}"
                _refuse(folder, problem, f"give the {CONFIG} of these weights")
            if found.get_dtype() not in FLOATING:
                _refuse(folder, f"has {name} of type {found.get_dtype()}", "give weights that are not quantized")
            get[name] = functools.partial(opened[place].get_tensor, place)
        return get, like


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
