"""Elastic runs: workers that die, freeze or are cut off are left out, and whoever comes back takes part again, without a restart.

coordinator   decides who takes part; holds no model
membership    a member's side of it
view          who takes part from a step on
keys          who may connect to a coordinator or a member
transport     messages between members, over ZeroMQ
collectives   those of JAX, on NumPy arrays
programs      a worker's function cut at its messages
workers       the workers of a view, as `mesh.Workers`
trainer       `train.Trainer` of a member
members       the group as the `train.Members` of a run
"""
