"""The supervisor handles each event correctly, case by case; `test_system_schedules` has the random schedules."""

import pytest
from supervised_feeds import Feed

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.homes import KEEP_HOME_S, MOVE_S
from mbaas.core.cluster.supervised import CACHE_START_S, RETRY_S, CachePhase, WorkerPhase
from mbaas.core.cluster.supervisor import (
    BRIEFING_S,
    BRIEFINGS,
    HAND_OVER_S,
    KEPT_DEAD,
    PROBE_S,
    START_S,
    VACATE_S,
    Supervisor,
)
from mbaas.core.staging import events as staging
from mbaas.core.story import PAST
from mbaas.model.scaling import SETTLED_S


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


def test_a_worker_that_does_not_know_the_placement_is_told_and_not_blamed():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    feed.send(ev.WorkerBehind(name))
    (down,) = feed.told(staging.WorkerDown)
    assert (down.worker, down.blame) == (name, False)
    feed.send(ev.WorkerBriefed(name, feed.only(ev.BriefWorker).version))
    assert [event.worker for event in feed.told(staging.WorkerUp)] == [name]


def test_a_worker_that_cannot_be_told_is_replaced():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    feed.send(ev.WorkerBehind(name))
    for _ in range(BRIEFINGS):
        feed.send(ev.BriefingFailed(name, "it does not answer"))
    assert feed.only(ev.EndWorker).worker == name
    assert feed.kinds(ev.StartWorker)


def test_a_cache_that_is_silent_while_the_coordinator_is_restarted_is_started_anew():
    feed = Feed(workers={"prep-0": ev.FoundWorker("a")}, caches={("a", 3): False}, version=7, is_restart=True)
    assert feed.only(ev.ProbeCache) == ev.ProbeCache("a", 3)
    feed.send(ev.CacheProbed("a", 3, answers=False))
    assert feed.only(ev.EndCache) == ev.EndCache("a", 3)
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    feed.wait(RETRY_S)
    assert feed.only(ev.StartCache).generation > 3, "the old one's name may still be taken"


def test_nothing_at_all_is_left_after_a_restart():
    feed = Feed(own=2, version=7, is_restart=True)
    assert len(feed.kinds(ev.StartWorker)) == 2
    feed.open("a", "b")
    assert feed.supervisor.homes.current.version > 7
    assert feed.supervisor.homes.current.weights.keys() == {"a", "b"}


def test_homes_stay_while_a_worker_may_come_back_and_move_when_it_does_not():
    feed = Feed(own=2)
    feed.open("a", "b")
    dead = next(worker for worker in feed.supervisor.workers.values() if worker.node == "a")
    feed.send(ev.WorkerDied(dead.name, "signal 9"))
    feed.send(ev.CacheProbed("a", feed.only(ev.ProbeCache).generation, answers=True))
    assert not feed.kinds(ev.MovePlacement)
    feed.wait(KEEP_HOME_S)
    assert feed.move_homes().weights.keys() == {"b"}
    assert feed.only(ev.VacateNode).node == "a"


def test_a_move_that_was_given_up_is_not_used_when_it_is_done_after_all():
    feed = Feed()
    start = feed.only(ev.StartWorker)
    feed.send(ev.WorkerStarted(start.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    late = feed.only(ev.MovePlacement)
    feed.wait(MOVE_S)
    feed.wait(RETRY_S)
    second = feed.only(ev.MovePlacement)
    assert not feed.send(ev.PlacementMoved(late.version, late.workers))
    feed.send(ev.PlacementMoved(second.version, second.workers))
    assert feed.only(ev.UsePlacement).version == second.version


def test_a_worker_goes_when_its_tasks_are_done():
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Scale(1))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    assert feed.only(ev.EndWorker).worker == name
    assert not feed.send(ev.WorkerDone(name)), "a late report"


def test_a_worker_that_was_lent_is_replaced_when_it_dies_and_counted_once_when_it_comes_back():
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Lend("other"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    feed.send(ev.HandedOver(name, taken=True))
    assert not feed.kinds(ev.StartWorker)
    assert feed.supervisor.wanted == 1
    feed.send(ev.FeedGone("other"))
    back = feed.only(ev.TakeIn)
    feed.send(ev.StartFailed(back.worker, "it is gone"))
    feed.wait(RETRY_S)
    assert feed.kinds(ev.StartWorker)
    assert feed.supervisor.wanted == 2


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_worker_that_is_lost_while_it_is_lent_is_replaced(is_told_first):
    """The loss may also be reported before the borrower confirms the hand-over."""
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Lend("other"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    if is_told_first:
        feed.send(ev.HandedOver(name, taken=True))
    feed.send(ev.LentGone(name))
    assert len(feed.kinds(ev.StartWorker)) == 1
    feed.send(ev.HandedOver(name, taken=True))
    assert feed.supervisor.lent == {}


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


def test_a_feed_has_as_many_workers_as_its_predecessor_had():
    found = {f"prep-{n}": ev.FoundWorker("a") for n in range(3)}
    feed = Feed(own=1, workers=found, caches={("a", 2): True}, version=7, serial=3, is_restart=True)
    assert feed.supervisor.own == 3
    assert not feed.kinds(ev.EndWorker)
    feed.move_homes()
    feed.send(ev.WorkerDied("prep-0", "signal 9"))
    assert [start.worker for start in feed.kinds(ev.StartWorker)] == ["prep-3"]


def test_fewer_workers_end_those_first_that_do_not_run_yet_and_never_the_last():
    feed = Feed(own=3)
    first, second, third = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    feed.send(ev.Scale(2))
    assert [end.worker for end in feed.kinds(ev.EndWorker)] == [third.worker]
    feed.send(ev.Scale(0))
    assert [end.worker for end in feed.kinds(ev.EndWorker)] == [second.worker]
    assert (feed.supervisor.own, feed.supervisor.wanted) == (1, 1)


def test_with_fewer_workers_borrowed_ones_go_home_first():
    feed = Feed(own=1)
    feed.open("a")
    feed.send(ev.Offered("key", "other"))
    taken = feed.only(ev.TakeIn)
    feed.send(ev.WorkerStarted(taken.worker, "a"))
    feed.send(ev.WorkerBriefed(taken.worker, feed.supervisor.homes.current.version))
    assert feed.supervisor.borrowed == {"other": 1}
    assert feed.supervisor.wanted == 2
    feed.send(ev.Scale(1))
    assert feed.told(staging.WorkerLeaves)[0].worker == taken.worker
    assert feed.supervisor.borrowed == {}
    feed.send(ev.WorkerDone(taken.worker))
    assert feed.only(ev.HandOver) == ev.HandOver(taken.worker, "other")
    feed.send(ev.HandedOver(taken.worker, taken=False))
    assert feed.only(ev.EndWorker).worker == taken.worker, "its owner does not answer"


def test_a_borrowed_worker_that_dies_is_told_to_its_owner():
    feed = Feed(own=1)
    feed.open("a")
    feed.send(ev.Offered("key", "other"))
    taken = feed.only(ev.TakeIn)
    feed.send(ev.WorkerStarted(taken.worker, "a"))
    feed.send(ev.WorkerDied(taken.worker, "signal 9"))
    assert feed.only(ev.ReportLentGone) == ev.ReportLentGone(taken.worker, "other")


def test_a_worker_that_answers_from_a_machine_that_is_gone_is_ended():
    feed = Feed()
    start = feed.only(ev.StartWorker)
    feed.send(ev.NodesDead(frozenset({"a"})))
    feed.send(ev.WorkerStarted(start.worker, "a"))
    assert feed.only(ev.EndWorker).worker == start.worker
    assert feed.only(ev.StartWorker).worker != start.worker


def test_workers_that_are_measured_to_be_slower_get_fewer_samples():
    feed = Feed(own=2)
    feed.open("a", "b")
    names = {worker.node: name for name, worker in feed.supervisor.workers.items()}
    moves, told = [], []
    for second in range(1, 90):
        done = {names["a"]: (100.0 * second, float(second)), names["b"]: (10.0 * second, float(second))}
        feed.now += 1.0
        feed.send(ev.WorkMeasured(done))
        moves += feed.kinds(ev.MovePlacement)
        told += [note.text for note in feed.kinds(ev.Note)]
    assert moves
    assert moves[0].weights["a"] > 2 * moves[0].weights["b"]
    assert told == ["node b has 50 % of the samples and 9.1 % of the speed"]


def vacating(feed: Feed) -> str:
    """Make a feed on two machines vacate one of the two, and return that node."""
    feed.open("a", "b")
    feed.send(ev.Scale(1))
    (leaves,) = feed.told(staging.WorkerLeaves)
    node = feed.supervisor.workers[leaves.worker].node
    feed.move_homes()
    feed.send(ev.WorkerDone(leaves.worker))
    assert feed.only(ev.VacateNode).node == node
    return node


def test_a_machine_without_workers_is_free_when_the_others_have_what_it_kept():
    feed = Feed(own=2)
    node = vacating(feed)
    assert not feed.told(staging.NodeLeaves), "blocks staged there stay, because the machine does"
    feed.send(ev.NodeVacated(node))
    assert feed.only(ev.EndCache).node == node
    assert not feed.send(ev.NodeVacated(node)), "a repeated event"


def test_a_machine_whose_samples_come_slowly_stays_as_long_as_they_come():
    """Moving the samples takes 40 minutes, at 100 s for each answer."""
    feed = Feed(own=2)
    node = vacating(feed)
    for _ in range(24):
        assert not feed.wait(100.0)
        feed.send(ev.NodeVacated(node, samples=1000, left=5))
        assert feed.only(ev.VacateNode).node == node
        assert not feed.kinds(ev.EndCache)
    feed.send(ev.NodeVacated(node, samples=5, left=0))
    assert feed.only(ev.EndCache).node == node


def test_a_machine_of_whose_samples_none_comes_any_more_is_given_up():
    """For example, the storage that the other machines read from hangs, so they make no progress."""
    feed = Feed(own=2)
    node = vacating(feed)
    feed.send(ev.NodeVacated(node, samples=0, left=5))
    assert feed.only(ev.EndCache).node == node


def test_the_last_worker_is_not_lent():
    feed = Feed(own=1)
    feed.open("a")
    assert not feed.send(ev.Lend("other"))


def test_who_offers_a_worker_after_the_end_is_refused():
    feed = Feed()
    feed.send(ev.Stop("it was stopped"))
    assert feed.supervisor.ended == "it was stopped"
    feed.send(ev.Offered("key", "other"))
    assert feed.said == [ev.RefuseOffer("key")]
    feed.send(ev.HandedOver("prep-0", taken=False))
    assert feed.said == [ev.EndWorker("prep-0")]
    assert not feed.send(ev.HandedOver("prep-0", taken=True))


def test_at_the_end_borrowed_workers_go_home_and_lent_ones_end():
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Offered("key", "other"))
    taken = feed.only(ev.TakeIn)
    feed.send(ev.WorkerStarted(taken.worker, "a"))
    feed.send(ev.Lend("third"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    feed.send(ev.HandedOver(name, taken=True))
    feed.send(ev.Stop("it was stopped"))
    assert feed.only(ev.HandOver) == ev.HandOver(taken.worker, "other")
    assert feed.only(ev.EndLent) == ev.EndLent(name)
    supervisor = feed.supervisor
    assert [*supervisor.workers, *supervisor.caches, *supervisor.lent] == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_another_feed_does_not_take_comes_back(answers):
    """The other feed either refuses it or does not answer in time."""
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Lend("other"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    feed.wait(HAND_OVER_S - 1)
    assert not feed.kinds(ev.TakeIn), "it may answer yet"
    if answers:
        feed.send(ev.HandedOver(name, taken=False))
    else:
        feed.wait(1.0)
    assert feed.only(ev.TakeIn).key == name
    assert feed.supervisor.lent == {}
    assert not feed.kinds(ev.StartWorker)


def test_a_worker_that_was_not_told_of_a_move_is_behind_and_is_told_again():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    feed.move_homes()
    feed.send(ev.WorkerStarted(second.worker, "b"))
    feed.send(ev.CacheStarted("b", feed.only(ev.StartCache).generation))
    move = feed.only(ev.MovePlacement)
    feed.send(ev.PlacementMoved(move.version, frozenset({second.worker})))
    assert [(down.worker, down.blame) for down in feed.told(staging.WorkerDown)] == [(first.worker, False)]
    assert [up.worker for up in feed.told(staging.WorkerUp)] == [second.worker]
    assert feed.only(ev.BriefWorker) == ev.BriefWorker(first.worker, move.version)
    assert not feed.send(ev.WorkerBehind("nobody"))
    assert not feed.send(ev.BriefingFailed("nobody", "it is gone"))
    assert not feed.send(ev.WorkerBehind(first.worker)), "it does not work now"


def test_a_cache_of_which_nothing_is_heard_is_started_anew():
    feed = Feed()
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    first = feed.only(ev.StartCache)
    feed.wait(CACHE_START_S - 1)
    assert not feed.kinds(ev.EndCache)
    feed.wait(1.0)
    assert feed.only(ev.EndCache) == ev.EndCache("a", first.generation)
    feed.wait(RETRY_S)
    assert feed.only(ev.StartCache).generation > first.generation


def test_briefings_that_fail_are_counted_anew_after_one_that_did_not():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    for _ in range(2):
        feed.send(ev.WorkerBehind(name))
        for _ in range(BRIEFINGS - 1):
            feed.send(ev.BriefingFailed(name, "it does not answer"))
        feed.send(ev.WorkerBriefed(name, feed.supervisor.homes.current.version))
    assert feed.supervisor.workers[name].phase is WorkerPhase.WORKING
    feed.send(ev.WorkerBehind(name))
    for _ in range(BRIEFINGS - 1):
        feed.send(ev.BriefingFailed(name, "it does not answer"))
    assert name in feed.supervisor.workers
    feed.send(ev.BriefingFailed(name, "it does not answer"))
    assert name not in feed.supervisor.workers


# ---- start ----


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


def test_workers_that_are_lent_are_known_after_a_restart():
    """Two of three workers are lent: no replacement is started, and they come back when the borrowing feed ends."""
    found = {"prep-0": ev.FoundWorker("a")}
    feed = Feed(own=3, workers=found, lent={"other": ("x", "y"), "third": ()}, serial=1, is_restart=True)
    assert not feed.kinds(ev.StartWorker)
    assert feed.supervisor.lent == {"other": ["x", "y"]}
    feed.send(ev.FeedGone("third"))
    assert not feed.kinds(ev.TakeIn)
    feed.send(ev.FeedGone("other"))
    assert [taken.key for taken in feed.kinds(ev.TakeIn)] == ["x", "y"]


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


def test_the_owner_of_a_borrowed_worker_that_does_not_answer_after_a_restart_is_told():
    """Otherwise the owner would count it as lent forever and start no replacement."""
    feed = Feed(workers={"other-prep-3": ev.FoundWorker("", "other")}, is_restart=True)
    assert feed.said.index(ev.ReportLentGone("other-prep-3", "other")) < feed.said.index(
        ev.EndWorker("other-prep-3")
    ), "its owner is notified before the worker ends"
    assert feed.supervisor.borrowed == {}


def test_of_several_caches_on_a_machine_the_youngest_goes_on_and_the_others_are_ended():
    """Each older cache was given up, and the instruction to end it was lost with its coordinator."""
    caches = {("a", 3): True, ("b", 4): True, ("a", 10): False, ("a", 9): True}
    feed = Feed(workers={"prep-0": ev.FoundWorker("a")}, caches=caches, is_restart=True)
    assert {(end.node, end.generation) for end in feed.kinds(ev.EndCache)} == {("a", 3), ("a", 9)}
    assert {node: cache.generation for node, cache in feed.supervisor.caches.items()} == {"a": 10, "b": 4}
    assert feed.only(ev.ProbeCache) == ev.ProbeCache("a", 10), "that it is silent shows later"


def test_a_worker_is_started_when_all_others_are_lent():
    """The lent workers may die before they come back."""
    feed = Feed(own=1, lent={"other": ("x",)}, is_restart=True)
    assert len(feed.kinds(ev.StartWorker)) == 1
    assert feed.supervisor.wanted == 1


# ---- number of workers ----


def test_fewer_workers_end_one_that_starts_before_younger_ones_that_run():
    feed = Feed(own=3)
    starting, second, third = (start.worker for start in feed.kinds(ev.StartWorker))
    feed.send(ev.WorkerStarted(second, "a"))
    feed.send(ev.WorkerStarted(third, "a"))
    feed.send(ev.Scale(2))
    assert feed.kinds(ev.EndWorker) == [ev.EndWorker(starting)]


def test_a_worker_that_is_on_its_way_back_is_not_ended():
    """It is up, but still known under another name, so a local worker leaves instead."""
    feed = Feed(own=2)
    feed.open("a", "a")
    lent = feed.lend("other")
    feed.send(ev.HandedOver(lent, taken=True))
    feed.send(ev.FeedGone("other"))
    feed.send(ev.Scale(1))
    assert not feed.kinds(ev.EndWorker)
    assert len(feed.told(staging.WorkerLeaves)) == 1


def test_a_worker_too_many_goes_and_a_borrowed_one_stays_its_owners():
    """The borrowed worker is alone on its machine, so it would otherwise be the cheapest to spare."""
    feed = Feed(own=1)
    feed.open("b")
    (own,) = feed.supervisor.workers
    feed.borrow("a")
    feed.send(ev.Offered("comes back, and nobody knows that it was lent", None))
    assert [leaves.worker for leaves in feed.told(staging.WorkerLeaves)] == [own]


def test_a_worker_that_leaves_for_another_feed_is_not_replaced():
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Lend("other"))
    assert not feed.kinds(ev.StartWorker)


def test_more_workers_send_nobody_home():
    feed = Feed(own=1)
    feed.open("a")
    feed.borrow("a", "other")
    feed.borrow("a", "third")
    feed.send(ev.Scale(5))
    assert not feed.told(staging.WorkerLeaves)
    assert len(feed.kinds(ev.StartWorker)) == 2, "it already has one local worker and two borrowed ones"
    assert feed.supervisor.own == 3


def test_workers_that_are_starting_count_when_borrowed_ones_go_home():
    """One local worker works, one starts, and one is borrowed: with a target of two, the borrowed one leaves."""
    feed = Feed(own=1)
    feed.open("a")
    borrowed = feed.borrow("a")
    feed.send(ev.Scale(3))
    assert len(feed.kinds(ev.StartWorker)) == 1
    feed.send(ev.Scale(2))
    assert [leaves.worker for leaves in feed.told(staging.WorkerLeaves)] == [borrowed]
    assert not feed.kinds(ev.EndWorker)


def test_workers_that_are_away_come_in_addition_to_those_that_are_to_be_here():
    """One of four workers is lent and one is leaving. A target of 4 is 1 borrowed + 3 owned here: it owns 3 + 2."""
    feed = Feed(own=4)
    feed.open("a", "a", "a", "a")
    feed.send(ev.HandedOver(feed.lend("other"), taken=True))
    feed.send(ev.Lend("other"))
    feed.borrow("a")
    feed.send(ev.Scale(4))
    assert feed.supervisor.own == 5
    assert len(feed.kinds(ev.StartWorker)) == 1
    assert feed.supervisor.wanted == 4


def test_the_reason_of_starts_that_fail_is_told_once_and_again_after_a_worker_worked():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    told = []
    for name in (first.worker, second.worker):
        feed.send(ev.StartFailed(name, "no CPU"))
        told += [note.text for note in feed.kinds(ev.Note)]
    assert told == [f"{first.worker} did not start, another one is tried: no CPU"]
    feed.wait(RETRY_S)
    third, fourth = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(third.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    feed.move_homes()
    feed.send(ev.StartFailed(fourth.worker, "no CPU"))
    assert len(feed.kinds(ev.Note)) == 1


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


# ---- placement updates for workers ----


def test_a_worker_that_comes_from_another_feed_is_given_up_when_nothing_is_heard_of_it():
    feed = Feed()
    feed.open("a")
    feed.send(ev.Offered("key", "other"))
    name = feed.only(ev.TakeIn).worker
    assert feed.wait(BRIEFING_S - 1) == [
        ev.Note(f"the feed waits: {name} is on the way from another feed (for 29 s so far)")
    ]
    feed.wait(1.0)
    assert feed.only(ev.EndWorker).worker == name


def test_a_worker_that_does_not_answer_is_told_again_and_so_is_one_that_could_not_be_told():
    feed = Feed()
    feed.open("a")
    (name,) = feed.supervisor.workers
    version = feed.supervisor.homes.current.version
    feed.send(ev.WorkerBehind(name))
    assert feed.wait(BRIEFING_S - 1) == [
        ev.Note(f"the feed waits: {name} is being told which nodes cache and prepare which samples (for 29 s so far)")
    ]
    assert feed.wait(1.0) == [ev.BriefWorker(name, version)]
    assert feed.send(ev.BriefingFailed(name, "it does not answer")) == [ev.BriefWorker(name, version)]


def test_a_worker_that_hears_of_a_placement_with_its_caches_is_not_told_of_the_one_before():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    feed.move_homes()
    feed.send(ev.WorkerStarted(second.worker, "b"))
    feed.send(ev.CacheStarted("b", feed.only(ev.StartCache).generation))
    assert feed.only(ev.MovePlacement).workers == {first.worker, second.worker}
    assert not feed.send(ev.WorkerBehind(first.worker))[1:], "MovePlacement already reaches it"


def test_a_worker_that_was_told_an_older_placement_is_told_the_newest_before_it_works():
    feed = Feed(own=3)
    first, second, late = (start.worker for start in feed.kinds(ev.StartWorker))
    feed.send(ev.WorkerStarted(first, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    old = feed.move_homes().version
    feed.send(ev.WorkerStarted(second, "b"))
    cache = feed.only(ev.StartCache)
    feed.send(ev.CacheStarted("b", cache.generation))
    move = feed.only(ev.MovePlacement)
    feed.send(ev.WorkerStarted(late, "a"))
    assert feed.only(ev.BriefWorker) == ev.BriefWorker(late, old), "the move does not include this worker"
    feed.send(ev.PlacementMoved(move.version, move.workers))
    feed.send(ev.WorkerBriefed(late, old))
    assert not feed.told(staging.WorkerUp)
    assert feed.only(ev.BriefWorker) == ev.BriefWorker(late, move.version)
    feed.send(ev.WorkerBriefed(late, move.version))
    assert [up.worker for up in feed.told(staging.WorkerUp)] == [late]
    feed.send(ev.WorkerBehind(late))
    feed.send(ev.WorkerBriefed(late, old))
    assert not feed.told(staging.WorkerUp), "a late report: it may lack any placement"


# ---- lent and borrowed workers ----


@pytest.mark.parametrize("owner", [None, "other"])
def test_a_worker_of_that_owner_is_lent_that_can_be_spared_best(owner):
    """Machines with fewer workers are freed first; here each owner has one worker that is alone on its machine."""
    feed = Feed(own=3)
    feed.open("b", "c", "c")
    alone = {worker.owner: name for name, worker in feed.supervisor.workers.items() if worker.node == "b"}
    alone["other"] = feed.borrow("a")
    feed.send(ev.Lend("third", owner))
    assert [leaves.worker for leaves in feed.told(staging.WorkerLeaves)] == [alone[owner]]


def test_a_worker_that_its_borrower_offers_back_is_lent_no_more():
    feed = Feed(own=2)
    feed.open("a", "a")
    name = feed.lend("other")
    feed.send(ev.HandedOver(name, taken=True))
    feed.send(ev.Offered(name, None))
    assert feed.only(ev.TakeIn).key == name
    assert feed.supervisor.lent == {}
    assert not feed.told(staging.WorkerLeaves), "the returned worker is not surplus"


def test_when_a_feed_ends_what_is_on_its_way_there_comes_back_and_what_goes_elsewhere_does_not():
    feed = Feed(own=4)
    feed.open("a", "a", "a", "a")
    back, elsewhere = feed.lend("other"), feed.lend("third")
    feed.send(ev.Lend("other"))
    feed.send(ev.FeedGone("other"))
    assert [taken.key for taken in feed.kinds(ev.TakeIn)] == [back]
    assert {*feed.supervisor.in_phase(WorkerPhase.HANDED_OVER)} == {elsewhere}


# ---- cache nodes and machines ----


def test_a_cache_that_does_not_start_is_tried_again_after_a_pause():
    feed = Feed()
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    first = feed.only(ev.StartCache)
    feed.send(ev.CacheFailed("a", first.generation, "no memory"))
    assert feed.only(ev.EndCache) == ev.EndCache("a", first.generation)
    assert "the cache of node a did not start, it is tried again: no memory" in feed.only(ev.Note).text
    feed.wait(RETRY_S / 2)
    assert not feed.kinds(ev.StartCache)
    feed.wait(RETRY_S / 2)
    second = feed.only(ev.StartCache)
    feed.send(ev.CacheStarted("a", first.generation))
    assert feed.said == [ev.EndCache("a", first.generation)], "it started too late: it has been replaced"
    assert not feed.send(ev.CacheFailed("a", first.generation, "late"))
    feed.send(ev.CacheStarted("a", second.generation))
    assert not feed.send(ev.CacheFailed("a", second.generation, "late")), "it is up"


def test_a_move_that_failed_is_tried_again_after_a_pause():
    feed = Feed()
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    first = feed.only(ev.MovePlacement)
    assert not feed.send(ev.PlacementFailed(first.version - 1, "late")), "that is another one"
    feed.send(ev.PlacementFailed(first.version, "no answer"))
    assert feed.only(ev.Note).text == "placement update failed, retrying: no answer"
    assert not feed.wait(RETRY_S / 2)
    assert feed.wait(RETRY_S / 2)[0].version == first.version + 1


def test_a_machine_to_which_a_worker_comes_back_is_not_given_up():
    feed = Feed(own=2)
    node = vacating(feed)
    feed.send(ev.Scale(2))
    feed.send(ev.WorkerStarted(feed.only(ev.StartWorker).worker, node))
    assert feed.only(ev.MovePlacement).weights.keys() == {"a", "b"}
    assert not feed.send(ev.NodeVacated(node))


def test_a_machine_whose_cache_says_nothing_after_a_worker_died_is_given_up_with_all_that_runs_there():
    feed = Feed(own=2)
    feed.open("a", "a")
    dead, other = feed.supervisor.workers
    feed.send(ev.WorkerDied(dead, "signal 9"))
    feed.now += PROBE_S - 1
    assert not feed.kinds(ev.EndCache)
    feed.wait(0.0)
    assert not feed.kinds(ev.EndCache)
    feed.wait(1.0)
    assert feed.only(ev.EndCache).node == "a"
    assert other in [end.worker for end in feed.kinds(ev.EndWorker)]
    assert [down.blame for down in feed.told(staging.WorkerDown)] == [False]


def test_a_machine_that_dies_takes_only_its_own_workers_along():
    feed = Feed(own=2)
    feed.open("a", "b")
    dead = next(name for name, worker in feed.supervisor.workers.items() if worker.node == "a")
    feed.send(ev.NodesDead(frozenset("a")))
    assert [down.worker for down in feed.told(staging.WorkerDown)] == [dead]


def test_the_last_thousand_machines_that_died_are_known():
    """A worker may still answer late from a dead machine."""
    feed = Feed()
    (start,) = feed.kinds(ev.StartWorker)
    for number in range(KEPT_DEAD + 2):
        feed.send(ev.NodesDead(frozenset({f"n{number}"})))
    assert [*feed.supervisor.dead] == [f"n{number}" for number in range(2, KEPT_DEAD + 2)]
    feed.send(ev.WorkerStarted(start.worker, "n2"))
    assert feed.only(ev.EndWorker).worker == start.worker


def test_until_when_no_cache_is_opened_is_forgotten_when_it_is_over():
    feed = Feed()
    for number in range(5):
        feed.now += RETRY_S
        feed.open(f"n{number}")
        feed.send(ev.NodesDead(frozenset({f"n{number}"})))
        assert [*feed.supervisor._open_after] == [f"n{number}"]


def test_a_machine_that_is_not_needed_is_given_up_also_when_the_others_never_say_that_they_have_what_it_kept():
    feed = Feed(own=2)
    node = vacating(feed)
    assert not feed.wait(VACATE_S - 1)
    feed.wait(1.0)
    assert feed.only(ev.EndCache).node == node


def test_who_has_which_part_of_the_samples_is_told():
    """Node names are cut to 8 characters; Ray's have 56."""
    feed = Feed(own=3)
    for start, node in zip(feed.kinds(ev.StartWorker), ("0123456789", "0123456789", "fedcba9876"), strict=True):
        feed.send(ev.WorkerStarted(start.worker, node))
    for cache in list(feed.supervisor.caches.values()):
        feed.send(ev.CacheStarted(cache.node, cache.generation))
    assert not feed.kinds(ev.Note)
    feed.move_homes()
    assert feed.only(ev.Note).text == (
        "samples are cached and prepared on 2 nodes: 01234567 (2 prep workers, 67 %), fedcba98 (1 prep worker, 33 %)"
    )


# ---- end of workers and caches ----


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


# ---- machines with small object stores ----


class Crowded(Feed):
    """Feed with a staging budget of 40 bytes."""

    def __init__(self, own=1, **begin):
        super().__init__(own, staging_bytes=40, **begin)

    def come(self, node, room_bytes):
        """Bring up an awaited worker and a cache on a node; return the worker's name."""
        name = next(name for name, each in self.supervisor.workers.items() if each.phase is WorkerPhase.STARTING)
        self.send(ev.WorkerStarted(name, node))
        self.send(ev.CacheStarted(node, self.only(ev.StartCache).generation, room_bytes))
        return name


def test_a_machine_without_room_for_what_is_staged_gets_no_parts_while_another_has_it():
    feed = Crowded(own=2)
    feed.come("roomy", 40)
    assert feed.move_homes().weights.keys() == {"roomy"}
    small = feed.come("small", 39)
    (note,) = feed.kinds(ev.Note)
    assert "object store has room for 39 B of prepared samples, and up to 40 B may be staged" in note.text
    assert not feed.kinds(ev.MovePlacement)
    feed.wait(KEEP_HOME_S)
    assert not feed.said, "its worker gets no messages and no work, and the feed does not wait for it"
    assert feed.supervisor.workers[small].phase is WorkerPhase.BRIEFING
    assert feed.supervisor.told_waits(feed.now) == ()
    feed.send(ev.Scale(1))
    assert feed.only(ev.EndWorker).worker == small, "it can be spared best"


def test_machines_without_room_do_until_one_with_room_comes():
    feed = Crowded(own=2)
    first = feed.come("small", 39)
    assert feed.move_homes().weights.keys() == {"small"}
    assert feed.supervisor.workers[first].phase is WorkerPhase.WORKING, "better than standing still"
    second = feed.come("roomy", 40)
    assert feed.move_homes().weights.keys() == {"roomy"}
    (down,) = feed.told(staging.WorkerDown)
    assert (down.worker, down.blame) == (first, False)
    assert [up.worker for up in feed.told(staging.WorkerUp)] == [second]
    feed.send(ev.NodesDead(frozenset({"roomy"})))
    assert feed.move_homes().weights.keys() == {"small"}
    feed.send(ev.WorkerBriefed(first, feed.supervisor.homes.current.version))
    assert feed.supervisor.workers[first].phase is WorkerPhase.WORKING


def test_room_is_known_of_caches_that_are_there_when_the_coordinator_begins():
    found = {f"prep-{n}": ev.FoundWorker(node) for n, node in enumerate(("roomy", "small"))}
    caches = {("roomy", 1): True, ("small", 2): True}
    feed = Crowded(2, workers=found, caches=caches, version=7, is_restart=True, rooms={"roomy": 40, "small": 39})
    assert feed.move_homes().weights.keys() == {"roomy"}


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


def leave(feed):
    """Complete the departure of leaving workers; return their nodes."""
    leaving = [told.worker for told in feed.told(staging.WorkerLeaves)]
    nodes = [feed.supervisor.workers[name].node for name in leaving]
    for name in leaving:
        feed.send(ev.WorkerDone(name))
    return nodes


def full(*nodes, keeps=100, most=100):
    return ev.CachesMeasured(dict.fromkeys(nodes, (keeps, most)))


def test_a_machine_is_given_back_when_the_others_have_room_for_what_it_keeps():
    """First all three caches are full. Then a caches 50 bytes, and b and c have 50 + 20 bytes free."""
    feed = Feed(own=3)
    feed.open("a", "b", "c")
    feed.send(full("a", "b", "c"))
    feed.send(ev.Scale(2))
    assert leave(feed) == []
    (note,) = feed.kinds(ev.Note)
    assert "keeping 1 idle prep worker: no other node has room" in note.text
    feed.send(full("a", "b", "c"))
    assert not feed.kinds(ev.Note), "it is reported once"
    feed.send(ev.CachesMeasured({"a": (50, 100), "b": (50, 100), "c": (80, 100)}))
    feed.wait(SETTLED_S)
    move = feed.only(ev.MovePlacement)
    assert leave(feed) == ["a"]
    feed.send(ev.PlacementMoved(move.version, move.workers))
    assert feed.only(ev.VacateNode).node == "a", "its samples move before it is released"
    assert feed.supervisor.wanted == feed.supervisor.staying == 2


def test_machines_that_keep_what_nobody_has_room_for_give_all_workers_but_one():
    feed = Feed(own=5)
    feed.open("a", "a", "a", "b", "b")
    feed.send(full("a", "b"))
    feed.send(ev.Scale(1))
    assert leave(feed) == ["a", "b", "a"]
    assert feed.supervisor.staying == 2
    feed.send(ev.Scale(4))
    assert len(feed.kinds(ev.StartWorker)) == 2, "the worker that was kept is one of the four"


def test_while_caches_fill_no_machine_is_given_back():
    """A cache with room now may need that room for samples that it has yet to cache."""
    feed = Feed(own=2)
    feed.open("a", "b")
    for part in range(4):
        feed.send(ev.CachesMeasured({"a": (10 * part, 100), "b": (10 * part, 100)}))
        feed.send(ev.Scale(1))
        assert leave(feed) == []
        feed.wait(SETTLED_S / 2)
    feed.wait(SETTLED_S / 2)
    assert leave(feed) == ["a"]


def test_a_worker_is_lent_from_a_machine_that_loses_nothing():
    """Without cached samples, a's only worker is lent, which frees a. With full caches it must stay, so b lends."""
    feed = Feed(own=4)
    feed.open("a", "b", "b", "b")
    assert feed.supervisor.workers[feed.lend("other")].node == "a"
    feed = Feed(own=4)
    feed.open("a", "b", "b", "b")
    feed.send(full("a", "b"))
    assert feed.supervisor.workers[feed.lend("other")].node == "b"
