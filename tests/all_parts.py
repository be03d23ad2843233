"""All parts, imported: reading a config would import them."""

from decjax import registry

for kind in registry.KINDS:
    registry.names(kind)
