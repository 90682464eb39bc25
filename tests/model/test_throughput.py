"""Throughput curves give rates, stages, peaks and required counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve, whole

RISE_PEAK_FALL = ThroughputCurve(((4, 400), (8, 600)), slope=-25)
"""100 per worker up to 4, 50 more for each up to 8, then 25 less for each further worker."""


def test_the_rate_follows_the_lines() -> None:
    """2 x 100; 400 + 2 x 50; 600 - 2 x 25; 600 - 30 x 25 would be -150."""
    counts = [0, 0.5, 2, 4, 6, 8, 10, 38]
    assert [RISE_PEAK_FALL.rate(count) for count in counts] == [0, 50, 200, 400, 500, 600, 550, 0]
    assert RISE_PEAK_FALL.rates(np.array(counts)).tolist() == [0, 50, 200, 400, 500, 600, 550, 0]


def test_a_rate_is_a_line_between_points_through_zero_and_flat_after_the_last() -> None:
    """2 threads give 100 and 4 give 160, so 3 give (100 + 160) / 2 = 130, 1 gives 100 / 2 = 50, and 8 give 160."""
    rate = ThroughputCurve.through({4: 160.0, 2: 100.0})
    assert [rate.rate(threads) for threads in (1, 2, 3, 4, 8)] == [50, 100, 130, 160, 160]
    assert [rate.rate_of_each(threads) for threads in (1, 2, 4, 8)] == [50, 50, 40, 20]


def test_the_workers_that_reach_a_rate() -> None:
    """250 = 2.5 x 100; 440 = 400 + 0.8 x 50; 0 needs no worker; no count reaches 601, so it is the peak."""
    needed = [RISE_PEAK_FALL.workers_for(rate) for rate in (0, 100, 250, 440, 600, 601)]
    assert needed == pytest.approx([0, 1, 2.5, 4.8, 8, 8])
    assert ThroughputCurve.linear(0.5).workers_for(1e6) == 2e6, "a line has no limit"


def test_a_rate_that_is_met_on_paper_needs_no_further_worker() -> None:
    """49 x (1/49) is slightly below 1 in floating point."""
    assert 49 * (1 / 49) < 1
    assert whole(ThroughputCurve.linear(1 / 49).workers_for(1)) == 49
    assert whole(3.0000000004) == 3


def test_the_peak_is_the_smallest_count_near_the_highest_rate() -> None:
    """Saturated at 300 from 3 on, rising by 0.5 for each more: 8 threads give 302.5, and 3 give 300, 99.2 %."""
    assert ThroughputCurve(((3, 300),), slope=0.5).peak(most=8).count == 3
    assert RISE_PEAK_FALL.peak() == RISE_PEAK_FALL.peak(most=16)
    assert RISE_PEAK_FALL.peak().count == 8
    assert RISE_PEAK_FALL.peak(most=5).rate_per_s == 450


def test_stages_are_told_by_what_one_more_worker_adds() -> None:
    """100 of 100 added up to 4, 50 of 100 up to 8, and a loss beyond."""
    stages = [RISE_PEAK_FALL.stage(count) for count in (0, 2, 4, 6, 8, 12)]
    assert stages == ["no contention", "no contention", "contention", "contention", "saturation", "saturation"]


def test_the_seconds_of_two_kinds_of_samples_add_up() -> None:
    """Half at 100/s and half at 1,000/s for each worker: 5.5 ms per sample."""
    slow, fast = ThroughputCurve.linear(100), ThroughputCurve.linear(1000)
    blend = slow.blended(fast, 0.5)
    assert [blend.rate(count) for count in (1, 2, 50)] == pytest.approx([1 / 5.5e-3, 2 / 5.5e-3, 50 / 5.5e-3])
    assert slow.blended(fast, 0) == slow
    assert slow.blended(fast, 1) == fast
    # 100, 200, then flat, and 1,000, 2,000, 3,000, then falling; a quarter of the samples are of the second kind
    bent = ThroughputCurve.through({1: 100, 2: 200}).blended(ThroughputCurve(((3.0, 3000.0),), -500.0), 0.25)
    by_hand = {
        1: 1 / (0.75 / 100 + 0.25 / 1000),
        2.0: 1 / (0.75 / 200 + 0.25 / 2000),
        3: 1 / (0.75 / 200 + 0.25 / 3000),
    }
    assert {count: bent.rate(count) for count in by_hand} == pytest.approx(by_hand)
    assert bent.rate(4) == pytest.approx(1 / (0.75 / 200 + 0.25 / 2500))
    assert bent.rate(1.5) == pytest.approx((by_hand[1] + by_hand[2]) / 2)
    assert ThroughputCurve.linear(0).blended(fast, 0.5).rate(7) == 0


@given(
    first=st.floats(0.1, 1e4),
    knots=st.lists(st.tuples(st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=2),
    fall=st.floats(0, 1),
    share=st.floats(0, 1.2),
)
def test_what_is_read_off_agrees_with_the_rates(
    first: float, knots: list[tuple[int, float]], fall: float, share: float
) -> None:
    """Checked against the definitions, count by count, on concave curves."""
    at, height, slope, made = 0.0, 0.0, first, []
    for step, bend in knots:
        at, height = at + step, height + step * slope
        made.append((at, height))
        slope *= bend
    curve = ThroughputCurve(tuple(made), slope=-fall * first)
    rates = [curve.rate(count) for count in range(1, 65)]
    counts = np.linspace(0, 64, 200)
    assert rates == curve.rates(np.arange(1.0, 65)).tolist()
    assert [curve.rate(count) for count in counts.tolist()] == curve.rates(counts).tolist(), "one by one, bit for bit"
    goal = share * max(rates)
    first_reaching = next((c for c, rate in enumerate(rates, 1) if rate >= goal * (1 - 1e-9)), None)
    needed, peak = curve.workers_for(goal), curve.peak(most=64)
    if first_reaching is not None:
        assert first_reaching - 1 - 1e-6 <= needed <= first_reaching
    else:
        assert needed == peak.count
    assert peak.rate_per_s >= 0.98 * max(rates)
    assert all(rate < peak.rate_per_s for rate in rates[: peak.count - 1])


@pytest.mark.parametrize(
    ("knots", "slope", "match"),
    [
        (((4, 10), (4, 20)), 1.0, r"must ascend from above 0, got \[4, 4\]"),
        (((0, 10),), 1.0, r"must ascend from above 0, got \[0\]"),
        (((4, -1),), 1.0, r"must be 0 or more and finite, got \[-1\]"),
        ((), -1.0, r"slope must be finite, and 0 or more without knots, got -1\.0"),
        ((), math.nan, "slope must be finite"),
    ],
)
def test_impossible_curves_are_refused(knots: tuple[tuple[float, float], ...], slope: float, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ThroughputCurve(knots, slope)


@pytest.mark.parametrize(
    ("points", "match"),
    [
        ({}, r"must have points above 0, got \{\}"),
        ({0: 5.0}, r"must ascend from above 0, got \[0.0\]"),
        ({1: 0.0}, r"must have points above 0, got \{1: 0.0\}"),
    ],
)
def test_impossible_points_are_refused(points: dict[int, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ThroughputCurve.through(points)
