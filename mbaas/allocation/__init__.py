"""Who gets how many: workers, threads and samples, decided from measured rates. Pure arithmetic.

No Ray, clock, thread or I/O. Rates come in as numbers or as curves (`rates`, fitted to measurements by `fitting`);
what comes out are counts and, where a person would ask why, one sentence.

- `workers`: prep workers between concurrent feeds (A-Dloader).
- `threads`, `queues`: fetch and prep threads of one machine, threads between the queues of ranks (Lobster).
- `balance`: the samples of a minibatch between the ranks of a data-parallel trial, by locality.
- `scaling`: how many prep workers the cluster should have.
"""
