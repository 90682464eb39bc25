"""NoPFS's simulator, extended: how long training takes under each way to load data, and where the time goes.

Inputs are a `System`: from a preset (`catalog`), a YAML file (`files`) or measured rates (`system_of`). `simulate`
runs policies on it, `sweep` one of them over two parameters. `frequency`, `imbalance` and `hit_fractions` answer single
questions.
"""

from __future__ import annotations

from mbaas.allocation.bandwidth import Staging, StorageClass
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.analysis.simulator.frequency import Frequency, frequency
from mbaas.analysis.simulator.hit_rates import hit_fractions, lru_fraction
from mbaas.analysis.simulator.imbalance import Imbalance, imbalance
from mbaas.analysis.simulator.machine import Cores, Machine
from mbaas.analysis.simulator.policies import POLICIES
from mbaas.analysis.simulator.simulation import Outcome, locations_of, policies_of, simulate
from mbaas.analysis.simulator.sweep import Axis, Sweep, sweep
from mbaas.analysis.simulator.system import System, system_of
from mbaas.analysis.simulator.workload import DatasetShape, Training

__all__ = [
    "POLICIES",
    "Axis",
    "Cores",
    "DatasetShape",
    "Frequency",
    "Imbalance",
    "Machine",
    "Outcome",
    "Staging",
    "StorageClass",
    "Sweep",
    "System",
    "ThroughputCurve",
    "Training",
    "frequency",
    "hit_fractions",
    "imbalance",
    "locations_of",
    "lru_fraction",
    "policies_of",
    "simulate",
    "sweep",
    "system_of",
]
