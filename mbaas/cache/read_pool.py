"""The threads that read storage, straight into slabs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.slab import Load
from mbaas.cache.stats import EpochCounts, Meter
from mbaas.errors import BadSampleError, ConfigError
from mbaas.messages import Amount
from mbaas.settings import MOST_FETCH_THREADS

if TYPE_CHECKING:
    from mbaas.dataset import SampleReader

CHUNK_SAMPLES = 16
"""The most samples a thread reads in one go: so many that handing them out costs little beside reading them, and so few
that what somebody waits for need not wait long for a thread.
"""


class Read(NamedTuple):
    """A sample that is being read, and since when, on the monotonic clock."""

    since: float
    sample_id: int


@dataclass(eq=False)
class _Chunk:
    """Some samples of a load, by their indices within it, for one thread to read."""

    load: Load
    slab: NDArray[np.uint8]
    indices: list[int]
    urgent: bool
    failures: Future[dict[int, str]] = field(default_factory=Future)


class ReadPool:
    """Threads that fill slabs; what somebody waits for goes before what is read ahead.

    Args:
        reader: called from all threads at once.
        threads: at least 1; more than cores are right for storage that answers late.
        meter: counts every read.

    Raises:
        ConfigError: no threads, or more than `MOST_FETCH_THREADS`.
    """

    def __init__(self, reader: SampleReader, *, threads: int, meter: Meter) -> None:
        self._reader = reader
        self._meter = meter
        # As large as it may ever become: it starts threads only when there is work for them, and cannot be resized.
        self._executor = ThreadPoolExecutor(MOST_FETCH_THREADS, thread_name_prefix="mbaas-read")
        self._lock = threading.Lock()
        self._waiting: list[_Chunk] = []  # oldest first; as long as there are any, _width threads work
        self._reads: dict[int, Read] = {}  # by thread, each of which writes its own entry only and so needs no lock
        self._working = 0  # threads that take chunks; above _width only until they have read those in hand
        self._closed = False
        self.set_threads(threads)

    @property
    def threads(self) -> int:
        """How many read at once."""
        return self._width

    def set_threads(self, threads: int) -> None:
        """Read with so many threads from now on; those that are too many end after the chunk they are reading.

        Raises:
            ConfigError: no threads, or more than `MOST_FETCH_THREADS`.
        """
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        if threads > MOST_FETCH_THREADS:
            raise ConfigError(f"threads must be at most {MOST_FETCH_THREADS}, got {threads}")
        with self._lock:
            self._width = threads
            self._engage()

    async def fill(
        self, load: Load, slab: NDArray[np.uint8], *, urgent: bool, rows: NDArray[np.intp] | None = None
    ) -> dict[int, str]:
        """Read samples of `load` into `slab`, uint8[load.nbytes]: those with index `rows`, or all.

        When cancelled, chunks that no thread has begun are not read; the others go on writing into `slab`.

        Returns:
            Index within the load -> why that sample could not be read.
        """
        indices = list(range(len(load.rows))) if rows is None else rows.tolist()
        # A slab that is awaited should be read by all threads at once, however few samples it has.
        size = max(1, min(CHUNK_SAMPLES, -(-len(indices) // self._width)))
        chunks = [_Chunk(load, slab, indices[i : i + size], urgent) for i in range(0, len(indices), size)]
        with self._lock:
            self._waiting += chunks
            self._engage()
        found = await asyncio.gather(*(asyncio.wrap_future(chunk.failures) for chunk in chunks))
        return {i: reason for failures in found for i, reason in failures.items()}

    def hurry(self, slabs: Collection[int]) -> None:
        """Read these slabs before others: somebody waits for them now."""
        with self._lock:
            for chunk in self._waiting:
                chunk.urgent |= chunk.load.slab in slabs

    def oldest(self) -> Read | None:
        """Tell which read has been in progress for the longest time."""
        # Of a copy, which is one step of the interpreter: threads come and go meanwhile.
        return min(self._reads.copy().values(), default=None)

    def close(self) -> None:
        """End the threads, each after the chunk it is reading."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=True)

    def _engage(self) -> None:
        """Put as many more threads to work as there is work for; the caller has the lock."""
        for _ in range(0 if self._closed else min(self._width - self._working, len(self._waiting))):
            self._working += 1
            self._executor.submit(self._work)

    def _work(self) -> None:
        while (chunk := self._take()) is not None:
            if not chunk.failures.set_running_or_notify_cancel():
                continue  # nobody wants it any more
            try:
                chunk.failures.set_result(self._read(chunk))
            except Exception as error:  # whatever it is, it is told to who waits, and the thread goes on
                chunk.failures.set_exception(error)
            finally:
                self._reads.pop(threading.get_ident(), None)

    def _take(self) -> _Chunk | None:
        """Take the next chunk; None ends the thread."""
        with self._lock:
            if self._closed or not self._waiting or self._working > self._width:
                self._working -= 1
                return None
            chunk = next((c for c in self._waiting if c.urgent), self._waiting[0])
            self._waiting.remove(chunk)
            return chunk

    def _read(self, chunk: _Chunk) -> dict[int, str]:
        load, failures, nbytes, thread = chunk.load, {}, 0, threading.get_ident()
        with self._meter.storage.using():
            for i in chunk.indices:
                offset, length = int(load.offsets[i]), int(load.lengths[i])
                sample_id = int(load.sample_ids[i])
                self._reads[thread] = Read(time.monotonic(), sample_id)
                try:
                    self._reader.read_into(sample_id, chunk.slab[offset : offset + length])
                    nbytes += length
                    self._meter.storage.moved(length)
                except BadSampleError as error:
                    failures[i] = error.reason  # the others of the chunk are read all the same
        reads = len(chunk.indices)
        self._meter.count(load.epoch, EpochCounts(reads=Amount(reads, nbytes), failures=len(failures)))
        return failures
