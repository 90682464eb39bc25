"""NoPFS's simulator, extended: training time under each way of loading data, broken down by cause.

The input is a `System`: a preset or a YAML file (`catalog`), or measured rates (`system_of`). `simulate` runs policies
on it, and `sweep` runs one policy over two parameters. `frequency`, `imbalance` and `hit_fractions` answer single
questions.

- `system`: machines, dataset and training; a system from measured rates. `catalog`: systems in files.
- `world`: times of fetching, preparing and training; orders, and which worker reads what from which tier.
- `policies`: ways of loading data; `simulation`: runs them, also over parameters.
- `chance`: hit rates of caches, and effects of random orders.
- `results`: results as JSON, tables and plots.
"""

from __future__ import annotations

from mbaas.tools.simulator.policies import POLICIES
from mbaas.tools.simulator.simulation import simulate, sweep
from mbaas.tools.simulator.system import system_of

__all__ = ["POLICIES", "simulate", "sweep", "system_of"]
