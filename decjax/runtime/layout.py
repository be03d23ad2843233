"""How long an iteration takes in three dimensions: workers × stages × tensor, under a pipeline schedule.

A worker is a pipeline of S stages, a stage K devices of the tensor axis. Every stage works through its operations in the
schedule's order. With F and B the forward and backward pass of chunk c on microbatch m, c* the chunk the input comes from
(c − 1 in F, c + 1 in B) and end* the end of the operation before it on the same stage,

    start = max(end*, arrival of the message from c*) + decode
    end   = start + time of F or B + encode
    arrival elsewhere = max(end, out of the stage is free) + bytes·β⁻¹ + α + gather          messages leave one by one

so that a bubble is nothing but waiting. F and B hold their all-reduces over the tensor axis. When the last backward pass of a
stage is done, its gradients are exchanged with those of other workers, while earlier stages still compute; stages that leave
through the same NIC take turns. The optimizer waits for all stages, since the gradient is clipped by its norm over all.
Gossip is of parameters, and takes the iteration ("awc") or what comes behind it ("atc"), as in `runtime.model`.

Devices are numbered through the nodes: the tensor axis innermost, then the stages (`inner="stage"`) or the workers. Nothing is
random here, and all workers are alike. Messages of different axes that meet on a NIC are not told to slow each other down,
apart from those named.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from decjax.runtime import model as model_lib
from decjax.runtime.exchange import exchange_cost, mean_cost, messages_cost
from decjax.runtime.model import GRADIENTS, Method
from decjax.runtime.profile import Cluster, check_count, check_number
from decjax.runtime.transformer import KEPT, Transformer
