"""The cache: encoded samples in the object store of each node, read from storage once.

`node` has the actor, one to a Ray node, and `reader` is how a process of that node, or of another, reads from it.
`planner` decides, and knows nothing of Ray, clocks or threads.
"""
