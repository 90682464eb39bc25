"""The costs of a feed's samples follow from running sums."""

from __future__ import annotations

import pytest

from mbaas.model.costs import HOUR_S, LoadingCosts


def test_each_delivered_sample_costs_the_same() -> None:
    """360 CPU-s for 1,000 delivered samples is 0.36 s each. Alone, a trial pays 240 CPU-s for 200, 1.2 s each."""
    costs = LoadingCosts(300.0, 50.0, 10.0, 1000, 240.0, 200, cpu_price_per_h=0.5)
    trials = (100, 300, 600)
    assert sum(map(costs.cpu_hours, trials)) == pytest.approx(costs.cpu_s / HOUR_S)
    assert costs.cpu_hours(300) == pytest.approx(0.03)
    assert costs.alone_cpu_hours(300) == pytest.approx(0.1)
    assert costs.price(costs.cpu_hours(300)) == pytest.approx(0.015)


def test_before_the_first_sample_nothing_costs_anything() -> None:
    costs = LoadingCosts(prep_cpu_s=1.0, encoded_samples=0)
    assert (costs.cpu_hours(10), costs.alone_cpu_hours(10), costs.price(1.0)) == (0.0, 0.0, None)
