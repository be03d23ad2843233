"""The numeric form of launch.plan's --model: numbers of a workload, or sizes of a transformer."""

from typing import Any

from decjax import costmodel
from decjax.costmodel import profile

SIZES = dict(depth=None, width=None, heads=None, vocabulary=None, context=None, batch=None, hidden=0.0, tied=0.0, bytes=4.0)
NUMBERS = dict(params=None, forward_s=None, backward_s=None, tokens=None, buckets=1.0, bytes=4.0, optimizer_s=0.0, combine_s=0.0)
_WHOLE = ("depth", "width", "heads", "vocabulary", "context", "batch", "hidden")
_EXAMPLES = dict(params="such as 65e6", tokens="such as 1600")


def parse_pairs(text: str, keys: dict[str, float | None] = NUMBERS) -> dict[str, Any]:
    """Parse numbers such as `params=65e6,tokens=1600`; fill in defaults."""
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        key = "depth" if key == "layers" else key  # an alias
        if key in values:
            raise ValueError(f"--model: {key} is given twice; leave one out")
        if key not in keys:
            raise ValueError(f"--model: {key!r} is unknown; use some of {', '.join(keys)}, or a .json or .py file")
        values[key] = _number(key, value)
    return keys | values


def _number(key: str, text: str) -> float:
    """Parse the value of a key."""
    must, example = "a whole number of at least 1" if key in _WHOLE else "a number", _EXAMPLES.get(key, "")
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"--model: {key}={text!r} must be {must}" + (f", {example}" if example else "")) from None
    if key in _WHOLE and not (number.is_integer() and number >= (0 if key == "hidden" else 1)):  # 0: 4·width
        raise ValueError(f"--model: {key}={text.strip()} must be {must}")
    return profile.check_number(f"--model: {key}", number)


def times_of(values: dict[str, Any], cluster: costmodel.Cluster, compute_s: float | None) -> tuple[float, float]:
    """Return (forward_s, backward_s): as given, or 1/3 and 2/3 of a step's time, which may follow from tokens and flops."""
    times = {name: values[name] for name in ("forward_s", "backward_s") if values[name] is not None}
    if compute_s is not None and times:
        raise ValueError(f"--compute_s={compute_s:g} and --model: {', '.join(times)} both set the time of a step; give one")
    if len(times) == 2:
        return times["forward_s"], times["backward_s"]
    if compute_s is None and not times and values["tokens"] and cluster.flops:
        compute_s = 6 * values["params"] * values["tokens"] / cluster.flops
    if compute_s is None:
        raise ValueError(
            "--model: the compute time of a step is missing; give forward_s and backward_s, --compute_s, or tokens and a profile with flops"
        )
    return compute_s / 3, 2 * compute_s / 3


def check_parameters(values: dict[str, Any]) -> None:
    """Raise a ValueError unless the number of parameters is positive."""
    if values["params"] is None:
        raise ValueError("--model: params is missing; give the number of parameters, such as params=65e6, or a config")
    if values["params"] <= 0:
        raise ValueError(f"--model: params={values['params']} must be a positive number of parameters, such as 65e6")


def make_workload(values: dict[str, Any], cluster: costmodel.Cluster, compute_s: float | None) -> costmodel.Workload:
    """Make a workload from the numbers of --model."""
    values = NUMBERS | values
    check_parameters(values)
    forward_s, backward_s = times_of(values, cluster, compute_s)
    buckets = int(values["buckets"])
    if buckets != values["buckets"] or not 1 <= buckets <= profile.MAX_BUCKETS:
        raise ValueError(f"--model: buckets={values['buckets']:g} must be a whole number from 1 to {profile.MAX_BUCKETS}")
    return costmodel.Workload(
        forward_s,
        (backward_s / buckets,) * buckets,
        (values["params"] * values["bytes"] / buckets,) * buckets,
        optimizer_s=values["optimizer_s"],
        combine_s=values["combine_s"],
    )


def make_transformer(values: dict[str, float]) -> costmodel.Transformer:
    """Make a transformer from the sizes of --model."""
    sizes = {key: value for key, value in values.items() if key not in ("tied", "bytes")}
    for key, value in sizes.items():
        if value is None or not float(value).is_integer():
            problem = f"{key} is missing" if value is None else f"{key}={value} must be a whole number"
            raise ValueError(
                f"--model: {problem}; write it as in depth=52,width=1920,heads=24,vocabulary=51200,context=1024,batch=512"
            )
    sizes = {key: int(value) for key, value in sizes.items()}
    if values["tied"] not in (0, 1):
        raise ValueError(f"--model: tied={values['tied']:g} must be 0 or 1")
    num_bytes = profile.check_number("--model: bytes", values["bytes"], profile.Rate)
    return costmodel.Transformer(
        batch_size=sizes.pop("batch"),
        tied=bool(values["tied"]),
        value_bytes=num_bytes,
        gradient_bytes=num_bytes,
        parameter_bytes=4 + (num_bytes if num_bytes < 4 else 0),
        **sizes,
    )
