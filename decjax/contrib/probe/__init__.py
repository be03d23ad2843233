"""A probe of lazy error propagation: how compression errors relate to the changes between messages of pipeline stages."""

from decjax.contrib.probe.boundary import Probe, Probed

__all__ = ["Probe", "Probed"]
