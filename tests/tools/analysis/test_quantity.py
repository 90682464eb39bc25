"""Medians have sound intervals, and arithmetic keeps these correct."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.quantity import Quantity, measured, spanning, stated


def test_few_measurements_span_their_extremes() -> None:
    assert measured([7.0, 5.0, 9.0], unit="s") == Quantity(7.0, low=5.0, high=9.0, unit="s", samples=3)
    assert measured([7.0], unit="s") == Quantity(7.0, low=7.0, high=7.0, unit="s", samples=1)


@pytest.mark.parametrize(("number", "rank"), [(5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (20, 6)])
def test_many_measurements_leave_out_what_is_too_far(number: int, rank: int) -> None:
    """Sign test: the 2nd of 9 misses in 2 (1 + 9) / 2^9 = 3.9 % of cases, of 8 in 2 (1 + 8) / 2^8 = 7.0 %."""
    found = measured([float(n) for n in range(1, number + 1)], unit="s")
    assert (found.low, found.high) == (rank, number + 1 - rank)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    """Skewed, with median ln 2: intervals of 11 numbers miss it in 2 (1 + 11) / 2^11 = 1.2 %, 24 of 2,000 times."""
    chance = random.Random(7)
    drawn = (measured([chance.expovariate(1) for _ in range(11)], unit="s") for _ in range(2000))
    missed = sum(not q.low <= math.log(2) <= q.high for q in drawn)
    assert 8 <= missed <= 45


def test_arithmetic() -> None:
    """100 (80 to 125) samples/s has the inverse 10 (8 to 12.5) ms, which is then doubled and increased by 1 s."""
    rate = Quantity(100.0, low=80.0, high=125.0, unit="samples/s", samples=5)
    seconds = rate.inverse(unit="s")
    assert (seconds.value, seconds.low, seconds.high, seconds.samples) == (0.01, 0.008, 0.0125, 5)
    more = seconds.scaled(2).plus(stated(1.0, unit="s"))
    assert (more.value, more.low, more.high, more.unit) == (1.02, 1.016, 1.025, "s")
    assert rate.spread == pytest.approx(0.225)
    assert [rate.at("low"), rate.at("value"), rate.at("high")] == [80, 100, 125]


POSITIVE = st.floats(1e-6, 1e6)


@settings(max_examples=50, deadline=None)
@given(st.lists(POSITIVE, min_size=1, max_size=30), st.lists(POSITIVE, min_size=1, max_size=30), st.data())
def test_results_hold_for_everything_within_the_intervals(
    these: list[float], those: list[float], data: st.DataObject
) -> None:
    a, b = measured(these, unit="s"), measured(those, unit="s")
    assert a.low <= a.value <= a.high
    x, y = (data.draw(st.floats(q.low, q.high)) for q in (a, b))
    for found, truth in ((a.plus(b), x + y), (a.inverse(unit="1/s"), 1 / x)):
        assert found.low * (1 - 1e-12) <= truth <= found.high * (1 + 1e-12)


def test_json_round_trip() -> None:
    rate = measured([1.5, 2.5, 3.5], unit="bytes/s")
    assert Quantity.from_json(rate.to_json()) == rate


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"must lie within its interval, got 3.0 s outside \[1.0, 2.0\]"):
        Quantity(3.0, low=1.0, high=2.0, unit="s")
    with pytest.raises(ConfigError, match=r"must be finite, got 1.0, 1.0, inf s"):
        spanning(1.0, math.inf, unit="s")
    with pytest.raises(ConfigError, match=r"at least 1 measurement, got 0"):
        measured([], unit="s")
