"""The trials of the benchmark on several nodes: one shares a feed, and one loads alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import ray
from numpy.typing import NDArray

import mbaas
from benchmarks.throttled import READ_THREADS
from mbaas.cache.directory import MinIO
from mbaas.dataset import Dataset
from mbaas.dataset.storage.retry import PatientReader
from mbaas.errors import BadSampleError
from mbaas.prep.engines import Batch, make_engine
from mbaas.samples.order import Ids, SampleOrder
from mbaas.tools.bench.host import Ledger, touch
from mbaas.transforms import Pipeline

Raw = list[NDArray[np.uint8]]
"""Encoded bytes of samples."""


@dataclass(frozen=True)
class EpochSeen:
    """One epoch of one trial.

    Attributes:
        ended_s: its end on the machine's monotonic clock.
        missing: samples that were not delivered.
        repeated: deliveries of a sample after the first.
    """

    ended_s: float
    missing: int
    repeated: int


def _seen(ledger: Ledger) -> EpochSeen:
    return EpochSeen(time.monotonic(), ledger.missing, ledger.repeated)


@ray.remote(num_cpus=0)
class SharingTrial:
    """A consumer of a feed, with the name ``consumer``."""

    def __init__(self, feed: str, consumer: str, samples: int) -> None:
        self._loader = mbaas.join(feed, consumer=consumer, format="numpy")
        self._samples = samples

    def ready(self) -> None:
        """Return once the trial has joined."""

    def epoch(self) -> EpochSeen:
        """Train for one epoch."""
        ledger = Ledger(self._samples)
        for batch in self._loader:
            touch(batch["image"])
            ledger.add(batch["sample_id"])
            del batch
        ledger.close_epoch()
        return _seen(ledger)

    def close(self) -> None:
        """Leave the feed."""
        self._loader.close()


@ray.remote(num_cpus=1)
class LoneTrial:
    """A trial that loads all its data alone, like a good custom loader.

    `READ_THREADS` threads read a block ahead of prep, also across the end of an epoch. Samples are cached up to
    ``cache_bytes`` by the rule of a feed's cache (MinIO).
    """

    def __init__(
        self, dataset: Dataset, pipeline: Pipeline, *, seed: int, block_samples: int, cache_bytes: int
    ) -> None:
        self._dataset, self._reader = dataset, PatientReader(dataset.reader())
        self._engine = make_engine("cpu", pipeline, seed=seed)
        self._order = SampleOrder(len(dataset), seed, block_samples)
        self._minio, self._kept = MinIO(cache_bytes), dict[int, NDArray[np.uint8]]()
        self._threads = ThreadPoolExecutor(READ_THREADS)
        self._ahead_thread = ThreadPoolExecutor(1)
        self._ahead: Future[Raw] | None = None
        self._epochs = 0

    def ready(self) -> None:
        """Return once the trial is ready."""

    def cached_bytes(self) -> int:
        """Return the encoded bytes in its cache."""
        return self._minio.used_bytes

    def epoch(self) -> EpochSeen:
        """Train for one epoch."""
        ledger = Ledger(len(self._dataset))
        for pixels, ids in self._blocks():
            touch(pixels)
            ledger.add(ids)
        ledger.close_epoch()
        self._epochs += 1
        return _seen(ledger)

    def _blocks(self) -> Iterator[tuple[NDArray[np.uint8], Ids]]:
        first = self._epochs * self._order.blocks_per_epoch
        for block in range(first, first + self._order.blocks_per_epoch):
            ids = self._order.sample_ids(block)
            raw = self._ahead.result() if self._ahead is not None else self._fetch(block)
            # a separate thread: it waits for the read threads, so it needs its own executor
            self._ahead = self._ahead_thread.submit(self._fetch, block + 1)
            yield self._prepare(raw, ids), ids

    def _prepare(self, raw: Raw, ids: Ids) -> NDArray[np.uint8]:
        made = self._engine.field(raw[0], self._dataset.uri(int(ids[0])), {})
        out = made.empty(len(ids))
        for bad in self._engine.prepare(Batch(raw, ids, self._epochs, {}), out).bad:
            raise BadSampleError(self._dataset.uri(int(ids[bad.row])), bad.reason)
        return out

    def _fetch(self, block: int) -> Raw:
        """Fetch a block's bytes, and cache the samples that MinIO admits."""
        ids = self._order.sample_ids(block)
        lengths = self._dataset.lengths(ids)
        lacking = np.array([sample not in self._kept for sample in ids.tolist()])
        keep = np.zeros(len(ids), np.bool_)
        keep[lacking] = self._minio.admit(lengths[lacking])
        raw = list(self._threads.map(self._read, ids.tolist(), lengths.tolist()))
        self._kept.update((int(ids[row]), raw[row]) for row in np.flatnonzero(keep).tolist())
        return raw

    def _read(self, sample_id: int, length: int) -> NDArray[np.uint8]:
        if sample_id in self._kept:
            return self._kept[sample_id]
        raw = np.empty(length, np.uint8)
        self._reader.read_into(sample_id, raw)
        return raw
