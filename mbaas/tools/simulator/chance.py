"""Single questions: hit rates of caches, and the effects of random orders.

MinIO never evicts, so its hit rate is its size; LRU and Belady's optimal eviction are simulated exactly. Each epoch
assigns the samples to N workers at random, so the number of times that one worker reads a sample in E epochs is
Binomial(E, 1/N). Samples that it reads much more often than the mean are worth caching nearby (NoPFS, SC 2021). In a
global minibatch, nodes have cached random, unequal numbers of the samples, and the difference must travel (section III
of "Accelerating Data Loading in Deep Neural Network Training", 2019).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.model.quantity import check_numbers
from mbaas.samples.order import SampleOrder, Shuffle, check_seed
from mbaas.tools.simulator.world import Floats, Ints, Orders


@dataclass(frozen=True)
class Frequency:
    """Numbers of samples by how often one worker reads them.

    At least ``least`` reads are above (1 + delta) times the mean; ``expected`` samples have that many, F P(X >= least).
    ``expected_counts`` have 0, 1, ... E reads: float64[E + 1]. The simulated ones, int64[E + 1], are those of worker 0.
    """

    least: int
    expected: float
    simulated: int | None
    expected_counts: Floats
    simulated_counts: Ints | None


def frequency(
    *, workers: int, epochs: int, samples: int, delta: float, monte_carlo: bool = False, seed: int = 0
) -> Frequency:
    """Count the samples (of F) that one of N workers reads more than (1 + delta) E / N times in E epochs.

    With ``monte_carlo``, also count in the orders of a feed with this seed.
    """
    check_numbers("at least 1", workers=workers, epochs=epochs, samples=samples)
    if not -1 <= delta < math.inf:
        raise ConfigError(f"delta must be at least -1 and finite, got {delta}")
    check_seed(seed)
    # exact: with delta 0.8, 1.8 * 90 / 16 in floating point may fall on the wrong side of an integer
    least = math.floor((1 + Fraction(repr(delta))) * epochs / workers) + 1
    expected = samples * binomial(epochs, 1 / workers)
    counted = reads_of_worker(workers=workers, epochs=epochs, samples=samples, seed=seed) if monte_carlo else None
    return Frequency(
        least=least,
        expected=math.fsum(expected[least:]),
        simulated=int(counted[least:].sum()) if counted is not None else None,
        expected_counts=expected,
        simulated_counts=counted,
    )


def binomial(trials: int, chance: float) -> Floats:
    """Return P(X = 0), P(X = 1), ... of a binomial distribution: float64[trials + 1]."""
    if chance == 1:  # a single worker reads everything, and log(1 - chance) would be infinite
        return np.append(np.zeros(trials), 1.0)
    # Logarithms, because factorials of a thousand epochs overflow a float.
    k = np.arange(trials + 1)
    log_factorials = np.cumsum(np.log(np.maximum(k, 1)))
    log_choices = log_factorials[-1] - log_factorials - log_factorials[::-1]
    found: Floats = np.exp(log_choices + k * math.log(chance) + (trials - k) * math.log1p(-chance))
    return found


def reads_of_worker(*, workers: int, epochs: int, samples: int, seed: int) -> Ints:
    """Count the samples that worker 0 reads 0, 1, ... E times: int64[E + 1].

    Its share of an epoch is the first of N equal stretches of the order. If F is not a multiple of N, some stretches
    have one more sample, so that their mean is F / N.
    """
    order = SampleOrder(num_samples=samples, seed=seed, block_samples=1)
    times = np.zeros(samples, dtype=np.int32)
    for epoch in range(epochs):
        share = (epoch + 1) * samples // workers - epoch * samples // workers
        # no sample occurs twice in an epoch, so the indexed addition loses none
        times[order.samples_at(Shuffle(epoch), 0, share)] += 1
    return np.bincount(times, minlength=epochs + 1)


def imbalance(*, nodes: int, local_batch: int, steps: int, seed: int = 0) -> Floats:
    """Draw K steps in which each sample of the global minibatch is cached on a uniformly random node.

    Return the share of each global minibatch that travels, sum of deficits / samples: float64[K].
    """
    check_numbers("at least 1", nodes=nodes, local_batch=local_batch, steps=steps)
    check_seed(seed)
    # Each surplus fills a deficit, so the sum of the deficits travels.
    chance = np.random.default_rng(seed)
    owned = chance.multinomial(nodes * local_batch, [1 / nodes] * nodes, size=steps)
    fractions: Floats = np.maximum(local_batch - owned, 0).sum(axis=1) / (nodes * local_batch)
    return fractions


CachePolicy = Literal["minio", "lru", "belady"]
POLICIES: tuple[CachePolicy, ...] = ("minio", "lru", "belady")


def hit_fractions(
    policy: CachePolicy, *, cached: float, epochs: int, samples: int = 100_000, seed: int = 0
) -> tuple[float, ...]:
    """Return hits / samples of each epoch; the cache is empty before the first one.

    MinIO never evicts, so in every epoch it hits exactly its contents. LRU and Belady are simulated access by access.
    In a long run LRU converges to `mbaas.model.supply.lru_hits`. All samples have one size. ``cached`` is the share of
    the samples that the cache holds, rounded down to whole samples.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not 0 <= cached <= 1:
        raise ConfigError(f"cached must be a share from 0 to 1, got {cached}")
    check_numbers("at least 1", epochs=epochs, samples=samples)
    room = int(cached * samples + 1e-9)  # 0.29 * 100 is slightly less than 29 in floating point
    if policy == "minio":
        return (0.0, *[room / samples] * (epochs - 1))
    orders = Orders(samples, seed=seed, kept_bytes=0)
    if policy == "belady":
        return tuple(hits / samples for hits in belady_hits(orders, room=room, samples=samples, epochs=epochs))
    cache = Lru(capacity_bytes=room, sizes=np.ones(samples))
    return tuple(float(np.count_nonzero(cache.read(orders(epoch))) / samples) for epoch in range(epochs))


def belady_hits(orders: Orders, *, room: int, samples: int, epochs: int) -> Iterator[int]:
    """Yield the hits of each epoch with offline optimal eviction (Belady, IBM Systems Journal, 1966).

    A sample enters the cache when it is read. While there are more than ``room``, the one with the furthest next read
    leaves, which may be the sample that was just read. No cache that only holds samples that were read before has more
    hits in total. If every epoch reads each sample once, all samples that hit were cached at the start of the epoch, so
    an epoch has at most ``room`` hits. MinIO reaches this bound too.
    """
    held, count = np.zeros(samples, dtype=bool).tolist(), 0
    furthest: list[tuple[int, int]] = []  # held samples by -next read; entries of past reads are never at the top
    for epoch in range(epochs - 1):
        order, next_reads, hits = orders(epoch).tolist(), np.empty(samples, dtype=np.int64), 0
        next_reads[orders(epoch + 1)] = np.arange(samples) + (epoch + 1) * samples
        for sample, next_read in zip(order, next_reads[order].tolist(), strict=True):
            hits += held[sample]
            count += not held[sample]
            held[sample] = True
            heapq.heappush(furthest, (-next_read, sample))
            if count > room:
                held[heapq.heappop(furthest)[1]] = False
                count -= 1
        yield hits
    yield count  # nothing is read after the last epoch, so nothing is admitted or leaves


class Lru:
    """An exact LRU cache of samples, fast for epochs over a whole dataset. ``sizes`` are bytes, number[F].

    The cache always holds the samples that were last read at or after some access, the floor, which never decreases.
    The floor does not depend on hits, so a stretch of accesses needs only the floor before and after it. Samples last
    read after both floors hit, and samples last read before both miss. The few in between are counted one by one.
    """

    def __init__(self, *, capacity_bytes: float, sizes: NDArray[Any]) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes = sizes
        self._last = np.full(len(sizes), -1, dtype=np.int64)  # number of each sample's last access, -1 for none
        self._origin = 0  # number of the first access in `_live`
        self._live = np.zeros(0)  # bytes of each access that no later access of the same sample replaced
        self._floor = 0  # number of the oldest access that may still be held
        self._held_bytes = 0.0  # bytes of the samples whose last access is at or after the floor

    def read(self, samples: NDArray[Any]) -> NDArray[np.bool_]:
        """Read samples in order, all different; return which were in the cache: bool[n]."""
        # Accesses before the floor are never needed again.
        start = self._origin + len(self._live)
        self._live = np.concatenate([self._live[self._floor - self._origin :], np.zeros(len(samples))])
        self._origin = self._floor
        # Counting the uncertain accesses of a stretch of s takes up to s^2 steps, so n accesses cost n s. The overhead
        # per stretch occurs n / s times. The square root balances both.
        stretch = int(np.clip(math.isqrt(len(samples)), 64, 8192))
        hits = np.empty(len(samples), dtype=bool)
        for low in range(0, len(samples), stretch):
            part = slice(low, low + stretch)
            hits[part] = self._read_stretch(samples[part], start + low)
        return hits

    def _read_stretch(self, samples: NDArray[Any], now: int) -> NDArray[np.bool_]:
        sizes = self._sizes[samples].astype(np.float64)
        # All at once, as if the stretch were a single access. The errors of this are corrected at the end.
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
        # 16384 at a time: usually few are evicted, and summing over all that is held would cost the same each time.
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
        """Return whether each uncertain sample of the stretch still fits after the reads since its last one.

        Three kinds of samples were read since then. Some were last read later and are not in the stretch. Some were
        last read later and are read again in the stretch. Others were last read earlier, or never, and occur earlier in
        the stretch. ``floor`` and ``kept_bytes`` are from before the stretch, without the samples that it reads again.
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
