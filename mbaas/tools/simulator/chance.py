"""Single questions: hit rates of caches, and the effects of random orders.

MinIO never evicts, so its hit rate is its size. The page cache and Belady's optimal eviction are simulated read by
read. Each epoch assigns the samples to N workers at random, so the number of times that one worker reads a sample in E
epochs is Binomial(E, 1/N). Samples that it reads much more often than the mean are worth caching nearby (NoPFS, SC
2021). In a global minibatch, nodes have cached random, unequal numbers of the samples, and the difference must travel
(section III of "Accelerating Data Loading in Deep Neural Network Training", 2019).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mbaas.errors import ConfigError
from mbaas.model.page_cache import PAGE_BYTES, PageCache
from mbaas.model.quantity import check_numbers
from mbaas.samples.order import SampleOrder, Shuffle, check_seed
from mbaas.tools.simulator.world import Floats, Ints, Orders, orders_of


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


POLICIES = ("minio", "page_cache", "belady")

SAMPLE_BYTES = 110_000
"""Size of every sample in `hit_fractions`, about the mean of ImageNet-1k."""


def hit_fractions(
    policy: str, *, cached: float, epochs: int, samples: int = 100_000, seed: int = 0
) -> tuple[float, ...]:
    """Return hits / samples of each epoch; the cache is empty before the first one.

    MinIO never evicts, so in every epoch it hits exactly its contents. The page cache is `mbaas.model.page_cache`. All
    samples have `SAMPLE_BYTES`. ``cached`` is the share of the samples that the cache holds, rounded down to whole
    samples.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not 0 <= cached <= 1:
        raise ConfigError(f"cached must be a share from 0 to 1, got {cached}")
    check_numbers("at least 1", epochs=epochs, samples=samples)
    room = int(cached * samples + 1e-9)  # 0.29 * 100 is slightly less than 29 in floating point
    if policy == "minio":
        return (0.0, *[room / samples] * (epochs - 1))
    orders = orders_of(samples, seed=seed, kept_bytes=0)
    if policy == "belady":
        return tuple(hits / samples for hits in belady_hits(orders, room=room, samples=samples, epochs=epochs))
    paged_bytes = -(-SAMPLE_BYTES // PAGE_BYTES) * PAGE_BYTES
    cache = PageCache(capacity_bytes=room * paged_bytes, sizes=np.full(samples, SAMPLE_BYTES))
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
