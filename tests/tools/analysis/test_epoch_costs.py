"""Costs of an epoch of a trial, in CPU time and money, match hand calculations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from stated_rates import any_rates, any_setup, round_rates

from mbaas.model.quantity import Quantity, stated
from mbaas.model.rates import Rates, Setup
from mbaas.model.sharing import LoadingCosts
from mbaas.tools.analysis.advice import EpochCosts, costs_so_far, epoch_costs

MS = 1e-3


def rates(**changes: Any) -> Rates:
    """Rates of 1,000 samples, in CPU-ms per sample: prep 5, staging 0.5, delivery to a trial 0.1, reading 1, step 2."""
    costs = {"staging_cpu_s": 0.5, "delivery_cpu_s": 0.1, "read_cpu_s": 1.0, "step_cpu_s": 2.0}
    stated_costs = {name: stated(ms * MS, unit="CPU-s") for name, ms in costs.items()}
    return round_rates(**{**stated_costs, **changes})


@pytest.mark.parametrize(
    ("setup", "ms"),
    [
        (Setup(), 5 + 0.5 + 1 + 0.1),
        (Setup(trials=4), (5 + 0.5 + 1) / 4 + 0.1),
        (Setup(trials=4, cache_bytes=1e8), (5 + 0.5) / 4 + 0.1),
        (Setup(trials=4, cache_bytes=2.5e7, nodes=2), (5 + 0.5 + 0.5) / 4 + 0.1),
        (Setup(trials=3, nodes=2), (5 + 0.5 + 1) / 3 + 0.1),
        (Setup(trials=4, sharing=False), 5 + 0.5 + 1 + 0.1),
        (Setup(trials=3, nodes=2, sharing=False, cores=64), 5 + 0.5 + 1 + 0.1),
    ],
)
def test_what_is_made_once_is_divided_by_all_trials(setup: Setup, ms: float) -> None:
    """Steps are not a cost of loading. 1,000 samples of 1 ms are 1 s."""
    found = epoch_costs(rates(), setup)
    assert found.cpu_s.value == pytest.approx(ms)
    assert found.alone_cpu_s.value == pytest.approx(5)
    assert (found.price, found.alone_price) == (None, None)


def test_what_goes_on_all_the_time_is_paid_for_as_long_as_an_epoch_takes() -> None:
    """The background load takes 0.5 of 4 cores.

    One trial takes (6.6 + 2) / 3.5 = 2.46 ms a sample, but storage takes 4 ms. With all cached, 4 trials take
    (5.5 + 4 x 2.1) / 3.5 = 3.97 ms on each node.
    """
    busy = rates(background_cores=stated(0.5, unit="cores"))
    assert epoch_costs(busy, Setup()).cpu_s.value == pytest.approx(6.6 + 0.5 * 4)
    cached = epoch_costs(busy, Setup(trials=4, cache_bytes=1e8)).cpu_s.value
    assert cached == pytest.approx(5.5 / 4 + 0.1 + 0.5 * (5.5 + 4 * 2.1) / 3.5 / 4)


def test_money_is_the_price_of_these_hours() -> None:
    costs = {"prep_cpu_s": Quantity(3.6, low=1.8, high=7.2, unit="CPU-s")}
    found = epoch_costs(round_rates(**costs), Setup(trials=2, cpu_price_per_h=0.5))
    assert found.price is not None
    assert (found.price.low, found.price.value, found.price.high) == pytest.approx((0.125, 0.25, 0.5))
    assert found.sentence == (
        "loading takes about as much CPU time as a DataLoader for each trial: 30 min (15 min to 60 min) for 0.25 "
        "(0.125 to 0.5) instead of at least 60 min (30 min to 2 h) for 0.5 (0.25 to 1) for an epoch of each trial; a "
        "feed pays from 2 trials on"
    )


@pytest.mark.parametrize(("delivery_ms", "trials"), [(0.1, 2), (3.0, 4), (4.89, 60), (6.0, None)])
def test_a_feed_pays_from_some_number_of_trials_on(delivery_ms: float, trials: int | None) -> None:
    """Preparing takes 5 ms in a DataLoader. A feed takes 5 + 0.5 + 1 for all, and the delivery for each."""
    given_rates = rates(delivery_cpu_s=stated(delivery_ms * MS, unit="CPU-s"))
    assert epoch_costs(given_rates, Setup(trials=7)).pays_from == trials


@pytest.mark.parametrize(
    ("here_s", "alone_s", "words"),
    [
        (
            2.0,
            9.0,
            "loading takes 4.5 times less CPU time than a DataLoader for each trial: 2 s instead of at least 9 s",
        ),
        (3.0, 2.0, "loading takes 1.5 times the CPU time of a DataLoader for each trial: 3 s instead of at least 2 s"),
        (7.6e-4, 7.6e-4, "loading takes about as much CPU time as a DataLoader for each trial: 760 µs instead of"),
    ],
)
def test_the_ratio_comes_first_and_times_are_in_units_that_fit(here_s: float, alone_s: float, words: str) -> None:
    here, alone = (stated(seconds, unit="CPU-s") for seconds in (here_s, alone_s))
    costs = EpochCosts(cpu_s=here, alone_cpu_s=alone, price=None, alone_price=None, pays_from=None)
    assert costs.sentence.startswith(words)


@settings(max_examples=25)
@given(any_rates(), any_setup())
def test_no_trial_pays_for_more_than_a_feed_of_its_own(given_rates: Rates, setup: Setup) -> None:
    shared, alone = (
        epoch_costs(given_rates, Setup(**{**vars(setup), "sharing": sharing, "disk_bytes": 0, "cache_bytes": 0}))
        for sharing in (True, False)
    )
    assert shared.cpu_s.low <= shared.cpu_s.value <= shared.cpu_s.high
    assert shared.cpu_s.value <= alone.cpu_s.value * (1 + 1e-6) + 1e-9


def test_a_running_feed_tells_what_it_took_on_average() -> None:
    costs = LoadingCosts(3000.0, 500.0, 100.0, 4000, 1500.0, 500, cpu_price_per_h=1.0)
    found = costs_so_far(costs, 2000, prepared=1500)
    assert found is not None
    assert found.price is not None
    assert found.cpu_s.value == pytest.approx(1800)
    assert found.price.value == pytest.approx(0.5)
    assert found.alone_cpu_s.value == pytest.approx(3 * 2000)
    assert found.sentence == (
        "loading takes 3.33 times less CPU time than a DataLoader for each trial: 30 min for 0.5 instead of at least "
        "100 min for 1.67 for an epoch of each trial; a feed pays from 1 trial on"
    )
    assert costs_so_far(LoadingCosts(prep_cpu_s=1.0), 2000) is None
