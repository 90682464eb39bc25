"""Plans a cluster for several searches and jobs: prep workers, threads, caches, nodes. Pure arithmetic.

What the running service decides from measurements, `planner` decides ahead from measured or stated rates, with the same
functions: `mbaas.allocation`.

- `jobs`: what is asked for, as plain frozen values that check themselves.
- `planner`: the plan on a given number of nodes, and the number of nodes.
- `caches`: which dataset is kept where.
- `supply`: what caches, storage and network give each job.
- `result`: the plan, and its JSON.
"""
