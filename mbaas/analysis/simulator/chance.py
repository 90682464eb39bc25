"""What random orders do: how unevenly a worker reads samples, and what locality-aware loading has to move.

Each epoch deals the samples out to N workers by chance, so how often one worker reads one sample in E epochs is
Binomial(E, 1/N). Samples that it reads much more often than the mean are worth keeping close (NoPFS, SC 2021). In a
global minibatch, chance gives nodes unequal numbers of the samples that they have cached; what evens them out has to
travel (section III of "Accelerating Data Loading in Deep Neural Network Training", 2019).
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
    """How many samples one worker reads how often.

    Attributes:
        least: the smallest number of readings above (1 + delta) times the mean.
        expected: samples that it reads at least that often, F P(X >= least); mostly not a whole number.
        simulated: how many worker 0 of a simulation read at least that often, or None.
        expected_counts: samples read 0, 1, ... E times: float64[E + 1].
        simulated_counts: the same of the simulation, int64[E + 1], or None.
    """

    least: int
    expected: float
    simulated: int | None
    expected_counts: Floats
    simulated_counts: Ints | None


def frequency(
    *, workers: int, epochs: int, samples: int, delta: float, monte_carlo: bool = False, seed: int = 0
) -> Frequency:
    """Count the samples that one worker reads more than (1 + delta) E / N times in E epochs.

    Args:
        workers: N.
        epochs: E.
        samples: F.
        delta: how far above the mean.
        monte_carlo: also count, with the orders that a feed of this seed has.
        seed: of the orders.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_counts(workers=workers, epochs=epochs, samples=samples)
    if not -1 <= delta < math.inf:
        raise ConfigError(f"delta must be at least -1 and finite, got {delta}")
    check_seed(seed)
    # exact: with delta 0.8, 1.8 * 90 / 16 in floating point may fall on the wrong side of a whole number
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
    if chance == 1:  # a single worker reads everything; log(1 - chance) would be infinite
        return np.append(np.zeros(trials), 1.0)
    # by logarithms: the factorials of a thousand epochs do not fit a float
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
    """Count how many samples worker 0 reads 0, 1, ... E times: int64[E + 1].

    Its share of an epoch is the first of N equal stretches of the order; where F is no multiple of N, a stretch of
    one sample more as often as keeps its mean at F / N.
    """
    order = SampleOrder(num_samples=samples, seed=seed, block_samples=1)
    times = np.zeros(samples, dtype=np.int32)
    for epoch in range(epochs):
        share = (epoch + 1) * samples // workers - epoch * samples // workers
        # no sample twice in an epoch, so the indexed addition loses none
        times[order.samples_at(Shuffle(epoch), 0, share)] += 1
    return np.bincount(times, minlength=epochs + 1)


@dataclass(frozen=True)
class Imbalance:
    """The share of each global minibatch that travels.

    Attributes:
        fractions: of each step, sum of deficits / samples of the global minibatch: float64[K].
    """

    fractions: Floats

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.fractions, share))

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def imbalance(*, nodes: int, local_batch: int, steps: int, seed: int = 0) -> Imbalance:
    """Draw steps in which each sample of the global minibatch is cached on a node by chance, all nodes alike.

    Args:
        nodes: P.
        local_batch: B, samples that each node trains on.
        steps: K.
        seed: of chance.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_counts(nodes=nodes, local_batch=local_batch, steps=steps)
    check_seed(seed)
    # each surplus fills a deficit, so what travels is the sum of the deficits
    chance = np.random.default_rng(seed)
    owned = chance.multinomial(nodes * local_batch, [1 / nodes] * nodes, size=steps)
    return Imbalance(np.maximum(local_batch - owned, 0).sum(axis=1) / (nodes * local_batch))
