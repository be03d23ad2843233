"""Converts configs of older runs, whose sections held the fields of all parts, to today's form; tested on files of old runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from decjax import registry

OWN = {
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "accum_adamw": ("b1", "b2", "eps", "weight_decay", "window"),
    "sgdm": ("momentum", "weight_decay"),
    "sign": ("weight_decay",),
}
CODED = ("codec", "form", "error", "decay", "momentum", "storage")
REDUCERS = {
    "mean": (),
    "powersgd": ("rank", "gate", "wire_dtype"),
    "codec": CODED,
    "demo": CODED,
    "onebit_adam": CODED,
    "gravac": ("ladder", "window", "threshold"),
}
MIXERS = dict.fromkeys(("choco", "deepsqueeze", "beer", "push_sum"), ("codec", "gamma", "rounds")) | {
    "exact": ("codec", "rounds"),
    "dcd": ("codec",),
    "power_gossip": ("rank",),
    "accelerated": ("rounds",),
}
BOUNDARY = {"backward": ("when", "error"), "forward": ("forward_error", "slots", "reuse_indices")}
LATER = {"consensus_first": 0, "consensus_last": 0, "tensor_codec": ""}  # what older configs lack: none of it
KEPT = (
    *"seed workers local_size simulate batch_size steps tensor engine bucket_bytes consensus_every".split(),
    *"log_every eval checkpoint elastic".split(),
)


def modern(document: Mapping[str, Any]) -> dict[str, Any]:
    """The config in today's form; one that has that form already gets the fields that it lacks."""
    document = {**LATER, "elastic": {}, **document}
    if "mixing" not in document:
        return document
    absent = {"tensor": 1, "boundary": {}, "pipeline": {"stages": 1, "microbatches": 1}, "stale": False}
    old: dict[str, Any] = {**absent, **document}
    optimizer, method = old["optimizer"], old["method"]
    new = _only(old, (*KEPT, *LATER)) | {
        "task": "lm",
        "data": old["data"] | {"sample_bytes": old["sample_bytes"]},
        "model": {"name": "decoder", **old["model"]},
        "clip_norm": optimizer["clip_norm"],
        "schedule": {"name": "cosine", **_only(optimizer, ("learning_rate", "warmup_steps", "final_fraction"))},
    }
    staged = old["pipeline"]["stages"] > 1
    new["pipeline"] = dict(old["pipeline"]) if staged else _only(old["pipeline"], ("stages", "microbatches"))
    for codec, own in BOUNDARY.items():
        if old["boundary"].get(codec):
            new.setdefault("boundary", {}).update(_only(old["boundary"], (codec, *own)))
    if method == "allreduce" and old["reducer"]["name"] == "onebit_adam":
        method = "onebit_adam"
        new["method"] = {"name": method, **_only(optimizer, OWN["adamw"])}
    else:
        new["optimizer"] = {"name": optimizer["name"], **_only(optimizer, OWN[optimizer["name"]])}
    if method == "decentralized":
        new |= _gossip(old)
    elif method == "allreduce":
        new["method"] = {"name": method, "stale": old["stale"]}
    elif method in ("diloco", "sparseloco"):
        outer = old["outer"]
        rate, momentum = outer["learning_rate"], outer["momentum"]
        new["method"] = {"name": method, "every": outer["every"], "outer_learning_rate": rate, "outer_momentum": momentum}
    elif method == "local":
        new["method"] = {"name": method}
    if method not in ("decentralized", "local"):
        new["reducer"] = _reducer(old["reducer"], staged)
    return new


def _only(section: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: section[name] for name in names if name in section}


def _gossip(old: Mapping[str, Any]) -> dict[str, Any]:
    mixing, graph = old["mixing"], old["topology"]
    name = "accelerated" if mixing["accelerated"] else mixing["mixer"]
    mixer = {"name": name, **_only(mixing, MIXERS[name])}
    # Formerly "" stood for no codec, and γ = 0 for the codec's own value; both are None now.
    mixer |= {field: mixer[field] or None for field in ("codec", "gamma") if field in mixer}
    method = {
        "name": "tracking" if name == "beer" else "decentralized",
        **_only(mixing, ("order", "every", "strength", "strength_power", "static_phase")),
    }
    return {"method": method, "mixer": mixer, "topology": _topology(graph["name"], graph["options"])}


def _topology(name: str, options: str) -> str:
    """The topology as a text with its options; options of an inner graph, formerly the outer one's, are moved into it."""
    if not options:
        return name
    _, given = registry.parse("topology", f"{name}({options})")
    if "local" in given:
        given["local_size"] = given.pop("local")
    known = registry.part("topology", name).options
    inner = next((option for option in ("outer", "base") if option in known), None)
    own = {option: value for option, value in given.items() if option in known}
    if inner and (rest := {option: value for option, value in given.items() if option not in known}):
        own[inner] = registry.call(own.get(inner, known[inner].default), rest)
    return registry.call(name, own)


def _reducer(given: Mapping[str, Any], staged: bool) -> dict[str, Any]:
    name = given["name"]
    own = _only(given, REDUCERS[name])
    own |= {field: own[field] or None for field in ("storage", "wire_dtype") if field in own}
    around = {} if name == "mean" else {"start": given["start"]}
    if staged and name not in ("mean", "gravac"):
        around |= _only(given, ("stages", "cluster"))
    return {"name": "codec" if name == "onebit_adam" else name, **own, **around}
