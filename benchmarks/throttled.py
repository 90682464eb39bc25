"""Storage of a fixed speed for each node of a local cluster, with a log of every read.

Each process that reads creates a reader, and a node of the benchmark has one such process, so the limit applies to a
node. The log is written by the storage, independently of the readers under test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset import Dataset
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.tools.analysis.measuring.storage import Throttle, WatchedReader

READ = np.dtype([("sample", "<i8"), ("at_s", "<f8")])
"""One read: the sample, and its end on the machine's monotonic clock, in seconds."""

READ_THREADS = 8
"""Read threads: the initial number of a cache node."""


@dataclass(frozen=True, eq=False, repr=False)
class ThrottledDataset(WrappedDataset):
    """A dataset that limits every process to ``bytes_per_s``.

    Attributes:
        bytes_per_s: limit of each reader.
        log: folder of the log, with a file for each process.
    """

    bytes_per_s: float
    log: Path

    def reader(self) -> SampleReader:
        link = Throttle(self.bytes_per_s)
        return WatchedReader(self.inner.reader(), before=lambda _, nbytes: link.carry(nbytes), after=self._note)

    def _note(self, sample_id: int, _: int) -> None:
        read = np.array([(sample_id, time.monotonic())], READ)
        # one append with one write: writes of threads do not mix, and a kill loses nothing
        file = os.open(self.log / f"{os.getpid()}.reads", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.write(file, read.tobytes())
        finally:
            os.close(file)


def throttled(dataset: Dataset, *, bytes_per_s: float, log: Path) -> ThrottledDataset:
    """Limit ``dataset``, and log reads in the folder ``log``, which is created."""
    log.mkdir(parents=True)
    return ThrottledDataset.around(dataset, bytes_per_s=bytes_per_s, log=log)


def measured_bytes_per_s(dataset: Dataset, *, seconds: float = 1.0) -> float:
    """Measure the bandwidth of a reader with `READ_THREADS` threads."""
    reader, end = dataset.reader(), time.monotonic() + seconds
    lengths = dataset.lengths(np.arange(len(dataset))).tolist()

    def read(thread: int) -> int:
        total, sample = 0, thread % len(dataset)
        while time.monotonic() < end:
            reader.read_into(sample, np.empty(lengths[sample], np.uint8))
            total, sample = total + lengths[sample], (sample + READ_THREADS) % len(dataset)
        return total

    began = time.monotonic()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        total = sum(pool.map(read, range(READ_THREADS)))
    return total / (time.monotonic() - began)


@dataclass(frozen=True, eq=False)
class ReadLog:
    """All reads from storage.

    Attributes:
        reads: of each process, in the order of their ends.
        lengths: int64[samples], bytes of each sample.
    """

    reads: tuple[NDArray[np.void], ...]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: ThrottledDataset, *, but: Collection[int] = ()) -> ReadLog:
        """Read the log of ``dataset``, without the processes in ``but``."""
        files = [file for file in sorted(dataset.log.iterdir()) if int(file.stem) not in but]
        return cls(tuple(np.fromfile(file, READ) for file in files), dataset.lengths(np.arange(len(dataset))))

    def epoch_bytes(self, epochs: int, *, together: bool) -> tuple[int, ...]:
        """Return the bytes of each of the first epochs: the k-th read of a sample belongs to epoch k.

        The time of a read does not determine its epoch, because the next epoch is read ahead.

        Args:
            epochs: number of epochs.
            together: each sample should be read once per epoch by all processes together; otherwise once by each.
        """
        ids = [np.concatenate([np.empty(0, READ), *self.reads])] if together else self.reads
        counts = [np.bincount(reads["sample"], minlength=len(self.lengths)) for reads in ids]
        return tuple(sum(int(self.lengths[count >= k].sum()) for count in counts) for k in range(1, epochs + 1))

    def fastest_bytes_per_s(self, window_s: float = 2.0) -> float:
        """Return the highest bandwidth of one process in any ``window_s`` seconds; 0 without reads."""
        return max((self._fastest(reads, window_s) for reads in self.reads if len(reads)), default=0.0)

    def _fastest(self, reads: NDArray[np.void], window_s: float) -> float:
        # a window starts at the end of a read, so that read does not count
        ends = np.sort(reads["at_s"])
        total = np.cumsum(self.lengths[reads["sample"][np.argsort(reads["at_s"])]])
        last = np.searchsorted(ends, ends + window_s, side="right") - 1
        return float((total[last] - total).max() / window_s)
