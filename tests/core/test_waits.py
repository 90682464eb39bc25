"""A feed reports its current waits, and logs a wait again whenever its duration has doubled."""

from __future__ import annotations

import pytest
from timed_supervisor import TimedSupervisor

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import RETRY_S
from mbaas.core.cluster.supervisor import Supervisor
from mbaas.core.cluster.waits import FIRST_NOTE_S, WaitTable


class Feed(TimedSupervisor):
    """Supervisor with a clock."""

    def __init__(self, own: int = 1, **begin: object) -> None:
        super().__init__(Supervisor(own=own, credit=2, needs="2 CPUs and 0.5 GPUs"), **begin)

    def wait(self, seconds: float) -> list[str]:
        """Let time pass; return the messages logged at the end."""
        self.advance(seconds)
        return [note.text for note in self.kinds(ev.Note)]

    def waits(self) -> tuple[str, ...]:
        return self.supervisor.told_waits(self.now)

    def start(self, name: str, node: str) -> None:
        self.send(ev.WorkerStarted(name, node))


def test_a_wait_goes_to_the_log_after_ten_seconds_and_whenever_it_has_doubled():
    """The table is checked every second; the eleventh check is at 10 s."""
    table = WaitTable()
    began = 50
    noted = [s for s in range(100) if table.look({"workers": "prep-0 is being started"}, float(began + s))]
    assert noted == [FIRST_NOTE_S, 20, 40, 80]
    assert table.look({}, 200.0) == []
    assert table.look({"workers": "prep-7 is being started"}, 300.0) == [], "the wait before was over"
    assert table.sentences(303.0) == ("prep-7 is being started (for 3 s so far)",)


def test_who_is_started_is_named_with_what_it_needs_and_the_log_says_so():
    feed = Feed()
    assert feed.waits() == ("prep-0 is being started, it needs 2 CPUs and 0.5 GPUs (for 0 s so far)",)
    assert feed.wait(FIRST_NOTE_S - 1) == []
    said = "prep-0 is being started, it needs 2 CPUs and 0.5 GPUs (for 10 s so far)"
    assert feed.wait(1.0) == [f"the feed waits: {said}"]
    assert feed.waits() == (said,)


def test_a_start_that_is_made_again_is_the_same_wait_and_says_why_the_last_one_failed():
    feed = Feed()
    feed.now = 5.0
    feed.send(ev.StartFailed("prep-0", "the machine has too much to do"))
    because = "and the last one did not start: the machine has too much to do"
    assert feed.waits() == (f"1 prep worker to be started again after a pause, {because} (for 5 s so far)",)
    feed.wait(RETRY_S)
    assert feed.waits() == (f"prep-1 is being started, it needs 2 CPUs and 0.5 GPUs, {because} (for 7 s so far)",)


@pytest.mark.parametrize(
    ("workers", "named"),
    [(3, "prep-0, prep-1, prep-2 are"), (4, "prep-0, prep-1, prep-2 and 1 more are"), (5, "prep-2 and 2 more are")],
)
def test_of_many_workers_a_few_are_named(workers, named):
    (wait,) = Feed(own=workers).waits()
    assert wait.endswith(f"{named} being started, each needs 2 CPUs and 0.5 GPUs (for 0 s so far)")


def test_on_its_way_to_work_a_worker_waits_for_its_cache_then_for_homes_and_to_be_told():
    feed = Feed()
    feed.start("prep-0", "node-1234")
    assert feed.waits() == ("the cache of node node-123 is being started (for 0 s so far)",)
    feed.send(ev.CacheStarted("node-1234", 1))
    assert feed.waits() == ("the samples are being divided among the nodes with workers (for 0 s so far)",)
    (move,) = [each for each in feed.said if isinstance(each, ev.MovePlacement)]
    feed.send(ev.PlacementFailed(move.version, "a cache does not answer"))
    assert feed.waits() == (
        "the samples are to be divided, after a pause, among the nodes with workers (for 0 s so far)",
    )
    feed.wait(RETRY_S)
    (move,) = [each for each in feed.said if isinstance(each, ev.MovePlacement)]
    feed.send(ev.PlacementMoved(move.version, frozenset()))
    assert feed.waits() == ("prep-0 is being told which nodes cache and prepare which samples (for 0 s so far)",)
    feed.send(ev.WorkerBriefed("prep-0", move.version))
    assert feed.waits() == ()


def test_a_cache_that_is_silent_is_named():
    found = {"workers": {"prep-0": ev.FoundWorker("a")}, "caches": {("a", 3): False}}
    feed = Feed(**found, version=7, serial=1, is_restart=True)
    feed.now = 4.0
    assert feed.waits()[0] == "the cache of node a is being probed, and has not answered yet (for 4 s so far)"
    feed.send(ev.CacheProbed("a", 3, answers=False))
    assert feed.waits() == ("prep-1 is being started, it needs 2 CPUs and 0.5 GPUs (for 0 s so far)",)
    feed.start("prep-1", "a")
    assert "the cache of node a is to be started again after a pause (for 0 s so far)" in feed.waits()


def test_a_worker_that_another_feed_offers_is_said_to_come_from_there():
    feed = Feed()
    feed.send(ev.Offered("key", "other"))
    assert "prep-1 is on the way from another feed (for 0 s so far)" in feed.waits()


def test_after_the_end_and_before_the_beginning_nothing_is_awaited():
    assert Supervisor(own=1, credit=2).told_waits(0.0) == ()
    feed = Feed()
    feed.send(ev.Stop("it was stopped"))
    assert feed.waits() == ()
