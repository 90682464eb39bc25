"""What share of each epoch one worker's cache serves: MinIO's against LRU's, which is simulated exactly."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.simulator.system import check_counts
from mbaas.analysis.simulator.world import Orders
from mbaas.errors import ConfigError

CachePolicy = Literal["minio", "lru"]
POLICIES: tuple[CachePolicy, ...] = ("minio", "lru")


def hit_fractions(
    policy: CachePolicy, *, cached: float, epochs: int, samples: int = 100_000, seed: int = 0
) -> tuple[float, ...]:
    """Find hits / samples of each epoch, the first of which finds the cache empty.

    MinIO keeps what it admitted, so it hits its own contents once an epoch, exactly. LRU is simulated, access by
    access; in a long run it comes to `mbaas.analysis.kept.lru_hits`.

    Args:
        policy: "minio" or "lru".
        cached: share of the samples that the cache holds; it is rounded down to whole samples.
        epochs: number of epochs.
        samples: number of samples in the dataset, all of one size.
        seed: chooses the orders.

    Raises:
        ConfigError: an argument is out of range.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not 0 <= cached <= 1:
        raise ConfigError(f"cached must be a share from 0 to 1, got {cached}")
    check_counts(epochs=epochs, samples=samples)
    room = int(cached * samples + 1e-9)  # 0.29 * 100 is a little less than 29 in floating point
    if policy == "minio":
        return (0.0, *[room / samples] * (epochs - 1))
    cache = Lru(capacity_bytes=room, sizes=np.ones(samples))
    orders = Orders(samples, seed=seed, kept_bytes=0)
    return tuple(float(np.count_nonzero(cache.read(orders(epoch))) / samples) for epoch in range(epochs))


class Lru:
    """An LRU cache of samples: exactly what it hits, fast for epochs over a whole dataset.

    What it holds is always what was read last: the samples whose last reading is not before some moment, the floor,
    which only ever rises. How it rises does not depend on hits. So a stretch of accesses needs the floor before and
    after it: samples last read after both hit, those last read before both miss, and the few between are counted out.

    Args:
        capacity_bytes: it evicts the least recently read samples until the rest fits.
        sizes: bytes of each sample, number[F].
    """

    def __init__(self, *, capacity_bytes: float, sizes: NDArray[Any]) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes = sizes
        self._last = np.full(len(sizes), -1, dtype=np.int64)  # number of each sample's last access, -1 for none
        self._origin = 0  # number of the access that `_live` begins with
        self._live = np.zeros(0)  # bytes that each access brought and no later access of its sample replaced
        self._floor = 0  # number of the oldest access that may still be held
        self._held_bytes = 0.0  # bytes of the samples whose last access is not before the floor

    def read(self, samples: NDArray[Any]) -> NDArray[np.bool_]:
        """Read samples in turn, none of them twice, and tell which were in the cache: bool[n]."""
        # what lies before the floor is never looked at again
        start = self._origin + len(self._live)
        self._live = np.concatenate([self._live[self._floor - self._origin :], np.zeros(len(samples))])
        self._origin = self._floor
        # Counting out the unsure accesses of a stretch of s takes up to s^2 steps, so n accesses cost n s; per stretch
        # there is an overhead, n / s times. The root balances both.
        stretch = int(np.clip(math.isqrt(len(samples)), 64, 8192))
        hits = np.empty(len(samples), dtype=bool)
        for low in range(0, len(samples), stretch):
            part = slice(low, low + stretch)
            hits[part] = self._read_stretch(samples[part], start + low)
        return hits

    def _read_stretch(self, samples: NDArray[Any], now: int) -> NDArray[np.bool_]:
        sizes = self._sizes[samples].astype(np.float64)
        # all at once, as if the stretch were a single access; what that gets wrong is counted out at the end
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
        # 16384 at a time, because mostly few are evicted, and the sum over all that is held would cost as much for each
        while self._held_bytes > self._capacity_bytes and self._floor < now:
            low = self._floor - self._origin
            ends = np.cumsum(self._live[low : low + 16384])
            needed = int(np.searchsorted(ends, self._held_bytes - self._capacity_bytes)) + 1
            evicted = min(needed, len(ends), now - self._floor)
            self._floor += evicted
            self._held_bytes -= float(ends[evicted - 1])

    def _fits(
        self, unsure: NDArray[Any], previous: NDArray[Any], sizes: NDArray[Any], floor: int, kept_bytes: float
    ) -> NDArray[np.bool_]:
        """Count out whether what was read since a sample's last reading leaves room for it: bool[unsure].

        Since then were read: what lies after it and was not read again in the stretch; what was read again and had
        been after it; and what the stretch read until then and had been before it, or nowhere.

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
        fits: NDArray[np.bool_] = since + read_bytes + sizes[unsure] <= self._capacity_bytes
        return fits
