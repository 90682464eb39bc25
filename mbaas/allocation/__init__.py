"""Decides from measured rates who gets how many workers, threads and samples: pure arithmetic.

There is no Ray, clock, thread or I/O here. Rates come in as numbers or as curves (`throughput`); what comes out are
counts and, where a person would ask why, one sentence.

- `throughput`: how fast workers, threads or readers are together, known or fitted to measurements.
- `bandwidth`: how long bytes take from each tier where samples lie, and how far to read ahead (NoPFS).
- `workers`, `lending`: prep workers between concurrent feeds (A-Dloader).
- `headroom`: how many prep workers a feed begins with, so that trials have room.
- `threads`, `tuning`: fetch and prep threads of one machine, threads between the queues of ranks (Lobster).
- `balance`: the samples of a minibatch between the ranks of a data-parallel trial, by locality.
- `weights`: the shares of samples that nodes have, by their speed.
- `forms`: what share of its samples a node keeps encoded and decoded, in memory and on disk.
- `scaling`: how many prep workers the cluster should have.
"""
