"""From a config to the parts of a run; modules outside of this package take plain values and no `ConfigDict`.

    spec       `RunSpec`, a run as plain values: declares every field of a config
    resolve    `resolve(config) -> RunSpec`: reads the fields, and decides what is automatic
    rules      conditions across fields
    setup      `Setup`, the parts of a run, which `Setup.place` places on devices
    sections   the sections of a config, for the files in configs/

A config that describes no possible run raises a `ConfigError`, which names in one line the value, the constraint and the fix.
"""

from decjax.config.resolve import Size, message_ratio, read, resolve, size
from decjax.config.sections import choose, defaults, pretrained, section
from decjax.config.setup import Setup
from decjax.config.spec import SECTIONS, SIMULATED_WORKERS, Choice, Elastic, RunSpec, plain_fields, shorthand_keys
from decjax.errors import ConfigError

__all__ = [
    "Choice",
    "ConfigError",
    "Elastic",
    "RunSpec",
    "SECTIONS",
    "SIMULATED_WORKERS",
    "Setup",
    "Size",
    "choose",
    "defaults",
    "message_ratio",
    "plain_fields",
    "pretrained",
    "read",
    "resolve",
    "section",
    "shorthand_keys",
    "size",
]
