"""NoPFS's simulator, extended: training time under each way of loading data, broken down by cause.

The input is a `System`: a preset or a YAML file (`catalog`), or measured rates (`system_of`). `simulate` runs policies
on it, and `sweep` runs one policy over two parameters. `chance` answers single questions.
"""

from __future__ import annotations

from mbaas.tools.simulator.policies import POLICIES
from mbaas.tools.simulator.simulation import simulate, sweep
from mbaas.tools.simulator.system import system_of

__all__ = ["POLICIES", "simulate", "sweep", "system_of"]
