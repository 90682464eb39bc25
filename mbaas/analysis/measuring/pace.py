"""Speed of a machine relative to the time when its rates were measured: it may be shared."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from mbaas.analysis.measuring.prep import Blocks, made_of, subset
from mbaas.analysis.measuring.service import Workload
from mbaas.prep.engines import make_engine

MOST_SAMPLES = 512
"""Largest number of samples: a small random subset could be slower than the dataset's mean."""

WARM_S = 0.2
"""Warm-up that does not count: after a pause, a core is a few percent slower."""

WINDOW_S = 1.0
"""Approximate time that counts in each measurement."""


class MachineSpeed:
    """Prepares samples from memory with the cpu engine on all cores; a context manager.

    It uses all cores because the predicted feeds keep them busy, and one core's speed does not predict theirs. On a
    virtual machine with two cores, P with two workers was 1.6 to 2.3 times P with one (three analyses on 27 November
    2026). ``usual_per_s`` is the reference in samples/s, the first measurement until it is set.

    Raises:
        BadSampleError: no sample can be read, or prepared.
    """

    def __init__(self, workload: Workload, cores: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        raw = subset(workload.dataset, samples=MOST_SAMPLES)
        made = made_of(raw, workload.pipeline, 0)
        self._engine = make_engine("cpu", workload.pipeline, seed=0, threads=cores)
        self._blocks = Blocks(raw, self._engine, made)
        self.measure()  # loads code and touches memory
        self.usual_per_s = self.measure()

    def __enter__(self) -> MachineSpeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.close()

    def measure(self) -> float:
        """Measure the samples/s that the machine prepares now."""
        self._prepare(WARM_S)
        return self._prepare(WINDOW_S)

    def relative(self) -> float:
        """Measure the machine's speed relative to ``usual_per_s``."""
        return self.measure() / self.usual_per_s

    def _prepare(self, seconds: float) -> float:
        done, began = 0, self._clock()
        while self._clock() < began + seconds:
            done += self._blocks.prepare()
        return done / (self._clock() - began)
