"""Plan of a cluster for several searches and jobs: prep workers, threads, caches, nodes. Pure arithmetic.

The running service decides from live measurements. `planner` decides in advance from measured or stated rates, with the
same functions: `mbaas.model`.

- `jobs`: inputs, as frozen values that validate themselves.
- `planner`: the plan for a number of nodes, and the choice of that number.
- `supply`: capacities of the nodes, contents of the caches, rates of caches, storage and network for each job.
"""
