"""What a compiled step computes while a message travels, read from its schedule."""

from decjax.contrib.overlap.report import InFlight, Overlap, read

__all__ = ["InFlight", "Overlap", "read"]
