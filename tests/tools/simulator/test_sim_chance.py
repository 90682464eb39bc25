"""Access frequency and imbalance traffic match hand calculations and counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mbaas.errors import ConfigError
from mbaas.model.balance import assign
from mbaas.tools.simulator.chance import frequency, imbalance


def test_frequency_by_hand() -> None:
    """N = 2, E = 4, delta = 0.5: mu = 2. More than 3 reads are 4, with probability 1/16: 100 of 1,600 samples.

    Exactly 3 reads do not count, because the inequality is strict.
    """
    found = frequency(workers=2, epochs=4, samples=1600, delta=0.5)
    assert found.least == 4
    assert found.expected == pytest.approx(100)
    assert found.simulated is None


def test_delta_is_taken_as_it_is_written() -> None:
    """N = 3, E = 30, delta = 0.1: exactly 11 is not more than 1.1 x 10, although 1.1 * 10 is less in some roundings."""
    for delta, least in ((0.1, 12), (0.3, 14), (0.6, 17), (0.7, 18), (0.0, 11), (-1.0, 1)):
        assert frequency(workers=3, epochs=30, samples=1, delta=delta).least == least


def test_the_papers_example() -> None:
    """NoPFS, section 3: N = 16, E = 90, ImageNet-1k. scipy: binom.sf(10, 90, 1/16) * 1281167 = 31634.686."""
    found = frequency(workers=16, epochs=90, samples=1_281_167, delta=0.8)
    assert found.expected == pytest.approx(31_634.686, abs=0.001)
    assert math.fsum(found.expected_counts) == pytest.approx(1_281_167)


@pytest.mark.parametrize(("workers", "epochs", "delta"), [(4, 12, 0.4), (7, 33, 0.2)])
def test_orders_of_a_feed_have_that_frequency(workers: int, epochs: int, delta: float) -> None:
    """Counts of 30,011 samples are within five standard deviations, sqrt(F p (1 - p)), of the expected count."""
    found = frequency(workers=workers, epochs=epochs, samples=30_011, delta=delta, monte_carlo=True, seed=3)
    share = found.expected / 30_011
    assert found.simulated is not None
    assert found.simulated_counts is not None
    assert abs(found.simulated - found.expected) < 5 * math.sqrt(30_011 * share * (1 - share))
    assert found.simulated_counts.sum() == 30_011
    again = frequency(workers=workers, epochs=epochs, samples=30_011, delta=delta, monte_carlo=True, seed=4)
    assert again.simulated != found.simulated


def test_one_worker_reads_everything_once_an_epoch() -> None:
    found = frequency(workers=1, epochs=5, samples=103, delta=0, monte_carlo=True)
    assert (found.expected, found.simulated) == (0, 0)
    assert found.simulated_counts is not None
    assert found.simulated_counts.tolist() == [0, 0, 0, 0, 0, 103]


def test_imbalance_of_two_nodes_with_one_sample_each() -> None:
    """In half of the steps one node has both samples, and one of the two is moved; otherwise none is."""
    found = imbalance(nodes=2, local_batch=1, steps=4000, seed=1)
    assert set(found.tolist()) == {0, 0.5}
    assert found.mean() == pytest.approx(0.25, abs=0.025)


def test_imbalance_is_what_balancing_moves() -> None:
    """The same step, balanced by the function of real loaders."""
    chance = np.random.default_rng(2)
    owned = chance.multinomial(5 * 7, [1 / 5] * 5, size=1)[0]
    found = imbalance(nodes=5, local_batch=7, steps=1, seed=2)
    homes = np.repeat(np.arange(5), owned)
    assert found.tolist() == [(assign(homes, rank_nodes=np.arange(5)) != homes).mean()]


def test_imbalance_depends_on_the_local_batch_and_hardly_on_nodes() -> None:
    """The traffic is about 0.4 / sqrt(B), so four times the batch halves it."""
    medians = {(p, b): np.median(imbalance(nodes=p, local_batch=b, steps=400)) for p in (16, 128) for b in (16, 64)}
    assert medians[16, 16] / medians[16, 64] == pytest.approx(2, rel=0.1)
    assert medians[16, 64] == pytest.approx(medians[128, 64], rel=0.1)
    assert medians[128, 64] == pytest.approx(0.4 / 8, rel=0.05)


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ConfigError, match="local_batch must be at least 1, got 0"):
        imbalance(nodes=2, local_batch=0, steps=1)
    with pytest.raises(ConfigError, match="delta must be at least -1 and finite, got -2"):
        frequency(workers=2, epochs=1, samples=1, delta=-2)
