"""Methods for workers with different data, which reduce or remove the bias of gossip.

tracking         gradient tracking: methods "tracking", "mc_dsgt" and "gt_nsgdm"; BEER is "tracking" with mixer "beer"
exact_diffusion  exact diffusion and D²: methods "exact_diffusion" and "d2"
mixed_momentum   momenta of mixed parameters: methods "qg_dsgdm", "qg_dadam" and "decentlam"
"""

from decjax.contrib.corrections.exact_diffusion import D2, ExactDiffusion
from decjax.contrib.corrections.mixed_momentum import DecentLaM, QGDAdam, QGDSGDm
from decjax.contrib.corrections.tracking import MCDSGT, GTNSGDm, Tracking, TrackState, track, tracked_exchange

__all__ = [
    "D2",
    "DecentLaM",
    "ExactDiffusion",
    "GTNSGDm",
    "MCDSGT",
    "QGDAdam",
    "QGDSGDm",
    "TrackState",
    "Tracking",
    "track",
    "tracked_exchange",
]
