"""The threads that read storage, straight into slabs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.slab import Load
from mbaas.cache.stats import Meter
from mbaas.errors import BadSampleError, ConfigError

if TYPE_CHECKING:
    from mbaas.dataset import SampleReader

CHUNK_SAMPLES = 16
"""The most samples a thread reads in one go: many enough to hide a hand-over, few enough to overtake."""


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
        ConfigError: no threads.
    """

    def __init__(self, reader: SampleReader, *, threads: int, meter: Meter) -> None:
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        self._reader = reader
        self._meter = meter
        self._width = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mbaas-read")
        self._lock = threading.Lock()
        self._waiting: list[_Chunk] = []  # oldest first; as many as calls of _work are still to come

    async def fill(
        self, load: Load, slab: NDArray[np.uint8], *, urgent: bool, rows: NDArray[np.intp] | None = None
    ) -> dict[int, str]:
        """Reads samples of `load` into `slab`, uint8[load.nbytes]: those with index `rows`, or all.

        When cancelled, chunks that no thread has begun are not read; the others go on writing into `slab`.

        Returns:
            Index within the load -> why that sample could not be read.
        """
        indices = list(range(len(load.rows))) if rows is None else rows.tolist()
        size = max(1, min(CHUNK_SAMPLES, -(-len(indices) // self._width)))
        chunks = [_Chunk(load, slab, indices[i : i + size], urgent) for i in range(0, len(indices), size)]
        with self._lock:
            self._waiting += chunks
        for _ in chunks:
            self._threads.submit(self._work)
        found = await asyncio.gather(*(asyncio.wrap_future(chunk.failures) for chunk in chunks))
        return {i: reason for failures in found for i, reason in failures.items()}

    def hurry(self, slabs: Collection[int]) -> None:
        """Somebody waits for these slabs now."""
        with self._lock:
            for chunk in self._waiting:
                chunk.urgent |= chunk.load.slab in slabs

    def close(self) -> None:
        """Ends the threads, each after the chunk it is reading."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        chunk = self._take()
        if not chunk.failures.set_running_or_notify_cancel():
            return
        try:
            chunk.failures.set_result(self._read(chunk))
        except Exception as error:
            chunk.failures.set_exception(error)

    def _take(self) -> _Chunk:
        with self._lock:
            chunk = next((c for c in self._waiting if c.urgent), self._waiting[0])
            self._waiting.remove(chunk)
            return chunk

    def _read(self, chunk: _Chunk) -> dict[int, str]:
        load, failures, nbytes = chunk.load, {}, 0
        with self._meter.reading():
            for i in chunk.indices:
                offset, length = int(load.offsets[i]), int(load.lengths[i])
                try:
                    self._reader.read_into(int(load.sample_ids[i]), chunk.slab[offset : offset + length])
                    nbytes += length
                except BadSampleError as error:
                    failures[i] = error.reason
        reads = len(chunk.indices)
        self._meter.count(load.epoch, storage_reads=reads, storage_failures=len(failures), storage_bytes=nbytes)
        return failures
