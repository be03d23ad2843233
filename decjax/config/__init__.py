"""From a config to the parts of a run; modules outside of this package take plain values and no `ConfigDict`.

    resolve    `resolve(config) -> RunSpec`: makes all checks that need no device, and fills in what is automatic
    assemble   `build(spec, devices) -> Setup`: places the parts on devices and reads the data
    spec       `RunSpec`, a run as plain values
    sections   the section of a config that belongs to a part, from the part's signature
    legacy     configs of older runs, converted to today's form
    selective  how many stages of a pipeline should compress

A config that describes no possible run raises a `ConfigError`, which names in one line the value, the constraint and the fix.
"""

from decjax.config.assemble import Setup, build, check_memory
from decjax.config.resolve import Size, message_ratio, read, resolve, size
from decjax.config.sections import BOUNDARY, choose, section, tables
from decjax.config.selective import transformer
from decjax.config.spec import SIMULATED_WORKERS, Choice, Elastic, Layers, RunSpec
from decjax.errors import ConfigError

__all__ = [
    "BOUNDARY",
    "Choice",
    "ConfigError",
    "Elastic",
    "Layers",
    "RunSpec",
    "SIMULATED_WORKERS",
    "Setup",
    "Size",
    "build",
    "check_memory",
    "choose",
    "message_ratio",
    "read",
    "resolve",
    "section",
    "size",
    "tables",
    "transformer",
]
