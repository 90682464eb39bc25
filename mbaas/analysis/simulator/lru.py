"""Exactly what an LRU cache hits, fast for sweeps over a whole dataset.

What an LRU cache holds is always what was read last: the samples whose last reading is not before some moment, the
floor, which only ever rises. How it rises does not depend on hits. So a stretch of accesses needs the floor before and
after it: samples last read after both hit, those last read before both miss, and the few between are counted out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


class Lru:
    """An LRU cache of samples.

    Args:
        capacity_bytes: it evicts the least recently read samples until the rest fits.
        sizes: bytes of each sample, number[F].
    """

    def __init__(self, *, capacity_bytes: float, sizes: NDArray[Any]) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes = sizes
        self._last = np.full(len(sizes), -1, dtype=np.int64)
        self._live = np.zeros(0)
        self._origin = 0
        self._floor = 0
        self._held_bytes = 0.0

    def read(self, samples: NDArray[Any]) -> Bools:
        """Read samples in turn, none of them twice: bool[n], which were in the cache."""
        start = self._origin + len(self._live)
        self._live = np.concatenate([self._live[self._floor - self._origin :], np.zeros(len(samples))])
        self._origin = self._floor
        stretch = int(np.clip(math.isqrt(len(samples)), 64, 8192))
        hits = np.empty(len(samples), dtype=bool)
        for low in range(0, len(samples), stretch):
            part = slice(low, low + stretch)
            hits[part] = self._read_stretch(samples[part], start + low)
        return hits

    def _read_stretch(self, samples: NDArray[Any], now: int) -> Bools:
        sizes = self._sizes[samples].astype(np.float64)
        previous = self._last[samples]
        floor = self._floor
        again = previous >= floor
        kept_bytes = self._held_bytes - float(sizes[again].sum())
        self._live[previous[again] - self._origin] = 0
        self._live[now - self._origin : now - self._origin + len(samples)] = sizes
        self._last[samples] = np.arange(now, now + len(samples))
        self._held_bytes = kept_bytes + float(sizes.sum())
        self._raise_floor(now + len(samples))
        hits = previous >= self._floor
        unsure = np.flatnonzero(again & ~hits)
        if len(unsure):
            hits[unsure] = self._fits(unsure, previous, sizes, floor, kept_bytes)
        return hits

    def _raise_floor(self, now: int) -> None:
        """Evict until the rest fits."""
        while self._held_bytes > self._capacity_bytes and self._floor < now:
            low = self._floor - self._origin
            ends = np.cumsum(self._live[low : low + 16384])
            needed = int(np.searchsorted(ends, self._held_bytes - self._capacity_bytes)) + 1
            evicted = min(needed, len(ends), now - self._floor)
            self._floor += evicted
            self._held_bytes -= float(ends[evicted - 1])

    def _fits(
        self, unsure: NDArray[Any], previous: NDArray[Any], sizes: NDArray[Any], floor: int, kept_bytes: float
    ) -> Bools:
        """Of accesses of a stretch, whether what was read since the sample's last reading leaves room for it.

        That is what lies after it and was not read again in the stretch, what was and had been after it, and what
        the stretch read until then and had been before it, or nowhere.

        Args:
            unsure: numbers of the accesses in the stretch.
            previous: when each sample of the stretch was read before.
            sizes: of the samples of the stretch.
            floor: before the stretch.
            kept_bytes: bytes in the cache before the stretch, without those that it read again.
        """
        low = floor - self._origin
        at = previous[unsure]
        upto = np.cumsum(self._live[low : int(at.max()) + 1 - self._origin])
        since = kept_bytes - upto[at - floor]
        after = previous[None, :] > at[:, None]
        before = previous[None, :] < at[:, None]
        earlier = np.arange(len(sizes))[None, :] < unsure[:, None]
        read_bytes = np.where(after | (before & earlier), sizes, 0).sum(axis=1)
        fits: Bools = since + read_bytes + sizes[unsure] <= self._capacity_bytes
        return fits
