"""Analysis of training pipelines: models, measurements, the simulator and the planner.

Models are pure functions of plain numbers, separate from the code that measures.

- `analyze`, `analyze_feed`: complete analysis of a `Workload` on this machine, or of a running feed.
- `Quantity`, `Rates`, `Setup`: a number with its interval, measured rates, and the parameters to vary.
- `predict`, `curve`, `smallest_cache`, `fewest_prep_cores`, `bottleneck`: predictions and sufficient amounts.
- `recommend`, `offers`, `verdict`: worthwhile changes, machines to rent, and a summary sentence.
- `mbaas.tools.simulator`: the simulator of NoPFS, extended.
- `mbaas.tools.plan`: workers, threads, caches and nodes for several jobs.
- `mbaas.tools.analysis.report`: the report page and its charts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mbaas.base.imports import imported_late
from mbaas.model.curves import MeasuredCurve
from mbaas.model.pace import bottleneck, curve, fewest_prep_cores, predict, smallest_cache
from mbaas.model.quantity import Quantity, measured, stated
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import MachineType, offers, recommend, verdict

if TYPE_CHECKING:
    from mbaas.tools.analysis.measuring.service import Workload
    from mbaas.tools.analysis.whole import analyze, analyze_feed

__all__ = [
    "MachineType",
    "MeasuredCurve",
    "Quantity",
    "Rates",
    "Setup",
    "Workload",
    "analyze",
    "analyze_feed",
    "bottleneck",
    "curve",
    "fewest_prep_cores",
    "measured",
    "offers",
    "predict",
    "recommend",
    "smallest_cache",
    "stated",
    "verdict",
]

# Modules that measure import Ray, which models do not need, so they are imported on first use.
__getattr__ = imported_late(
    __name__,
    {
        "Workload": "mbaas.tools.analysis.measuring.service",
        "analyze_feed": "mbaas.tools.analysis.whole",
        "analyze": "mbaas.tools.analysis.whole",
    },
)
