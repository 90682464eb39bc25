"""How fast a machine is now, against when its rates were measured: others may use it, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from mbaas.analysis.measuring.prep import Blocks, made_of, subset
from mbaas.analysis.measuring.service import Workload
from mbaas.analysis.rates import Rates
from mbaas.messages import EngineName
from mbaas.prep.engines import make_engine

MOST_SAMPLES = 512
"""So many samples are prepared at most: a random few of a dataset may take longer than its mean."""

WARM_S = 0.2
"""For so long nothing is counted: after a pause a core is slower by a few percent."""

WINDOW_S = 0.5
"""What counts of each look takes about this long."""


class Pace:
    """Prepares samples from memory, as P was measured, with one thread; a context manager.

    Args:
        workload: what trials train on.
        rates: of which P says how fast the machine was.
        engine: with which P was measured. If that is not the cpu engine, which is always used here, the first look
            says how fast the machine was.
        clock: in seconds.
    """

    def __init__(
        self,
        workload: Workload,
        rates: Rates,
        engine: EngineName = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        raw = subset(workload.dataset, samples=MOST_SAMPLES)
        made = made_of(raw, workload.pipeline, 0)
        self._engine = make_engine("cpu", workload.pipeline, seed=0)
        self._blocks = Blocks(raw, self._engine, made)
        self._expected_per_s = 1.0
        self.now()  # loads code, and touches memory
        count, rate = rates.prep.points[0]
        self._expected_per_s = rate.value / count if engine == "cpu" else self.now()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.close()

    def now(self) -> float:
        """Measure how many times as fast as then the machine is."""
        self._prepare(WARM_S)
        return self._prepare(WINDOW_S) / self._expected_per_s

    def _prepare(self, seconds: float) -> float:
        """Return the samples/s of one thread that prepares for some time."""
        done, began = 0, self._clock()
        while self._clock() < began + seconds:
            done += self._blocks.prepare()
        return done / (self._clock() - began)
