"""Plan a cluster for several searches and jobs: prep workers, threads, caches, nodes. It is pure arithmetic.

What the running service decides from measurements, `planner` decides ahead from measured or stated rates, with the same
functions: `mbaas.allocation`.

- `jobs`: what is asked for, as plain frozen values that check themselves.
- `planner`: the plan on a given number of nodes, and the number of nodes.
- `supply`: what the nodes have room for, which dataset is kept where, what caches, storage and network give each job.
- `result`: the plan, what limits each job, and its JSON.
"""
