"""How fast bytes come: S from cold storage, the rate of a disk tier's disk, and C from memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.measuring.effort import Effort, repeated
from mbaas.analysis.measuring.portion import Span, drop, local_spans, resident_share
from mbaas.analysis.measuring.prep import Raw
from mbaas.analysis.quantity import Quantity, stated
from mbaas.analysis.rates import MeasuredCurve
from mbaas.cache.disk.store import DiskStore
from mbaas.cache.slab import pack
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError

READERS = (1, 2, 4, 8, 16)

COLD = 0.02
"""Storage counts as cold if at most this share of what is to be read is in the page cache."""


DISK_READERS = 8
"""Threads that read a disk tier at once, as many as a cache node begins with."""

SHARE_SAMPLES = 16
"""Samples that a thread asks the disk tier for in one go."""

HELD_BYTES = 256 << 20
"""Much more than the caches of processors hold."""


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
            # samples go on where the last number of readers stopped: none is read twice before all have been
            window = _Window(reading, threads, count, effort.window_s)
            points.append((float(count), repeated(window.rate, effort, unit="samples/s")))
            costs.append(window.cpu_s)
    # CPU costs depend on how much readers wait for each other; predictions use as many readers as help
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


@dataclass(frozen=True)
class DiskRate:
    """What a disk gives.

    Attributes:
        rate: bytes/s of all readers together.
        resident: share of what was read that was in the page cache all the same; None: that cannot be known.
    """

    rate: Quantity
    resident: float | None

    @property
    def note(self) -> str | None:
        """What makes the rate doubtful, in a sentence; None if nothing does."""
        if self.resident is None or self.resident <= COLD:
            return None
        return (
            f"the disk could not be made cold: {self.resident:.0%} of what was read lay in the page cache, so its rate "
            "is too high"
        )


@contextmanager
def scratch(disk_path: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder of its own on the disk, gone afterwards: what feeds keep there is not touched.

    Raises:
        ConfigError: the disk cannot be written to.
    """
    try:
        Path(disk_path).mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(dir=disk_path, prefix="mbaas-analyze-")
    except OSError as error:
        raise ConfigError(f"the disk tier needs a folder that it may write to, got {disk_path}: {error}") from None
    with folder as name:
        yield Path(name)


def disk_rate(raw: Raw, disk_path: str | os.PathLike[str], effort: Effort, *, readers: int = DISK_READERS) -> DiskRate:
    """Keeps samples in a disk tier, and reads them back in windows of `Effort.window_s`.

    Raises:
        ConfigError: the disk cannot be written to, or has no room for the samples.
    """
    lengths = np.diff(raw.ends, prepend=0)
    with scratch(disk_path) as folder:
        tier = DiskStore(folder, 2 * len(raw.content), "analyze", num_samples=int(raw.sample_ids.max()) + 1)
        try:
            kept = tier.put(raw.sample_ids, lengths, raw.content)
            if not kept.all():
                why = tier.stats().write_failure or "there was no room"
                raise ConfigError(f"the disk tier at {disk_path} kept {kept.sum()} of {len(kept)} samples: {why}")
            with ThreadPoolExecutor(readers, thread_name_prefix="mbaas-measure") as threads:
                reading = _DiskReading(tier, raw.sample_ids, lengths, spans_of(folder), threads, readers)
                rate = repeated(lambda: reading.rate(effort.window_s), effort, unit="bytes/s")
        finally:
            tier.close()
    return DiskRate(rate, reading.resident)


def spans_of(folder: Path) -> list[Span]:
    """All files below a folder, written to the disk so that they can be dropped from the page cache."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return [Span(str(file), 0, size) for file in files if (size := file.stat().st_size)]


class _DiskReading:
    """Random samples in turn, cold.

    Attributes:
        resident: the largest share of the files that was not cold before a window.
    """

    def __init__(
        self,
        tier: DiskStore,
        sample_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
        spans: Sequence[Span],
        threads: ThreadPoolExecutor,
        readers: int,
    ) -> None:
        self._tier, self._ids, self._lengths, self._spans, self._threads = tier, sample_ids, lengths, spans, threads
        shares = max(1, len(sample_ids) // SHARE_SAMPLES)
        self._shares = cycle(np.array_split(np.random.default_rng(0).permutation(len(sample_ids)), shares))
        self._least, self._most, self._count = min(2 * readers, shares), shares, min(2 * readers, shares)
        self.resident: float | None = None

    def rate(self, window_s: float) -> float:
        """Bytes/s of one window; the next is as large as this one's rate says."""
        drop(self._spans)
        if (resident := resident_share(self._spans)) is not None:
            self.resident = max(self.resident or 0.0, resident)
        shares = [next(self._shares) for _ in range(self._count)]
        began = perf_counter()
        nbytes = sum(self._threads.map(self._read, shares))
        elapsed_s = max(perf_counter() - began, 1e-9)
        self._count = min(self._most, max(self._least, round(self._count * window_s / elapsed_s)))
        return nbytes / elapsed_s

    def _read(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        lengths = self._lengths[rows]
        buffer = np.empty(int(lengths.sum()), np.uint8)
        self._tier.get(self._ids[rows], lengths, buffer=buffer, offsets=pack(lengths))
        return len(buffer)


def memory_rate(sample_bytes: int, effort: Effort, *, seed: int = 0) -> Quantity:
    """bytes/s of copying samples of this size from random places of a large buffer, by one thread."""
    held = np.ones(HELD_BYTES, np.uint8)  # ones: zeros would all be the kernel's one page of zeros
    size = min(max(1, sample_bytes), HELD_BYTES // 2)
    into = np.empty(size, np.uint8)
    starts = np.random.default_rng(seed).integers(0, HELD_BYTES - size, 4096).tolist()

    def rate() -> float:
        copied, began = 0, time.perf_counter()
        while time.perf_counter() - began < effort.window_s:
            for start in starts[: max(1, min(len(starts), (32 << 20) // size))]:
                np.copyto(into, held[start : start + size])
                copied += size
        return copied / (time.perf_counter() - began)

    return repeated(rate, effort, unit="bytes/s")
