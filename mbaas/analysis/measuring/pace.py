"""How fast a machine is now, against when its rates were measured: others may use it, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from mbaas.analysis.measuring.prep import Blocks, made_of, subset
from mbaas.analysis.measuring.service import Workload
from mbaas.prep.engines import make_engine

MOST_SAMPLES = 512
"""So many samples are prepared at most: a random few of a dataset may take longer than its mean."""

WARM_S = 0.2
"""For so long nothing is counted: after a pause a core is slower by a few percent."""

WINDOW_S = 1.0
"""What counts of each look takes about this long."""


class Pace:
    """Prepares samples from memory with the cpu engine on all cores; a context manager.

    On all, because what is predicted keeps all of them busy, and how fast one core is does not say it: on a virtual
    machine of two cores P with two workers was 1.6 to 2.3 times that with one (three analyses on 27 November 2026).

    Args:
        workload: what trials train on.
        cores: how many there are.
        clock: in seconds.

    Attributes:
        usual_per_s: samples/s at the pace to which others are compared; the first look's until it is set.

    Raises:
        BadSampleError: no sample can be read, or prepared.
    """

    def __init__(self, workload: Workload, cores: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        raw = subset(workload.dataset, samples=MOST_SAMPLES)
        made = made_of(raw, workload.pipeline, 0)
        self._engine = make_engine("cpu", workload.pipeline, seed=0, threads=cores)
        self._blocks = Blocks(raw, self._engine, made)
        self.look()  # loads code, and touches memory
        self.usual_per_s = self.look()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.close()

    def look(self) -> float:
        """Measure how many samples/s the machine prepares now."""
        self._prepare(WARM_S)
        return self._prepare(WINDOW_S)

    def now(self) -> float:
        """Measure how many times as fast as usually the machine is."""
        return self.look() / self.usual_per_s

    def _prepare(self, seconds: float) -> float:
        """Prepare for some time, and return the samples/s."""
        done, began = 0, self._clock()
        while self._clock() < began + seconds:
            done += self._blocks.prepare()
        return done / (self._clock() - began)
