"""The supervisor, case by case; `test_system_schedules` has the random schedules."""

import pytest

from mbaas.core import cluster_events as ev
from mbaas.core import events as staging
from mbaas.core.homes import KEEP_HOME_S, MOVE_S
from mbaas.core.supervised import CACHE_START_S, RETRY_S, WorkerPhase
from mbaas.core.supervisor import BRIEFINGS, HAND_OVER_S, START_S, Supervisor


class Feed:
    """A supervisor with a clock, and what it said last."""

    def __init__(self, own=1, lanes=1, **begin):
        self.supervisor, self.now = Supervisor(own=own, credit=2, lanes=lanes), 0.0
        self.said = []
        self.send(ev.Begin(**begin))

    def send(self, event):
        self.said = self.supervisor.handle(event, self.now)
        self.supervisor.validate()
        return self.said

    def wait(self, seconds):
        self.now += seconds
        return self.send(ev.Tick())

    def kinds(self, kind):
        return [instruction for instruction in self.said if isinstance(instruction, kind)]

    def only(self, kind):
        (found,) = self.kinds(kind)
        return found

    def told(self, kind):
        """The events of a kind that lanes are to hear."""
        return [told.event for told in self.kinds(ev.TellLanes) if isinstance(told.event, kind)]

    def place(self):
        """Carry out the move of homes that was just asked for."""
        move = self.only(ev.MovePlacement)
        self.send(ev.PlacementMoved(move.version, move.workers))
        return move

    def open(self, *nodes):
        """Start a worker, and a cache, on each of the nodes."""
        for start, node in zip(self.kinds(ev.StartWorker), nodes, strict=True):
            self.send(ev.WorkerStarted(start.worker, node))
        for cache in list(self.supervisor.caches.values()):
            self.send(ev.CacheStarted(cache.node, cache.generation))
        self.place()


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
    assert feed.place().weights.keys() == {"b"}
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
    assert feed.only(ev.EndWorker).worker == first.worker, "it came after all, and nobody knows it any more"


def test_workers_whose_machine_dies_are_lost_and_not_blamed():
    """A block over which several workers die is bad itself; a machine that dies is not its fault."""
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.NodesDead(frozenset({"a"})))
    assert [down.blame for down in feed.told(staging.WorkerDown)] == [False, False]


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
    feed = Feed(workers={"prep-0": ev.FoundWorker("a")}, caches={"a": (3, False)}, version=7, is_restart=True)
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
    assert feed.supervisor.homes.placement.version > 7
    assert feed.supervisor.homes.placement.weights.keys() == {"a", "b"}


def test_homes_stay_while_a_worker_may_come_back_and_move_when_it_does_not():
    feed = Feed(own=2)
    feed.open("a", "b")
    lost = next(worker for worker in feed.supervisor.workers.values() if worker.node == "a")
    feed.send(ev.WorkerDied(lost.name, "signal 9"))
    feed.send(ev.CacheProbed("a", feed.only(ev.ProbeCache).generation, answers=True))
    assert not feed.kinds(ev.MovePlacement)
    feed.wait(KEEP_HOME_S)
    assert feed.place().weights.keys() == {"b"}
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


def test_a_worker_goes_when_all_lanes_are_done_with_it():
    feed = Feed(own=2, lanes=2)
    feed.open("a", "a")
    feed.send(ev.Scale(1))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name, lane=1))
    assert not feed.send(ev.WorkerDone(name, lane=1)), "a lane may say so twice"
    feed.send(ev.WorkerDone(name, lane=0))
    assert feed.only(ev.EndWorker).worker == name


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
    back = feed.only(ev.Engage)
    feed.send(ev.StartFailed(back.worker, "it is gone"))
    feed.wait(RETRY_S)
    assert feed.kinds(ev.StartWorker)
    assert feed.supervisor.wanted == 2


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_worker_that_is_lost_while_it_is_lent_is_replaced(is_told_first):
    """Also if the news comes before the word of the feed that took it."""
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Lend("other"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    if is_told_first:
        feed.send(ev.HandedOver(name, taken=True))
    feed.send(ev.LentLost(name))
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


def test_a_feed_has_as_many_workers_as_its_predecessor_had():
    found = {f"prep-{n}": ev.FoundWorker("a") for n in range(3)}
    feed = Feed(own=1, workers=found, caches={"a": (2, True)}, version=7, serial=3, is_restart=True)
    assert feed.supervisor.own == 3
    assert not feed.kinds(ev.EndWorker)
    feed.place()
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
    engage = feed.only(ev.Engage)
    feed.send(ev.WorkerStarted(engage.worker, "a"))
    feed.send(ev.WorkerBriefed(engage.worker, feed.supervisor.homes.placement.version))
    assert feed.supervisor.borrowed == {"other": 1}
    assert feed.supervisor.wanted == 2
    feed.send(ev.Scale(1))
    assert feed.told(staging.WorkerLeaves)[0].worker == engage.worker
    feed.send(ev.WorkerDone(engage.worker))
    assert feed.only(ev.HandOver) == ev.HandOver(engage.worker, "other")
    feed.send(ev.HandedOver(engage.worker, taken=False))
    assert feed.only(ev.EndWorker).worker == engage.worker, "its owner does not answer"


def test_a_borrowed_worker_that_dies_is_told_to_its_owner():
    feed = Feed(own=1)
    feed.open("a")
    feed.send(ev.Offered("key", "other"))
    engage = feed.only(ev.Engage)
    feed.send(ev.WorkerStarted(engage.worker, "a"))
    feed.send(ev.WorkerDied(engage.worker, "signal 9"))
    assert feed.only(ev.ReportLost) == ev.ReportLost(engage.worker, "other")


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
    moves = []
    for second in range(1, 90):
        done = {names["a"]: (100.0 * second, float(second)), names["b"]: (10.0 * second, float(second))}
        feed.now += 1.0
        feed.send(ev.WorkMeasured(done))
        moves += feed.kinds(ev.MovePlacement)
    assert moves
    assert moves[0].weights["a"] > 2 * moves[0].weights["b"]


def test_a_machine_without_workers_is_free_when_the_others_have_what_it_kept():
    feed = Feed(own=2)
    feed.open("a", "b")
    feed.send(ev.Scale(1))
    (leaves,) = feed.told(staging.WorkerLeaves)
    node = feed.supervisor.workers[leaves.worker].node
    feed.place()
    feed.send(ev.WorkerDone(leaves.worker))
    assert feed.only(ev.VacateNode).node == node
    feed.send(ev.NodeVacated(node))
    assert feed.only(ev.EndCache).node == node
    assert not feed.send(ev.NodeVacated(node)), "it is told twice"


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
    engage = feed.only(ev.Engage)
    feed.send(ev.WorkerStarted(engage.worker, "a"))
    feed.send(ev.Lend("third"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    feed.send(ev.HandedOver(name, taken=True))
    feed.send(ev.Stop("it was stopped"))
    assert feed.only(ev.HandOver) == ev.HandOver(engage.worker, "other")
    assert feed.only(ev.EndLent) == ev.EndLent(name)
    supervisor = feed.supervisor
    assert [*supervisor.workers, *supervisor.caches, *supervisor.lent] == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_another_feed_does_not_take_comes_back(answers):
    """Whether that feed says so, or says nothing for too long."""
    feed = Feed(own=2)
    feed.open("a", "a")
    feed.send(ev.Lend("other"))
    name = feed.told(staging.WorkerLeaves)[0].worker
    feed.send(ev.WorkerDone(name))
    feed.wait(HAND_OVER_S - 1)
    assert not feed.kinds(ev.Engage), "it may answer yet"
    if answers:
        feed.send(ev.HandedOver(name, taken=False))
    else:
        feed.wait(1.0)
    assert feed.only(ev.Engage).key == name
    assert feed.supervisor.lent == {}
    assert not feed.kinds(ev.StartWorker)


def test_a_worker_that_was_not_told_of_a_move_is_behind_and_is_told_again():
    feed = Feed(own=2)
    first, second = feed.kinds(ev.StartWorker)
    feed.send(ev.WorkerStarted(first.worker, "a"))
    feed.send(ev.CacheStarted("a", feed.only(ev.StartCache).generation))
    feed.place()
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
        feed.send(ev.WorkerBriefed(name, feed.supervisor.homes.placement.version))
    assert feed.supervisor.workers[name].phase is WorkerPhase.WORKING
    assert feed.supervisor.workers[name].turns == 3
