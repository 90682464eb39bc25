"""Where the time goes, and what would help: models, measurements, the simulator and the planner.

Models are pure and take plain numbers; what measures is apart from them.

- `analyze`, `analyze_feed`: the whole answer, for a workload on this machine or for a feed that runs; `Workload`.
- `Quantity`, `Rates`, `Setup`: a number with its interval, what was measured, and what a question may change.
- `predict`, `curve`, `smallest_cache`, `fewest_prep_cores`, `bottleneck`, `recommend`, `offers`, `verdict`: what would
  be, how much is enough, what to do, which machines to rent, and all of it in a sentence.
- `mbaas.analysis.simulator`: NoPFS's simulator, extended.
- `mbaas.analysis.plan`: workers, threads, caches and nodes for several jobs.
- `mbaas.analysis.report`: the page and the pictures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mbaas.analysis.answers import bottleneck, curve, fewest_prep_cores, smallest_cache
from mbaas.analysis.changes import MachineType, offers, recommend, verdict
from mbaas.analysis.quantity import Quantity, measured, stated
from mbaas.analysis.rates import MeasuredCurve, Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.whatif import predict
from mbaas.late import imported_late

if TYPE_CHECKING:
    from mbaas.analysis.live import analyze_feed
    from mbaas.analysis.measuring.service import Workload
    from mbaas.analysis.whole import analyze

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

# What measures, and Ray with it, is imported when it is first used: models need neither.
__getattr__ = imported_late(
    __name__,
    {
        "Workload": "mbaas.analysis.measuring.service",
        "analyze_feed": "mbaas.analysis.live",
        "analyze": "mbaas.analysis.whole",
    },
)
