"""S: how fast samples come from storage, read at random, by so many readers at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.measuring.effort import Effort, repeated
from mbaas.analysis.measuring.portion import local_spans
from mbaas.analysis.measuring.residency import drop, resident_share
from mbaas.analysis.quantity import Quantity, stated
from mbaas.analysis.rates import MeasuredCurve
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError

READERS = (1, 2, 4, 8, 16)

COLD = 0.02
"""Storage counts as cold if at most this share of what is to be read is in the page cache."""


@dataclass(frozen=True)
class StorageRate:
    """S, and whether it is the storage's.

    Attributes:
        curve: samples/s against readers.
        cpu_s: CPU seconds of this process for a sample, with as many readers as were fastest.
        resident: the largest share of what was to be read that lay in the page cache although it had been dropped;
            None where that cannot be known, as for remote storage, which may have a cache of its own.
    """

    curve: MeasuredCurve
    cpu_s: Quantity
    resident: float | None

    @property
    def note(self) -> str | None:
        """What makes the rate doubtful, in a sentence; None if nothing does."""
        if self.resident is None:
            return "whether storage was cold cannot be known here; if it has a cache of its own, S is too high"
        if self.resident > COLD:
            return (
                f"storage could not be made cold: {self.resident:.0%} of what was read lay in the page cache, so S is "
                "too high"
            )
        return None


def storage_rate(dataset: Dataset, effort: Effort, *, readers: Sequence[int] = READERS, seed: int = 0) -> StorageRate:
    """Reads random samples, dropped from the page cache before, in windows of `Effort.window_s`.

    A window reads samples that no window before it has read, as long as there are such.

    Raises:
        ConfigError: no readers, or counts that do not ascend from 1.
        BadSampleError: a sample cannot be read.
    """
    if not readers or list(readers) != sorted(set(readers)) or readers[0] < 1:
        raise ConfigError(f"readers must ascend from at least 1, got {list(readers)}")
    order = np.random.default_rng(seed).permutation(len(dataset))
    reading = _Reading(dataset, order)
    points, costs = [], []
    for count in readers:
        with ThreadPoolExecutor(count, thread_name_prefix="mbaas-measure") as threads:
            window = _Window(reading, threads, count, effort.window_s)
            points.append((float(count), repeated(window.rate, effort, unit="samples/s")))
            costs.append(window.cpu_s)
    fastest = max(range(len(points)), key=lambda i: points[i][1].value)
    return StorageRate(MeasuredCurve(tuple(points)), stated(costs[fastest], unit="CPU-s"), reading.resident)


class _Reading:
    """Random samples in turn, cold.

    Attributes:
        resident: the largest share of a window that was not cold.
    """

    def __init__(self, dataset: Dataset, order: NDArray[np.int64]) -> None:
        self._dataset, self._turns = dataset, cycle(order.tolist())
        self._lengths = dataset.lengths(np.arange(len(dataset)))
        self.reader = dataset.reader()
        self.most = len(order)
        self.resident: float | None = 0.0 if local_spans(dataset, [0]) else None

    def next(self, count: int) -> list[int]:
        """The next samples, dropped from the page cache."""
        ids = [next(self._turns) for _ in range(min(count, self.most))]
        if self.resident is not None:
            spans = local_spans(self._dataset, ids)
            drop(spans)
            self.resident = max(self.resident, resident_share(spans) or 0.0)
        return ids

    def read(self, ids: Sequence[int]) -> None:
        for sample in ids:
            self.reader.read_into(sample, np.empty(int(self._lengths[sample]), np.uint8))


class _Window:
    """Measurements with one number of readers; each is as large as the last one's rate says.

    Attributes:
        cpu_s: CPU seconds of this process for a sample, in all windows so far.
    """

    def __init__(
        self,
        reading: _Reading,
        threads: ThreadPoolExecutor,
        readers: int,
        window_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._reading, self._threads, self._readers = reading, threads, readers
        self._window_s, self._clock = window_s, clock
        self._count = 2 * readers
        self._samples, self._cpu_s = 0, 0.0

    @property
    def cpu_s(self) -> float:
        return self._cpu_s / max(self._samples, 1)

    def rate(self) -> float:
        """Samples/s of one window."""
        ids = self._reading.next(self._count)
        began, busy = self._clock(), time.process_time()
        list(self._threads.map(self._reading.read, [ids[i :: self._readers] for i in range(self._readers)]))
        rate = len(ids) / max(self._clock() - began, 1e-9)
        self._count = max(2 * self._readers, round(rate * self._window_s))
        self._samples, self._cpu_s = self._samples + len(ids), self._cpu_s + time.process_time() - busy
        return rate
