"""Plan of a cluster for several searches and jobs: prep workers, threads, caches, nodes. Pure arithmetic.

The running service decides from live measurements. `planner` decides in advance from measured or stated rates, with the
same functions: `mbaas.model`.
"""
