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
