"""A running feed measures its own three-stage curve, and neither scaling nor lending goes beyond its end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from mbaas.model.curves import MOST_COUNT, SATURATED, ThroughputCurve, whole
from mbaas.model.lending import DemandReport, Lender
from mbaas.model.loading import CHANGED, KEPT_COUNTS, LoadingHistory, LoadingWindow, PrepCurve
from mbaas.model.scaling import Observation, Scaler
from mbaas.settings import Lending, Scaling

WINDOW_S = 8.0

curves = st.builds(
    lambda steps, slope: ThroughputCurve(
        tuple((float(sum(step for step, _ in steps[: i + 1])), rate) for i, (_, rate) in enumerate(steps)), slope
    ),
    st.lists(st.tuples(st.floats(0.5, 20), st.floats(1, 1000)), min_size=1, max_size=3),
    st.floats(-50, 50),
)


@given(curves, st.floats(0.5, 1200), st.floats(0, 100))
def test_a_capped_curve_is_the_lower_of_curve_and_cap(curve: ThroughputCurve, most: float, count: float) -> None:
    assert curve.capped(most).rate(count) == pytest.approx(min(curve.rate(count), most), rel=1e-6, abs=1e-6)
    assert curve.capped(math.inf) == curve


@given(st.floats(1, 1000), st.floats(0.5, 1200))
def test_a_capped_line_ends_at_the_cap(slope: float, most: float) -> None:
    line = ThroughputCurve.linear(slope).capped(most)
    assert line.workers_for(2 * most) <= max(1, whole(most / slope)), "more workers are never asked for"
    assert line.rate(1e4) == pytest.approx(min(1e4 * slope, most))


def searched(curve: ThroughputCurve, rate: float) -> float:
    """`ThroughputCurve.workers_for` by a search over all counts."""
    rates = curve.rates(np.arange(MOST_COUNT + 1.0))
    reached = np.flatnonzero(rates[1:] >= rate * (1 - 1e-9))
    if not len(reached):
        return curve.peak().count
    below, above = rates[reached[0] : reached[0] + 2]
    return int(reached[0]) + (float(np.clip((rate - below) / (above - below), 0, 1)) if above > below else 1)


@given(curves, st.floats(0.5, 2000))
def test_workers_for_a_rate_are_those_of_a_search_over_all_counts(curve: ThroughputCurve, rate: float) -> None:
    assert curve.workers_for(rate) == pytest.approx(searched(curve, rate), rel=1e-6)


@given(curves)
def test_a_curve_to_saturation_ends_where_more_workers_add_next_to_nothing(curve: ThroughputCurve) -> None:
    first = curve.knots[0][1] / curve.knots[0][0]
    cut = curve.to_saturation()
    if cut != curve:
        last = cut.knots[-1][0]
        assert cut.slope == 0
        assert curve.rate(last + 1e-3) - curve.rate(last) <= SATURATED * first * 1e-3 + 1e-9
    for count, _ in cut.knots:
        assert cut.rate(count) == curve.rate(count)


def test_workers_elsewhere_are_as_fast_as_the_first() -> None:
    """Four workers share a machine that is saturated at 2; the fifth starts on another one: 200 + 100."""
    curve = ThroughputCurve(((2, 200),), 0.0)
    assert [curve.elsewhere_beyond(4).rate(count) for count in (1, 2, 4, 5, 6)] == [100, 200, 200, 300, 400]
    assert ThroughputCurve.linear(50).elsewhere_beyond(3).rate(5) == 250


def window(
    workers: int, prep_per_s: float, *, machines: int = 1, busy: float = 1.0, waits: float = 0.0
) -> LoadingWindow:
    """A window in which workers prepared for the share ``busy`` of their time, at ``prep_per_s`` if all had worked."""
    prep_s = workers * WINDOW_S * busy
    fetch_s = prep_s * waits / (1 - waits)
    samples = prep_per_s / workers * prep_s
    return LoadingWindow(
        elapsed_s=WINDOW_S, workers=workers, machines=machines, samples=samples, prep_s=prep_s, fetch_s=fetch_s
    )


def measured(*points: tuple[int, float], machines: int = 1) -> tuple[LoadingHistory, float]:
    """The history of windows with (workers, samples/s), each preceded by the change to its number of workers."""
    history, now = LoadingHistory(), 0.0
    for workers, per_s in points:
        history.observe(window(workers, per_s, machines=machines), now)  # covers a change: not a point
        now += WINDOW_S
        history.observe(window(workers, per_s, machines=machines), now)
    return history, now


def curve_of(history: LoadingHistory, workers: int, per_s: float, machines: int = 1) -> PrepCurve:
    return history.curve(workers=workers, machines=machines, worker_per_s=per_s / workers)


def test_without_points_the_rate_of_one_worker_decides() -> None:
    curve = curve_of(LoadingHistory(), 4, 400)
    assert (curve.curve, curve.basis) == (ThroughputCurve.linear(100), "by the rate of one worker")


def test_a_good_fit_decides_from_three_numbers_of_workers_on() -> None:
    """Two cores: 100, 200, then no more. A line through the rate with 4 would promise 50 for a fifth worker."""
    history, _ = measured((1, 100), (2, 200), (4, 200))
    curve = curve_of(history, 4, 200)
    assert curve.curve.rate(8) == pytest.approx(200, rel=0.02)
    assert curve.r_squared is not None
    assert "by a fit to 3 numbers of workers, R²" in curve.basis


def test_two_numbers_of_workers_give_the_slope_between_them() -> None:
    """From 2 to 4 workers 60 were added: the fifth adds 30, not 260 / 4."""
    history, _ = measured((2, 200), (4, 260))
    curve = curve_of(history, 4, 260)
    assert curve.curve.rate(5) == pytest.approx(290)
    assert "too few for a fit" in curve.basis


def test_a_poor_fit_gives_way_to_the_slope_and_it_is_said() -> None:
    history, _ = measured((1, 100), (2, 30), (3, 240), (4, 90), (5, 400))
    curve = curve_of(history, 5, 400)
    assert curve.r_squared is None
    assert "no fit is good" in curve.basis
    assert curve.curve.rate(6) == pytest.approx(480), "at most the rate of the present workers, 400 / 5"


def test_flat_points_are_a_good_fit_in_spite_of_their_r_squared() -> None:
    """All scatter is noise: R² is small, and the largest error 1 %."""
    history, _ = measured((2, 200), (3, 202), (4, 199), (5, 201))
    assert curve_of(history, 5, 201).r_squared is not None
    assert curve_of(history, 5, 201).curve.rate(9) == pytest.approx(200, rel=0.05)


def test_workers_contend_on_their_machine_only() -> None:
    """Two machines, each saturated at 2 workers. On three machines, 6 workers prepare 600."""
    history, _ = measured((2, 200), (4, 400), (8, 400), machines=2)
    assert curve_of(history, 8, 400, machines=2).curve.rate(9) == pytest.approx(400, rel=0.02)
    assert curve_of(history, 8, 400, machines=3).curve.rate(9) == pytest.approx(600, rel=0.02)


def test_idle_workers_are_no_point_because_they_do_not_contend() -> None:
    history = LoadingHistory()
    for now in (0.0, WINDOW_S, 2 * WINDOW_S):
        history.observe(window(4, 400, busy=0.5), now)
    history.observe(window(2, 200), 3 * WINDOW_S)
    history.observe(window(2, 200), 4 * WINDOW_S)
    assert curve_of(history, 2, 200).counts == 0, "one number of workers is not a curve"


def test_points_of_other_work_are_dropped() -> None:
    """Samples are cached decoded from some time on: two windows twice as fast end all earlier points."""
    history, now = measured((1, 100), (2, 200), (4, 200))
    for _ in range(2):
        now += WINDOW_S
        history.observe(window(4, 200 * (1 + 2 * CHANGED)), now)
    assert curve_of(history, 4, 300).basis == "by the rate of one worker"


def test_one_disturbed_window_changes_nothing() -> None:
    history, now = measured((1, 100), (2, 200), (4, 200), (4, 200))
    history.observe(window(4, 90), now + WINDOW_S)
    assert curve_of(history, 4, 200).r_squared is not None


def test_a_slow_change_of_the_work_is_seen_too() -> None:
    """4 % a window: after six windows the rate is 27 % above the first one."""
    history, now = measured((1, 100), (2, 200), (4, 200))
    for step in range(1, 8):
        now += WINDOW_S
        history.observe(window(4, 200 * 1.04**step), now)
    assert curve_of(history, 4, 260).basis == "by the rate of one worker"


def test_points_are_bounded_in_number() -> None:
    history, _ = measured(*((count, 100.0 * count) for count in range(1, 2 * KEPT_COUNTS)))
    assert curve_of(history, 1, 100).counts == KEPT_COUNTS


def test_workers_that_wait_for_bytes_show_the_rate_of_fetch() -> None:
    """4 workers prepare 400/s if they have bytes, which come for 3 quarters of the time: 300/s."""
    history, _ = LoadingHistory(), 0.0
    history.observe(window(4, 400, busy=0.75, waits=0.25), 0.0)
    assert history.fetch_per_s == math.inf, "the window may cover a change of workers"
    history.observe(window(4, 400, busy=0.75, waits=0.25), WINDOW_S)
    assert history.fetch_per_s == pytest.approx(300)
    history.observe(window(4, 400, waits=0.02), 2 * WINDOW_S)
    assert history.fetch_per_s == math.inf, "the caches are full now"


class Machine:
    """A feed on one machine, with the true curve of its prep and the true rate of its fetch."""

    def __init__(self, curve: ThroughputCurve, fetch_per_s: float, *, scatter: float, seed: int) -> None:
        self.history, self.curve, self.fetch_per_s = LoadingHistory(), curve, fetch_per_s
        self._random, self._scatter = np.random.default_rng(seed), scatter

    def observe(self, workers: int, demand_per_s: float, now: float, most: int) -> Observation:
        """The trials consume what is loaded. Workers wait for bytes if fetch is the slowest."""
        prep_per_s = self.curve.rate(workers) * float(self._random.normal(1, self._scatter))
        loaded = min(prep_per_s, self.fetch_per_s)
        served = min(loaded, demand_per_s)
        busy, waits = served / prep_per_s, 1 - loaded / prep_per_s
        self.history.observe(window(workers, prep_per_s, busy=busy, waits=waits), now)
        stall = 1 - served / demand_per_s
        worker_per_s = prep_per_s / workers
        return Observation(
            # Trials cannot tell exactly which of the two they wait for.
            prep_stall=stall,
            fetch_stall=min(stall, waits),
            demand_per_s=demand_per_s,
            worker_per_s=worker_per_s,
            fetch_per_s=self.history.fetch_per_s,
            prep=self.history.curve(workers=workers, machines=1, worker_per_s=worker_per_s),
            workers=workers,
            idle=1 - busy,
            reserved=1,
            most=most,
        )


AT_ONCE = Scaling(grow_hold_s=0, idle_hold_s=0, cooldown_s=0)
MOST = 24


@pytest.mark.slow
@given(
    knee=st.integers(1, 8),
    each=st.floats(20, 200),
    fall=st.floats(-0.005, 0.0),
    fetch=st.floats(0.5, 20),
    demand=st.floats(0.5, 40),
    seed=st.integers(0, 1000),
)
@examples(max_examples=60, deadline=None)
def test_scaling_stops_at_the_end_of_prep_and_of_fetch(
    knee: int, each: float, fall: float, fetch: float, demand: float, seed: int
) -> None:
    """On any machine, whatever the demand: workers that add nothing are not requested for long.

    ``fetch`` and ``demand`` are in workers. One window measures a number of workers, so growth may pass the knee once;
    after that the slope is known, and growth from a number beyond the knee ends.
    """
    curve = ThroughputCurve(((float(knee), knee * each),), fall * each)
    feed, scaler = Machine(curve, fetch * each, scatter=0.005, seed=seed), Scaler(AT_ONCE)
    workers, now, grown = 1, 0.0, []
    for _ in range(40):
        for _ in range(3):  # the decision comes after the window has settled
            seen = feed.observe(workers, demand * each, now, MOST)
            now += WINDOW_S
        decision = scaler.observe(seen, now)
        if decision.change > 0:
            grown.append((workers, decision.workers))
        workers = decision.workers
    useless = [before for before, _ in grown if before > min(knee, fetch * 1.2)]
    assert len(useless) <= 1, grown
    needed = min(demand, knee, fetch)
    # Enough for what can be used at all: within the tolerance of a peak, and of a noisy rate.
    assert min(curve.rate(workers), fetch * each, demand * each) >= 0.85 * needed * each, (workers, grown)


def test_a_line_would_grow_without_end() -> None:
    """Two cores: with more workers each is slower, so the line through one worker's rate asks for ever more."""
    workers, scaler = 2, Scaler(AT_ONCE)
    for now in range(10):
        each = 200 / workers
        seen = Observation(
            prep_stall=0.5,
            fetch_stall=0.0,
            demand_per_s=400,
            worker_per_s=each,
            workers=workers,
            idle=0.0,
            reserved=1,
            most=MOST,
        )
        workers = scaler.observe(seen, now).workers
    assert workers == MOST


def report(feed: str, workers: int, demand: float, loading: ThroughputCurve) -> DemandReport:
    return DemandReport(
        feed=feed, kind="cpu", workers=workers, borrowed={}, reserved=workers, demand_per_s=demand, loading=loading
    )


@pytest.mark.parametrize(
    ("loading", "lends"),
    [
        (ThroughputCurve.linear(100), True),
        (ThroughputCurve.linear(100).capped(200), False),  # storage delivers no more than 2 workers prepare
        (ThroughputCurve(((2, 200),), 0.0), False),  # two cores
    ],
)
def test_a_feed_that_gains_nothing_is_lent_nothing(loading: ThroughputCurve, lends: bool) -> None:
    """b has 2 workers of 100/s each and trials that could take 500/s; a has 3 more than it needs."""
    reports = [report("a", 4, 50, ThroughputCurve.linear(100)), report("b", 2, 500, loading)]
    move = Lender("a", Lending(hold_s=0, pause_s=0)).observe(reports, 0.0)
    assert (move is not None) == lends


def test_a_further_machine_is_asked_for_where_the_present_ones_are_full() -> None:
    """Two workers saturate the machine. With room there a third adds nothing; elsewhere it adds 100: 3 are needed."""
    prep = PrepCurve(ThroughputCurve(((2, 200),), 0.0), 3, 0.99)

    def needed(has_room: bool) -> int | None:
        return Observation(
            prep_stall=0.5,
            fetch_stall=0.0,
            demand_per_s=280,
            worker_per_s=100,
            prep=prep,
            has_room=has_room,
            workers=2,
            idle=0.0,
            reserved=1,
            most=9,
        ).needed

    assert (needed(True), needed(False)) == (2, 3)
