"""Workers start, die, fall silent and end; the supervisor restarts. `test_system_schedules` has random schedules."""

import pytest
from supervised_feeds import Feed

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import RETRY_S, CachePhase, WorkerPhase
from mbaas.core.cluster.supervisor import START_S, Supervisor
from mbaas.core.staging import events as staging
from mbaas.core.story import PAST


def test_a_moment_without_any_worker_is_a_moment_like_any_other():
    feed = Feed()
    feed.open("a")
    feed.send(ev.NodesDead(frozenset("a")))
    assert [event.node for event in feed.told(staging.NodeDown)] == ["a"]
    start = feed.only(ev.StartWorker)
    feed.wait(600.0)
    feed.send(ev.WorkMeasured({}))
    feed.send(ev.WorkerStarted(start.worker, "b"))
    feed.send(ev.CacheStarted("b", feed.only(ev.StartCache).generation))
    assert feed.move_homes().weights.keys() == {"b"}
    assert [event.worker for event in feed.told(staging.WorkerUp)] == [start.worker]


def test_a_name_that_is_still_taken_is_not_asked_for_again():
    feed = Feed()
    first = feed.only(ev.StartWorker)
    feed.send(ev.StartFailed(first.worker, "its name is still taken"))
    assert not feed.kinds(ev.StartWorker), "it is tried again after a pause"
    feed.wait(RETRY_S)
    assert feed.only(ev.StartWorker).worker != first.worker


def test_a_start_of_which_nothing_is_heard_is_ended_and_made_again():
    feed = Feed()
    first = feed.only(ev.StartWorker)
    feed.wait(START_S)
    assert feed.only(ev.EndWorker).worker == first.worker
    feed.wait(RETRY_S)
    assert feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    assert feed.only(ev.EndWorker).worker == first.worker, "it started too late: it has been replaced"


def test_workers_whose_machine_dies_are_lost_and_not_blamed():
    """Several deaths condemn a block, but a machine failure is not the block's fault."""
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.NodesDead(frozenset({"a"})))
    assert [down.blame for down in feed.told(staging.WorkerDown)] == [False, False]


def test_staging_blames_a_block_for_the_end_of_a_worker_unless_whoever_gave_the_worker_up_says_otherwise():
    feed = Feed(own=2)
    feed.open("a", "a")
    for name, blame in zip(list(feed.supervisor.workers), (True, False), strict=True):
        feed.send(ev.WorkerDied(name, "it meets one error after the other", blame))
        assert [(down.worker, down.blame) for down in feed.told(staging.WorkerDown)] == [(name, blame)]


def test_nothing_at_all_is_left_after_a_restart():
    feed = Feed(own=2, version=7, is_restart=True)
    assert len(feed.kinds(ev.StartWorker)) == 2
    feed.open("a", "b")
    assert feed.supervisor.homes.current.version > 7
    assert feed.supervisor.homes.current.weights.keys() == {"a", "b"}


def test_a_worker_goes_when_its_tasks_are_done():
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Scale(1))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    assert feed.only(ev.EndWorker).worker == name
    assert not feed.send(ev.WorkerDone(name)), "a late report"


def test_nothing_is_started_after_the_end_and_who_comes_late_is_sent_away():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    cache = feed.only(ev.StartCache)
    feed.send(ev.Stop("it was stopped"))
    assert {end.worker for end in feed.kinds(ev.EndWorker)} == {first.worker, second.worker}
    assert feed.only(ev.EndCache).node == "a"
    feed.send(ev.WorkerStarted(second.worker, "b"))
    assert feed.said == [ev.EndWorker(second.worker)]
    feed.send(ev.CacheStarted("a", cache.generation))
    assert feed.said == [ev.EndCache("a", cache.generation)]


def test_an_illegal_change_raises():
    feed = Feed()
    (worker,) = feed.supervisor.workers.values()
    with pytest.raises(AssertionError, match=r"prep-0 cannot change from STARTING to WORKING(.|\n)*asked for"):
        worker.transition(WorkerPhase.WORKING)
    feed.send(ev.WorkerStarted(worker.name, "a"))
    with pytest.raises(AssertionError, match=r"cache a cannot change from STARTING to VACATING(.|\n)*asked for"):
        feed.supervisor.caches["a"].transition(CachePhase.VACATING)


def test_a_worker_that_answers_from_a_machine_that_is_gone_is_ended():
    feed = Feed()
    start = feed.only(ev.StartWorker)
    feed.send(ev.NodesDead(frozenset({"a"})))
    feed.send(ev.WorkerStarted(start.worker, "a"))
    assert feed.only(ev.EndWorker).worker == start.worker
    assert feed.only(ev.StartWorker).worker != start.worker


def test_nothing_is_started_before_it_begins():
    """A lent worker may be lost while a new coordinator still searches for its predecessor's workers."""
    assert Supervisor(own=2, credit=2).handle(ev.LentGone("key"), 0.0) == []


def test_a_feed_may_begin_at_any_time_of_its_clock():
    supervisor = Supervisor(own=1, credit=2)
    (start,) = supervisor.handle(ev.Begin(), -1000.0)
    (cache,) = supervisor.handle(ev.WorkerStarted(start.worker, "a"), -999.0)
    assert isinstance(cache, ev.StartCache)


def test_names_go_on_behind_those_that_are_there():
    feed = Feed(own=2, serial=7)
    assert [start.worker for start in feed.kinds(ev.StartWorker)] == ["prep-7", "prep-8"]
    feed.send(ev.StartFailed("prep-8", "no CPU"))
    feed.wait(RETRY_S)
    assert [start.worker for start in feed.kinds(ev.StartWorker)] == ["prep-9"]


def test_workers_that_do_not_answer_after_a_restart_are_ended_and_replaced():
    """An unresponsive worker could recover later without an owner. A lent worker belongs to its borrower."""
    found = {"prep-0": ev.FoundWorker("a"), "prep-1": ev.FoundWorker("")}
    feed = Feed(own=2, workers=found, lent={"other": ("x",)}, serial=2, is_restart=True)
    assert [end.worker for end in feed.kinds(ev.EndWorker)] == ["prep-1"]
    assert not feed.kinds(ev.EndLent)
    assert [start.worker for start in feed.kinds(ev.StartWorker)] == ["prep-2"], "the predecessor had three"
    assert not feed.kinds(ev.ReportLentGone)
    assert "1 prep worker and 0 cache nodes go on" in feed.kinds(ev.Note)[0].text
    assert feed.supervisor.stories.lines("prep-1")[-1].split("  ")[1] == (
        "BRIEFING -> GONE: it does not answer the coordinator that was restarted"
    )


def test_what_happened_to_things_that_are_over_is_forgotten_in_the_end():
    feed = Feed()
    for number in range(2 * PAST):
        (start,) = feed.kinds(ev.StartWorker)
        feed.send(ev.WorkerStarted(start.worker, f"n{number}"))
        feed.send(ev.CacheFailed(f"n{number}", feed.only(ev.StartCache).generation, "no memory"))
        feed.send(ev.WorkerDied(start.worker, "killed"))
    assert len(feed.supervisor.stories.names()) == 1 + PAST + PAST, "one that starts, and of each kind the last"


def test_a_worker_tells_when_what_happened_to_it_and_why():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    feed.now = 3.0
    feed.send(ev.WorkerBehind(name))
    assert feed.supervisor.stories.lines(name)[-1] == (
        f"3.000 s  WORKING -> BRIEFING  <- WorkerBehind(worker='{name}')"
    )


def test_the_end_of_a_life_is_a_change_like_any_other_and_comes_once():
    feed = Feed()
    feed.open("a")
    (worker,), (cache,) = feed.supervisor.workers.values(), feed.supervisor.caches.values()
    feed.send(ev.NodesDead(frozenset({"a"})))
    assert (worker.phase, cache.phase) == (WorkerPhase.GONE, CachePhase.GONE)
    for thing, phase in ((worker, WorkerPhase.GONE), (worker, WorkerPhase.BRIEFING), (cache, CachePhase.GONE)):
        with pytest.raises(AssertionError, match=r"cannot change from GONE to (.|\n)*Ray says that it is dead"):
            thing.transition(phase)


def test_whoever_lives_when_the_feed_ends_ends_with_its_reason():
    feed = Feed(own=2)
    feed.send(ev.WorkerStarted("prep-0", "a"))
    feed.send(ev.Stop("feed 'train' was stopped"))
    for name, phase in (("prep-0", "BRIEFING"), ("prep-1", "STARTING"), ("cache a", "STARTING")):
        assert f"{phase} -> GONE: feed 'train' was stopped" in feed.supervisor.stories.lines(name)[-1]


def test_words_of_workers_that_are_unknown_or_elsewhere_change_nothing():
    feed = Feed(own=1)
    feed.open("a")
    phases = {name: worker.phase for name, worker in feed.supervisor.workers.items()}
    assert phases == {"prep-0": WorkerPhase.WORKING}
    for event in (
        ev.StartFailed("prep-7", "it is nobody's"),
        ev.StartFailed("prep-0", "a late word"),
        ev.WorkerDone("prep-7"),
        ev.WorkerDone("prep-0"),
    ):
        assert feed.send(event) == []
        assert {name: worker.phase for name, worker in feed.supervisor.workers.items()} == phases
