"""The model of a feed's speed, and the decisions that follow from it. Pure: no Ray, clock, thread or I/O.

- `curves`: rate against the number of workers, threads or readers, given or fitted to measurements.
- `tiers`: read time from each storage tier, and the read-ahead depth (NoPFS).
- `forms`: shares of a node's samples to cache encoded and decoded, in memory and on disk.
- `gpu_stages`: the stage at which samples cross to the GPU.
- `threads`: fetch and prep threads of a machine, and threads between the queues of ranks (Lobster).
- `scaling`: number of prep workers of the cluster, and the machines that are released.
- `lending`: prep workers of concurrent feeds (A-Dloader), and the default number of a feed.
- `weights`: each node's share of the samples, by its speed.
- `balance`: samples of a minibatch between the ranks of a data-parallel trial, by locality.
"""
