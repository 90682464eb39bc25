"""The costs of a feed's samples follow from running sums."""

from __future__ import annotations

import pytest

from mbaas.model.costs import HOUR_S, LoadingCosts, PipelineCosts


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


def test_each_pipeline_pays_for_its_own_preparation() -> None:
    """The second one takes three quarters of the workers' time for a third of the samples."""
    pipelines = {"": PipelineCosts(0.25, 800), "own": PipelineCosts(0.75, 400)}
    costs = LoadingCosts(240.0, 30.0, 6.0, 1200, pipelines=pipelines)
    assert costs.cpu_hours(800) * HOUR_S == pytest.approx(240 * 0.25 + 36 * 800 / 1200)
    assert costs.cpu_hours(400, "own") * HOUR_S == pytest.approx(240 * 0.75 + 36 * 400 / 1200)
    assert costs.cpu_hours(800) + costs.cpu_hours(400, "own") == pytest.approx(costs.cpu_s / HOUR_S)
    assert costs.cpu_hours(9, "unknown") == pytest.approx(9 * costs.sample_cpu_s / HOUR_S)
