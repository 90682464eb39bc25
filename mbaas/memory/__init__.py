"""Memory of prepared blocks, and its budgets.

`budgets`      the memory of each node that a feed may use; pure
`part_memory`  the memory of a part of a block: an object in Ray's store, or a slot
`slots`        shared memory of a worker, which consumers of its node map
`pinned`       page-locked memory, and copies between it and GPUs, through the CUDA driver
"""
