"""The rate of a disk tier: samples that it keeps, read at random and cold, as a cache node reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from mbaas.analysis.measuring.effort import Effort, repeated
from mbaas.analysis.measuring.prep import Raw
from mbaas.analysis.measuring.residency import Span, drop, resident_share
from mbaas.analysis.measuring.storage import COLD
from mbaas.analysis.quantity import Quantity
from mbaas.cache.disk.store import DiskStore
from mbaas.cache.slab import pack
from mbaas.errors import ConfigError

READERS = 8
"""Threads that read at once, as many as a cache node begins with."""

SHARE_SAMPLES = 16
"""Samples that a thread asks for in one go."""


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
    """A folder of its own on the disk, gone afterwards: what feeds keep there is not touched.

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


def disk_rate(raw: Raw, disk_path: str | os.PathLike[str], effort: Effort, *, readers: int = READERS) -> DiskRate:
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
                reading = _Reading(tier, raw.sample_ids, lengths, spans_of(folder), threads, readers)
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


class _Reading:
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
