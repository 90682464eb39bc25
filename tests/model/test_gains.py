"""The gain of each change of a feed's workers is recorded as predicted and as it came; docstrings give the sums."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.model.curves import ThroughputCurve
from mbaas.model.gains import GAIN_S, KEPT_CHANGES, GainLog, WorkerCounts
from mbaas.model.loading import PrepCurve
from mbaas.model.scaling import Observation

CURVE = ThroughputCurve(((2, 200),), 50.0)
"""100 samples/s for each of two workers, 50 for each further one."""


def seen(workers: int, demand_per_s: float = 1000.0) -> Observation:
    return Observation(
        prep_stall=0.5,
        fetch_stall=0.0,
        demand_per_s=demand_per_s,
        worker_per_s=100.0,
        prep=PrepCurve(CURVE, 3, 0.99),
        workers=workers,
        idle=0.0,
        reserved=1,
        most=8,
    )


class Feed:
    """A feed that prepares ``efficiency`` of what the curve promises."""

    def __init__(self, efficiency: float = 1.0) -> None:
        self.log, self.now, self.samples = GainLog(100.0), 100.0, 0.0
        self._efficiency = efficiency

    def run(self, seconds: int, counts: WorkerCounts, demand_per_s: float = 1000.0) -> None:
        for _ in range(seconds):
            self.log.observe(counts, seen(counts.here, demand_per_s), samples=self.samples, now=self.now)
            self.samples += self._efficiency * min(demand_per_s, CURVE.rate(counts.here))
            self.now += 1


def test_a_borrowed_worker_gains_what_was_predicted_or_less() -> None:
    """The third worker is to add 50, and adds 40 where 80 % of all rates come."""
    feed = Feed(0.8)
    feed.run(20, WorkerCounts(2))
    feed.run(5, WorkerCounts(3, borrowed=1))
    (change,) = feed.log.changes
    assert (change.at_s, change.causes, change.before, change.after) == (20, ("borrowed",), 2, 3)
    assert (change.predicted_per_s, change.gained_per_s) == (50, None)
    feed.run(5, WorkerCounts(3, borrowed=1))
    assert feed.log.changes[0].gained_per_s == pytest.approx(40)
    assert "by a fit" in change.basis


def test_a_lent_worker_costs_its_owner_nothing_that_trials_take() -> None:
    feed = Feed()
    feed.run(20, WorkerCounts(3), demand_per_s=120)
    feed.run(20, WorkerCounts(2, away=1), demand_per_s=120)
    (change,) = feed.log.changes
    assert (change.causes, change.predicted_per_s, change.gained_per_s) == (("lent",), 0, 0)


def test_samples_that_only_fill_the_staging_are_no_gain_and_their_end_no_loss() -> None:
    """Trials take 60 samples/s; two workers prepare 200 at first, and the one that stays prepares 100."""
    log, samples = GainLog(0.0), 0.0
    for now in range(40):
        workers = 2 if now < 20 else 1
        log.observe(WorkerCounts(workers, away=2 - workers), seen(workers, 60.0), samples=samples, now=float(now))
        samples += 100.0 * workers
    (change,) = log.changes
    assert (change.predicted_per_s, change.gained_per_s) == (0, 0)


def test_changes_without_time_between_them_are_one() -> None:
    """From 1 to 3 workers: 250 - 100."""
    feed = Feed()
    feed.run(20, WorkerCounts(1))
    feed.run(3, WorkerCounts(2, borrowed=1))
    feed.run(20, WorkerCounts(3, borrowed=1))
    (change,) = feed.log.changes
    assert (change.causes, change.before, change.after) == (("borrowed", "started"), 1, 3)
    assert (change.predicted_per_s, change.gained_per_s) == (150, pytest.approx(150))


@pytest.mark.parametrize(
    ("before", "after", "causes"),
    [
        (WorkerCounts(2, away=1), WorkerCounts(3), ("back",)),
        (WorkerCounts(3, borrowed=1), WorkerCounts(2), ("returned",)),
        (WorkerCounts(3), WorkerCounts(2), ("ended",)),
        (WorkerCounts(2), WorkerCounts(2, borrowed=1), ("borrowed", "ended")),
        (WorkerCounts(2), WorkerCounts(2), ()),
    ],
)
def test_every_difference_has_its_causes(before: WorkerCounts, after: WorkerCounts, causes: tuple[str, ...]) -> None:
    assert after.causes(before) == causes


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2), st.integers(1, 20)), max_size=30))
def test_changes_follow_on_each_other_and_are_bounded(phases: list[tuple[int, int, int, int]]) -> None:
    feed = Feed()
    for here, borrowed, away, seconds in phases:
        feed.run(seconds, WorkerCounts(here, borrowed, away))
    changes = feed.log.changes
    assert len(changes) <= KEPT_CHANGES
    for one, other in pairwise(changes):
        assert one.after == other.before
        assert one.gained_per_s is not None
        assert other.at_s - one.at_s >= GAIN_S
    for change in changes:
        assert change.causes
        assert change.predicted_per_s == pytest.approx(CURVE.rate(change.after) - CURVE.rate(change.before))
