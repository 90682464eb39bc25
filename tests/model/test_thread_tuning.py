"""Threads are tuned between fetch and prep under load: they grow only if that helps, and never oscillate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_loads import BATCH, WINDOW_S, Node, capped, fast, late, tuned

from mbaas.model.curves import ThroughputCurve
from mbaas.model.threads import NodeLoad, ObservedCurve, ThreadTuner, TierBytes, Tuned
from mbaas.settings import Threads

HOUR_S = 3600.0


def test_fast_storage_stays_as_it_is() -> None:
    """A minibatch of 10 MB takes 5.6 ms to read and 50 ms to prepare."""
    assert tuned(Node(fast(), step_s=0.001), seconds=HOUR_S) == []


def test_storage_that_answers_late_gets_twice_as_many_until_training_is_the_bottleneck() -> None:
    """100 samples at 50 ms take 0.625 s with 8 threads and 0.3125 s with 16.

    18 threads fetch in 0.28 s, 80 % of a step of 0.35 s.
    """
    node = Node(late(), step_s=0.35)
    widths = tuned(node, seconds=HOUR_S)
    assert widths[0] == 16
    assert 16 < widths[-1] <= 29
    assert len(widths) <= 3
    assert node.minibatch_s() == 0.35


def test_as_many_as_are_allowed_where_nothing_less_is_enough() -> None:
    """32 threads still take 0.156 s, training 0.01 s."""
    assert tuned(Node(late(), step_s=0.01), seconds=HOUR_S) == [16, 32]
    assert tuned(Node(late(), step_s=0.01, most_fetch=13)) == [13]


def test_threads_that_bring_nothing_are_taken_back() -> None:
    """6 threads fill a link of 50 MB/s; 16 are tried and turn out as slow as 8."""
    node = Node(capped(50e6, 6), step_s=0.01)
    assert tuned(node, seconds=600) == [16, 8]
    said = [change.reason for _, change in node.changes]
    assert said[0].startswith("16 instead of 8 threads read storage: a minibatch takes 200 ms")
    assert said[1].startswith("8 instead of 16 threads read storage: storage gives ")


def test_a_link_that_twelve_threads_fill_keeps_about_so_many() -> None:
    node = Node(capped(24e6, 12), step_s=0.01)
    widths = tuned(node, seconds=600)
    assert 11 <= widths[-1] <= 16
    assert len(widths) <= 4


@pytest.mark.parametrize(("threads", "noise"), [(3, 0.03), (6, 0.1), (12, 0.1), (24, 0.03)])
def test_saturated_storage_is_not_tried_again_and_again(threads: int, noise: float) -> None:
    """In two hours there are few changes, at growing intervals."""
    node = Node(capped(40e6, threads), step_s=0.01, noise=noise)
    widths = tuned(node, seconds=2 * HOUR_S)
    assert len(widths) <= 10
    times = [at for at, _ in node.changes]
    assert sum(at > HOUR_S for at in times) <= 4
    assert node.fetch >= 0.7 * min(threads, 32)


def test_prep_that_is_slower_than_storage_leaves_fetch_alone() -> None:
    """Prep takes 1 s per minibatch, fetch 0.625 s."""
    assert tuned(Node(late(), step_s=0.01, prep=ThroughputCurve.linear(100)), seconds=HOUR_S) == []


def test_training_that_is_slower_than_storage_leaves_fetch_alone() -> None:
    assert tuned(Node(late(), step_s=1.5), seconds=HOUR_S) == []


def test_threads_that_find_nothing_to_do_are_not_made_more() -> None:
    """Read-ahead is not deep enough for more than a quarter of the threads."""
    assert tuned(Node(late(), step_s=0.01, filled=0.25), seconds=600) == []


def test_nothing_is_decided_without_trials_or_reads() -> None:
    node = Node(late(), step_s=float("inf"))
    assert tuned(node) == []
    assert tuned(Node(late(), step_s=0.01, sample_bytes=0)) == []


def test_storage_that_was_slow_for_a_while_is_tried_again_when_that_was_long_ago() -> None:
    """A link of 50 MB/s for the first five minutes, then 6 MB/s for each of 32 threads."""
    node, tuner = Node(capped(50e6, 6), step_s=0.01), ThreadTuner(Threads())
    assert [change.fetch_threads for change in node.run(tuner, seconds=300)] == [16, 8]
    node.storage = ThroughputCurve.linear(6e6)
    assert [change.fetch_threads for change in node.run(tuner, seconds=1800, begin_s=300)] == [16, 32]


def test_prep_gives_threads_when_fetch_has_no_others() -> None:
    """2 workers with 4 threads each, and 8 for fetch. Prep peaks at 3 threads; fetch needs all it can get."""
    prep = ThroughputCurve(((3, 3000),), slope=0.0)
    node = Node(late(), step_s=0.01, prep=prep, workers=2, threads=4, fetch=8, most_fetch=8)
    before = node.minibatch_s()
    node.run(ThreadTuner(Threads()), seconds=HOUR_S)
    assert node.preparing < 8 < node.fetch
    assert node.preparing + node.fetch <= 16
    assert node.minibatch_s() < 0.8 * before
    assert len(node.changes) <= 8
    assert "threads prepare" in node.changes[0][1].reason


def test_prep_gets_its_threads_back_when_the_cache_holds_everything() -> None:
    prep = ThroughputCurve.linear(100)
    node = Node(late(), step_s=0.01, prep=prep, workers=2, threads=4, fetch=14, most_fetch=8)
    node.preparing, node.sample_bytes = 2, 0.0
    node.run(ThreadTuner(Threads()), seconds=600)
    assert (node.preparing, node.fetch) == (8, 8)
    assert len(node.changes) == 1


def load(**changes: Any) -> NodeLoad:
    """8 threads read 16 MB/s; a minibatch takes 0.625 s to fetch and 0.05 s to prepare."""
    given = {
        "workers": 1,
        "prep_threads": 1,
        "fetch_threads": 8,
        "most_prep": 1,
        "most": 33,
        "demand_per_s": 1e4,
        "batch_samples": BATCH,
        "prep_per_s": 2000.0,
        "sample_bytes": 1e5,
        "storage_bytes": 16e6 * WINDOW_S,
        "storage_s": WINDOW_S,
        "read_s": 8 * WINDOW_S,
    }
    return NodeLoad(**(given | changes))  # type: ignore[arg-type]


def test_a_change_must_be_worth_while_for_some_time() -> None:
    tuner = ThreadTuner(Threads(hold_s=3.0))
    assert [tuner.observe(load(), now) for now in (10.0, 11.0, 12.9)] == [None] * 3
    tuned = tuner.observe(load(), 13.0)
    assert tuned is not None
    assert (tuned.prep_threads, tuned.fetch_threads) == (1, 16)
    assert tuned.reason == (
        "16 instead of 8 threads read storage: a minibatch takes 625 ms to fetch, 50 ms to prepare, 10 ms of "
        "training; fetch may take 312 ms and prep 50 ms"
    )


def test_a_wish_that_was_interrupted_begins_anew() -> None:
    tuner = ThreadTuner(Threads(hold_s=3.0))
    assert tuner.observe(load(), 10.0) is None
    assert tuner.observe(load(demand_per_s=0.0), 12.0) is None
    assert tuner.observe(load(), 13.5) is None
    assert tuner.observe(load(), 16.5) is not None


def test_a_worker_that_left_takes_its_threads_along_at_once() -> None:
    tuned = ThreadTuner(Threads()).observe(load(fetch_threads=36, prep_threads=1, most=33), 0.0)
    assert tuned == Tuned(1, 32, tuned.reason if tuned else "")
    assert tuned.reason == "32 instead of 36 threads read storage: prep has 1, and the node was given 33"


def test_other_tiers_count_as_fetch_that_threads_do_not_shorten() -> None:
    """With all 4 prep threads: 0.1 s of prep, 0.625 s of storage and 5 s of the disk tier. No change gains much."""
    disk = TierBytes(5e6, ThroughputCurve(((1, 1e6),), slope=0.0))
    tuner = ThreadTuner(Threads())
    changes = [tuner.observe(load(others=(disk,), prep_threads=4, most_prep=4, most=12), t) for t in range(20)]
    assert changes == [None] * 20


def test_a_curve_goes_on_as_it_was_measured() -> None:
    curve = ObservedCurve()
    curve.learn(8, 80.0, now=0.0)
    assert curve.curve().rate(32) == pytest.approx(320)
    assert curve.curve().rate(2) == pytest.approx(20)
    assert curve.curve(most=8).rate(32) == pytest.approx(80)
    curve.learn(16, 100.0, now=1.0)
    assert curve.curve().rate(24) == pytest.approx(120)
    assert curve.curve(most=12).rate(16) == pytest.approx(90)
    curve.learn(16, 200.0, now=2.0)
    assert curve.points[16] == pytest.approx(130), "three tenths of the way"
    curve.learn(16, 200.0, now=100.0)
    assert curve.points[16] == pytest.approx(200), "old measurements are replaced"
    curve.forget_before(50.0)
    assert set(curve.points) == {16}


@settings(max_examples=15, deadline=None)
@given(
    knee=st.integers(1, 64),
    thread_mb=st.floats(0.2, 50),
    slope=st.floats(-0.2, 0),
    step_s=st.floats(0.005, 2),
    prep_per_s=st.floats(20, 2e4),
    workers=st.integers(1, 3),
    threads=st.integers(1, 4),
    most_fetch=st.integers(1, 40),
)
def test_any_node_comes_to_rest_and_is_not_slower_than_before(
    knee: int,
    thread_mb: float,
    slope: float,
    step_s: float,
    prep_per_s: float,
    workers: int,
    threads: int,
    most_fetch: int,
) -> None:
    """Half an hour of constant load: few changes, hardly any late, and a minibatch takes no longer."""
    storage = ThroughputCurve(((knee, knee * thread_mb * 1e6),), slope=slope * thread_mb * 1e5)
    node = Node(
        storage,
        step_s=step_s,
        prep=ThroughputCurve.linear(prep_per_s),
        workers=workers,
        threads=threads,
        fetch=min(8, most_fetch),
        most_fetch=most_fetch,
    )
    before_s = node.minibatch_s()
    node.run(ThreadTuner(Threads()), seconds=HOUR_S / 2)
    assert len(node.changes) <= 10
    assert sum(at > HOUR_S / 4 for at, _ in node.changes) <= 3
    assert node.minibatch_s() <= 1.15 * before_s
