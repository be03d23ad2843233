"""Communication graphs of decentralized training, as periodic schedules of mixing rounds. NumPy only, no JAX.

A round multiplies the stacked parameters of all workers by a stochastic matrix W. It is stored in the form in which it runs: an exact
mean over groups of consecutive workers (one group is a *node*), then a self weight and a few weighted partial permutations between
nodes, each of which is one `lax.ppermute`; see `Round`. All-reduce is one group of all workers.
"""

from decjax.topology.build import MAX_WORKERS, make, names, options
import decjax.topology.graphs  # Registered first, its names come first in tables.
from decjax.topology.schedule import (
    Round,
    Shift,
    Topology,
    from_matrices,
    is_column_stochastic,
    is_doubly_stochastic,
    is_mixing,
    is_row_stochastic,
    rounds_to_exact,
    spectral_gap,
)

__all__ = ["MAX_WORKERS", "Round", "Shift", "Topology", "from_matrices", "make", "names", "options"]
__all__ += ["is_column_stochastic", "is_doubly_stochastic", "is_mixing", "is_row_stochastic", "rounds_to_exact", "spectral_gap"]
