"""Allocation of workers, threads and samples from measured rates.

Everything here is pure arithmetic: no Ray, clock, thread or I/O. Rates come in as numbers or as curves (`throughput`).
Results are counts, usually with one sentence that explains them.

- `throughput`: total rate against the number of workers, threads or readers, given or fitted to measurements.
- `bandwidth`: read time from each storage tier, and the read-ahead depth (NoPFS).
- `workers`, `lending`: prep workers of concurrent feeds (A-Dloader).
- `headroom`: default number of prep workers of a feed, which leaves CPUs to trials.
- `threads`, `tuning`: fetch and prep threads of one machine, and threads between the queues of ranks (Lobster).
- `balance`: samples of a minibatch between the ranks of a data-parallel trial, by locality.
- `weights`: each node's share of the samples, by its speed.
- `forms`: shares of a node's samples to cache encoded and decoded, in memory and on disk.
- `scaling`: number of prep workers of the cluster.
"""
