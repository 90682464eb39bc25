"""Parts of a dataset, and slower storage: what measurements run on instead of all of it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.fs
from numpy.typing import NDArray

from mbaas.analysis.measuring.residency import Span
from mbaas.dataset import Dataset
from mbaas.dataset.base import SampleReader
from mbaas.dataset.table import TableDataset
from mbaas.errors import ConfigError
from mbaas.order import Ids


class Throttle:
    """A link that carries ``bytes_per_s``, one transfer after the other, for all threads that share it.

    Idle time is lost, as on a real link: there are no bursts, so no stretch of time sees more than the limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ConfigError(f"bytes_per_s must be above 0, got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def book(self, nbytes: int, now: float) -> float:
        """When a transfer that is asked for at ``now`` ends, in seconds on the same clock."""
        with self._lock:
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            return self._free_at

    def carry(self, nbytes: int) -> None:
        """Return when a transfer that begins now ends."""
        time.sleep(max(0.0, self.book(nbytes, time.monotonic()) - time.monotonic()))


@dataclass(frozen=True, eq=False, repr=False)
class Portion(Dataset):
    """Some samples of a dataset, under new ids, read at most at a given rate.

    Attributes:
        inner: whose samples these are.
        ids: int64[n], their ids there.
        bytes_per_s: that all readers of a process get together; None: as much as there is.
    """

    inner: Dataset
    ids: NDArray[np.int64]
    bytes_per_s: float | None

    def __len__(self) -> int:
        return len(self.ids)

    def labels(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self.inner.labels(self.ids[sample_ids])

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return self.inner.lengths(self.ids[sample_ids])

    @property
    def total_bytes(self) -> int:
        return int(self.inner.lengths(self.ids).sum())

    def uri(self, sample_id: int) -> str:
        return self.inner.uri(int(self.ids[sample_id]))

    def reader(self) -> SampleReader:
        throttle = None if self.bytes_per_s is None else _shared_throttle(self.fingerprint, self.bytes_per_s)
        return _PortionReader(self.inner.reader(), self.ids, throttle)


class _PortionReader(SampleReader):
    def __init__(self, inner: SampleReader, ids: NDArray[np.int64], throttle: Throttle | None) -> None:
        self._inner, self._ids, self._throttle = inner, ids, throttle

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        if self._throttle is not None:
            self._throttle.carry(len(buffer))
        self._inner.read_into(int(self._ids[sample_id]), buffer)


_throttles: dict[str, Throttle] = {}
_lock = threading.Lock()


def _shared_throttle(fingerprint: str, bytes_per_s: float) -> Throttle:
    """One link for all readers of a process."""
    with _lock:
        return _throttles.setdefault(fingerprint, Throttle(bytes_per_s))


def portion(
    dataset: Dataset, *, samples: int | None = None, bytes_per_s: float | None = None, seed: int = 0
) -> Portion:
    """At most so many random samples of a dataset, in storage of at most this rate.

    Raises:
        ConfigError: no samples.
    """
    if samples is not None and samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}")
    ids = np.sort(np.random.default_rng(seed).permutation(len(dataset))[:samples])
    what = hashlib.blake2b(f"{dataset.fingerprint} {bytes_per_s}".encode(), digest_size=16)
    what.update(ids.tobytes())
    return Portion(
        root=dataset.root,
        class_names=dataset.class_names,
        fingerprint=what.hexdigest(),
        inner=dataset,
        ids=ids,
        bytes_per_s=bytes_per_s,
    )


def local_spans(dataset: Dataset, sample_ids: Sequence[int]) -> list[Span]:
    """Where samples lie in local files; empty if they do not."""
    if isinstance(dataset, Portion):
        return local_spans(dataset.inner, dataset.ids[list(sample_ids)].tolist())
    if not isinstance(dataset, TableDataset) or not isinstance(dataset.filesystem, pyarrow.fs.LocalFileSystem):
        return []
    ranges = [dataset.byte_range(sample) for sample in sample_ids]
    return [Span(where.path, where.offset, where.length) for where in ranges]
