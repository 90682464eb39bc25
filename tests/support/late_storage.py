"""Storage with a fixed latency per read, and a slow disk."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import ray

from mbaas.cache.disk.store import DiskStore
from mbaas.dataset import Dataset
from mbaas.dataset.base import SampleReader, WrappedDataset

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module


@dataclass(frozen=True, eq=False, repr=False)
class LateDataset(WrappedDataset):
    """A dataset whose samples take ``late_s`` longer to read from storage and ``disk_s`` longer from a disk tier."""

    late_s: float
    disk_s: float = 0.0

    def reader(self) -> SampleReader:
        if self.disk_s:
            _slow_down_disk(self.disk_s)
        return _LateReader(self.inner.reader(), self.late_s)


class _LateReader(SampleReader):
    def __init__(self, inner: SampleReader, late_s: float) -> None:
        self._inner, self._late_s = inner, late_s

    def read_into(self, sample_id: int, buffer: Any) -> None:
        time.sleep(self._late_s)
        self._inner.read_into(sample_id, buffer)


def _slow_down_disk(disk_s: float) -> None:
    """Patch this process: the cache node's, which opens a reader before it reads any sample."""
    get = DiskStore.get

    def slow(self: DiskStore, sample_ids: Any, lengths: Any, **into: Any) -> Any:
        time.sleep(disk_s * len(sample_ids))
        return get(self, sample_ids, lengths, **into)

    DiskStore.get = slow  # type: ignore[method-assign]


def late(inner: Dataset, *, late_s: float, disk_s: float = 0.0) -> LateDataset:
    return LateDataset.around(inner, late_s=late_s, disk_s=disk_s)
