"""The costs of a feed's samples follow from running sums."""

from __future__ import annotations

import pytest

from mbaas.model.costs import LoadingCosts, PipelineCosts


def test_each_delivered_sample_costs_the_same() -> None:
    """360 CPU-s for 1,000 delivered samples is 0.36 s each. Alone, a trial pays 240 CPU-s for 200, 1.2 s each."""
    costs = LoadingCosts(300.0, 50.0, 10.0, 1000, 240.0, 200, cpu_price_per_h=0.5)
    trials = (100, 300, 600)
    assert sum(map(costs.cpu_s_of, trials)) == pytest.approx(costs.cpu_s)
    assert costs.cpu_s_of(300) == pytest.approx(108)
    assert costs.alone_cpu_s_of(300) == pytest.approx(360)
    assert costs.price(costs.cpu_s_of(300)) == pytest.approx(0.015)


def test_the_ratio_and_the_number_of_trials_from_which_a_feed_pays() -> None:
    """500 prepared samples took 0.72 s each, more than half of what a DataLoader takes, so one trial pays already."""
    costs = LoadingCosts(300.0, 50.0, 10.0, 1000, 240.0, 200)
    assert costs.ratio == pytest.approx(1.2 / 0.36)
    assert costs.pays_from(500) == 1
    assert [costs.pays_from(samples) for samples in (301, 299, 100)] == [1, 2, 4]  # 1.2 s is 300 samples of 360 s
    assert (LoadingCosts().ratio, LoadingCosts().pays_from(10), costs.pays_from(0)) == (0.0, None, None)


def test_before_the_first_sample_nothing_costs_anything() -> None:
    costs = LoadingCosts(prep_cpu_s=1.0, encoded_samples=0)
    assert (costs.cpu_s_of(10), costs.alone_cpu_s_of(10), costs.price(1.0)) == (0.0, 0.0, None)


def test_each_pipeline_pays_for_its_own_preparation() -> None:
    """The second one takes three quarters of the workers' time for a third of the samples."""
    pipelines = {"": PipelineCosts(0.25, 800), "own": PipelineCosts(0.75, 400)}
    costs = LoadingCosts(240.0, 30.0, 6.0, 1200, pipelines=pipelines)
    assert costs.cpu_s_of(800) == pytest.approx(240 * 0.25 + 36 * 800 / 1200)
    assert costs.cpu_s_of(400, "own") == pytest.approx(240 * 0.75 + 36 * 400 / 1200)
    assert costs.cpu_s_of(800) + costs.cpu_s_of(400, "own") == pytest.approx(costs.cpu_s)
    assert costs.cpu_s_of(9, "unknown") == pytest.approx(9 * costs.sample_cpu_s)
