"""Effects of random orders: uneven reads by a worker, and samples moved by locality-aware loading.

Each epoch assigns the samples to N workers at random, so the number of times that one worker reads a sample in E epochs
is Binomial(E, 1/N). Samples that it reads much more often than the mean are worth caching nearby (NoPFS, SC 2021). In a
global minibatch, nodes have cached random, unequal numbers of the samples, and the difference must travel (section III
of "Accelerating Data Loading in Deep Neural Network Training", 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mbaas.analysis.simulator.model import Floats, Ints
from mbaas.analysis.simulator.system import check_counts
from mbaas.errors import ConfigError
from mbaas.order import SampleOrder, Shuffle, check_seed


@dataclass(frozen=True)
class Frequency:
    """Numbers of samples by how often one worker reads them.

    Attributes:
        least: smallest number of reads above (1 + delta) times the mean.
        expected: expected samples with at least that many reads, F P(X >= least); usually not an integer.
        expected_counts: expected samples with 0, 1, ... E reads: float64[E + 1].
        simulated, simulated_counts: the same for worker 0 of a simulation (int64[E + 1]), or None.
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

    Raises:
        ConfigError: an argument is out of range.
    """
    check_counts(workers=workers, epochs=epochs, samples=samples)
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
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(chance)
        + (trials - k) * math.log1p(-chance)
        for k in range(trials + 1)
    ]
    return np.exp(np.array(logs))


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


@dataclass(frozen=True)
class Imbalance:
    """Share of each global minibatch that travels: sum of deficits / samples, float64[K]."""

    fractions: Floats

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.fractions, share))

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def imbalance(*, nodes: int, local_batch: int, steps: int, seed: int = 0) -> Imbalance:
    """Draw K steps in which each sample of the global minibatch is cached on a uniformly random node.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_counts(nodes=nodes, local_batch=local_batch, steps=steps)
    check_seed(seed)
    # Each surplus fills a deficit, so the sum of the deficits travels.
    chance = np.random.default_rng(seed)
    owned = chance.multinomial(nodes * local_batch, [1 / nodes] * nodes, size=steps)
    return Imbalance(np.maximum(local_batch - owned, 0).sum(axis=1) / (nodes * local_batch))
