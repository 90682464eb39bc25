"""Feeds lend surplus workers to feeds that need them, and get them back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mbaas.model.curves import ThroughputCurve
from mbaas.model.lending import DemandReport, Lender, WorkerMove, allocate_workers
from mbaas.settings import Lending

AT_ONCE = Lending(hold_s=0, pause_s=0)


def report(feed: str, workers: int, demand: float, **fields: object) -> DemandReport:
    """Report of a feed whose workers prepare 100 samples/s each and are reserved by default."""
    given = {"kind": "cpu", "borrowed": {}, "reserved": workers, "loading": ThroughputCurve.linear(100.0), **fields}
    return DemandReport(feed=feed, workers=workers, demand_per_s=demand, **given)  # type: ignore[arg-type]


def moves_of(reports: list[DemandReport]) -> dict[str, WorkerMove]:
    """The move of each feed if it did not have to wait."""
    found = {report.feed: Lender(report.feed, AT_ONCE).observe(reports, 0.0) for report in reports}
    return {feed: move for feed, move in found.items() if move is not None}


def test_who_has_one_too_many_lends_it_to_who_lacks_most() -> None:
    """a can use 2 of 4, b lacks 1 of 2, c lacks 3 of 4: the fair shares of the 7 workers are 2, 2 and 3."""
    found = moves_of([report("a", 4, 150), report("b", 1, 190), report("c", 2, 390)])
    assert list(found) == ["a"]
    assert (found["a"].target, found["a"].is_return) == ("c", False)
    assert found["a"].reason.startswith("a lends a worker to c: a prepares 200 samples/s with 2")


@pytest.mark.parametrize(
    "reports",
    [
        [report("a", 4, 150)],  # no other feed
        [report("a", 4, 150), report("b", 1, 90)],  # no feed lacks a worker
        [report("a", 2, 190), report("b", 1, 500)],  # both can use their reserved workers
        [report("a", 1, 0), report("b", 1, 500)],  # the last worker stays
        [report("a", 4, 150, loading=None), report("b", 1, 500)],  # the rate of a's workers is unknown
    ],
)
def test_workers_stay_where_they_are(reports: list[DemandReport]) -> None:
    assert moves_of(reports) == {}


def test_a_feed_without_trials_lends_all_but_one() -> None:
    feeds = [report("a", 3, 0, loading=None), report("b", 1, 300)]
    assert moves_of(feeds)["a"].target == "b"
    feeds = [replace(feeds[0], workers=1), report("b", 3, 300, borrowed={"a": 2}, reserved=1)]
    assert moves_of(feeds) == {}


def test_a_borrowed_worker_goes_home_when_its_owner_can_use_it() -> None:
    """a reserved 3 workers and can use them now; b borrowed two."""
    feeds = [report("a", 1, 300, reserved=3), report("b", 3, 300, borrowed={"a": 2}, reserved=1)]
    found = moves_of(feeds)
    assert (found["b"].target, found["b"].is_return) == ("a", True)


def test_what_is_borrowed_goes_home_first_even_if_a_third_feed_lacks_more() -> None:
    feeds = [
        report("a", 1, 50, reserved=2),
        report("b", 3, 90, borrowed={"a": 1}, reserved=2),
        report("c", 1, 500),
    ]
    found = moves_of(feeds)
    assert (found["b"].target, found["b"].is_return) == ("a", True)


def test_a_feed_keeps_its_least_number_even_idle_and_borrows_no_more_than_its_quota() -> None:
    """a is idle with 4 workers of which it keeps 3; b can use 5 more and may borrow one."""
    idle, hungry = report("a", 4, 0, least=3), report("b", 1, 600, max_borrowed=1)
    assert moves_of([idle, hungry])["a"].target == "b"
    assert moves_of([replace(idle, workers=3), report("b", 1, 600)]) == {}
    borrowed = replace(hungry, workers=2, borrowed={"a": 1})
    assert moves_of([report("a", 3, 0), borrowed]) == {}
    assert "more than its quota" in allocate_workers([idle, borrowed]).by_job[1].reason


def test_a_feed_with_a_larger_weight_borrows_first() -> None:
    """b and c both lack 4 workers, and a can lend one: with equal weights b, the first by name, gets it."""
    feeds = [report("a", 2, 0), report("b", 1, 500), report("c", 1, 500)]
    assert moves_of(feeds)["a"].target == "b"
    feeds[2] = replace(feeds[2], weight=2.0)
    assert moves_of(feeds)["a"].target == "c"


def test_a_move_waits_until_it_has_been_right_for_a_while_and_after_the_last_one() -> None:
    lender = Lender("a", Lending(hold_s=3, pause_s=5))
    rich, poor, content = report("a", 4, 50), report("b", 1, 500), report("b", 1, 90)
    assert lender.observe([rich, poor], 0.0) is None
    assert lender.observe([rich, content], 2.0) is None  # the wait starts again
    assert lender.observe([rich, poor], 3.0) is None
    assert lender.observe([rich, poor], 5.9) is None
    assert lender.observe([rich, poor], 6.0) is not None
    assert lender.observe([rich, poor], 10.9) is None
    assert lender.observe([rich, poor], 11.0) is not None


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.floats(0, 2000), st.floats(10, 500)),
        min_size=2,
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_lending_comes_to_an_end_with_the_shares(feeds: list[tuple[int, float, float]]) -> None:
    """For any demands: moves end, and then no feed that could use its reserved workers has fewer."""
    reports = {
        f"feed-{i}": report(f"feed-{i}", workers, demand, loading=ThroughputCurve.linear(rate))
        for i, (workers, demand, rate) in enumerate(feeds)
    }
    for _ in range(sum(workers for workers, _, _ in feeds)):
        found = moves_of(list(reports.values()))
        if not found:
            break
        lender, move = next(iter(found.items()))
        giver, taker = reports[lender], reports[move.target]
        reports[lender] = replace(giver, workers=giver.workers - 1)
        reports[move.target] = replace(taker, workers=taker.workers + 1)
    assert moves_of(list(reports.values())) == {}
    allocated = allocate_workers(tuple(reports.values())).workers
    for feed in reports.values():
        assert feed.loading is not None
        useful = max(1, -int(-feed.demand_per_s * (1 - 1e-9) // feed.loading.rate(1)))
        assert feed.workers >= min(feed.reserved, useful, allocated[feed.feed])
