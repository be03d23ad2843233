"""Imports every module that registers parts; otherwise reading a config would import them."""

from decjax import registry

for kind in registry.KINDS:
    registry.names(kind)
