"""Elastic runs: workers that die, freeze or are cut off are removed from the group, and can rejoin it without a restart.

coordinator   decides who takes part; holds no model
membership    a process's membership in a group
view          the members that train together from a step on
keys          authentication of connections
transport     messages between members, over ZeroMQ
collectives   JAX's collectives on NumPy arrays
programs      a worker's function, split at its messages
workers       the workers of a view, as `mesh.Workers`
trainer       the `train.Trainer` of a member
members       the group, as the `train.Members` of a run
"""
