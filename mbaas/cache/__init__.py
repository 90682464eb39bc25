"""The cache: samples in each node's object store, read from storage once.

`node` contains the actor, one per Ray node. `reader` reads from it, on the same or another node. `planner` makes the
decisions, without Ray, clocks or threads.
"""
