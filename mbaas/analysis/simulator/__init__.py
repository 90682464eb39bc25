"""NoPFS's simulator, extended: how long training takes under each way to load data, and where the time goes.

The input is a `System`: a preset or a YAML file (`catalog`), or measured rates (`system_of`). `simulate` runs policies
on it, `sweep` runs one of them over two parameters. `frequency`, `imbalance` and `hit_fractions` answer single
questions.

- `system`: the machines, the dataset and the training that are simulated.
- `model`: how long fetching, preparing and training take; `world`: the orders, and who reads what from where.
- `policies`: the ways to load data; `simulation`: runs them; `sweep`: over parameters.
- `caches`, `chance`: what caches hit, and what random orders do.
- `report`, `figures`: results as JSON and tables, and as plots.
"""

from __future__ import annotations

from mbaas.allocation.bandwidth import StagingClass, StorageClass
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.analysis.simulator.caches import hit_fractions
from mbaas.analysis.simulator.chance import Frequency, Imbalance, frequency, imbalance
from mbaas.analysis.simulator.policies import POLICIES
from mbaas.analysis.simulator.simulation import Outcome, locations_of, policies_of, simulate
from mbaas.analysis.simulator.sweep import Axis, Sweep, sweep
from mbaas.analysis.simulator.system import Cores, DatasetShape, Machine, System, Training, system_of

__all__ = [
    "POLICIES",
    "Axis",
    "Cores",
    "DatasetShape",
    "Frequency",
    "Imbalance",
    "Machine",
    "Outcome",
    "StagingClass",
    "StorageClass",
    "Sweep",
    "System",
    "ThroughputCurve",
    "Training",
    "frequency",
    "hit_fractions",
    "imbalance",
    "locations_of",
    "policies_of",
    "simulate",
    "sweep",
    "system_of",
]
