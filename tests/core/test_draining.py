"""Work and samples move away from a draining machine before it is gone."""

import pytest
from supervised_feeds import Feed

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import CachePhase, WorkerPhase
from mbaas.core.staging import events as staging


def drain(feed, *nodes):
    feed.send(ev.NodesDraining(frozenset(nodes)))


def phases(feed):
    return {worker.node: worker.phase for worker in feed.supervisor.workers.values()}


def homes(feed):
    return set(feed.supervisor.homes.current.weights)


def start(feed, node):
    """Bring up the requested worker and a cache on a machine; the worker can work after homes have moved."""
    (name,) = [name for name, worker in feed.supervisor.workers.items() if worker.phase is WorkerPhase.STARTING]
    feed.send(ev.WorkerStarted(name, node))
    for asked in feed.kinds(ev.StartCache):
        feed.send(ev.CacheStarted(node, asked.generation))
    return name


def test_another_worker_is_started_while_the_one_that_will_be_gone_works_on():
    feed = Feed()
    feed.open("a")
    (old,) = feed.supervisor.workers
    drain(feed, "a")
    assert len(feed.kinds(ev.StartWorker)) == 1
    assert phases(feed)["a"] is WorkerPhase.WORKING, "no other worker is up yet"
    new = start(feed, "b")
    assert feed.move_homes().weights.keys() == {"b"}
    assert [event.worker for event in feed.told(staging.WorkerLeaves)] == [old], "it finishes its tasks"
    assert [event.worker for event in feed.told(staging.WorkerUp)] == [new]
    feed.send(ev.WorkerDone(old))
    assert feed.only(ev.EndWorker).worker == old
    assert feed.only(ev.VacateNode).node == "a", "others fetch the samples in its cache"
    assert [event.node for event in feed.told(staging.NodeLeaves)] == ["a"], "blocks staged there are copied"
    feed.send(ev.NodeVacated("a"))
    assert feed.only(ev.EndCache).node == "a"
    assert not feed.kinds(ev.StartWorker)
    assert phases(feed) == {"b": WorkerPhase.WORKING}


def test_homes_leave_at_once_where_others_work():
    feed = Feed(own=2)
    feed.open("a", "b")
    assert homes(feed) == {"a", "b"}
    drain(feed, "a")
    assert feed.only(ev.MovePlacement).weights.keys() == {"b"}
    assert phases(feed)["a"] is WorkerPhase.LEAVING
    feed.move_homes()
    assert homes(feed) == {"b"}


def test_where_nothing_else_is_left_work_goes_on_until_the_end():
    """Workers are requested, which Ray's autoscaler sees, and none stops for a machine that may never come."""
    feed = Feed(own=2)
    feed.open("a", "b")
    drain(feed, "a", "b")
    assert len(feed.kinds(ev.StartWorker)) == 2
    feed.wait(600.0)
    assert homes(feed) == {"a", "b"}
    assert set(phases(feed).values()) == {WorkerPhase.WORKING, WorkerPhase.STARTING}
    feed.send(ev.NodesDead(frozenset({"a", "b"})))
    assert feed.supervisor.starting == 2
    assert not feed.supervisor.draining


def test_a_machine_that_stays_after_all_is_one_like_any_other():
    feed = Feed()
    feed.open("a")
    drain(feed, "a")
    drain(feed)
    assert [event.node for event in feed.told(staging.NodeStays)] == ["a"], "nothing more is copied from it"
    feed.wait(1.0)
    assert feed.supervisor.starting == 0, "the requested worker is not needed"
    assert phases(feed) == {"a": WorkerPhase.WORKING}


def test_a_machine_that_dies_before_all_was_moved_is_one_that_died():
    feed = Feed()
    feed.open("a")
    drain(feed, "a")
    new = start(feed, "b")
    feed.send(ev.NodesDead(frozenset({"a"})))
    assert [event.node for event in feed.told(staging.NodeDown)] == ["a"]
    drain(feed, "a")
    assert not feed.supervisor.draining, "Ray may name it for a moment longer"
    move = feed.supervisor.homes.move
    feed.send(ev.PlacementMoved(move.version, move.workers))
    assert [event.worker for event in feed.told(staging.WorkerUp)] == [new]


def test_no_cache_is_started_on_a_machine_that_will_be_gone_soon():
    """Ray no longer starts processes there."""
    feed = Feed()
    feed.open("a")
    drain(feed, "a")
    cache = feed.supervisor.caches["a"]
    feed.send(ev.WorkerDied(next(iter(feed.supervisor.workers)), "signal 9"))
    feed.send(ev.CacheProbed("a", cache.generation, answers=False))
    feed.wait(60.0)
    assert not feed.kinds(ev.StartCache)


def test_a_borrowed_worker_goes_home_from_a_machine_that_will_be_gone():
    feed = Feed()
    feed.open("a")
    borrowed = feed.borrow("b")
    drain(feed, "b")
    assert [event.worker for event in feed.told(staging.WorkerLeaves)] == [borrowed]
    feed.send(ev.WorkerDone(borrowed))
    assert feed.only(ev.HandOver) == ev.HandOver(borrowed, "other")


def test_no_worker_is_lent_from_a_machine_that_will_be_gone_nor_scaled_away_instead_of_another():
    feed = Feed(own=3)
    feed.open("a", "b", "c")
    drain(feed, "a")
    feed.send(ev.Scale(1))
    feed.wait(1.0)
    assert phases(feed)["a"] is WorkerPhase.LEAVING
    assert sorted(phase.name for node, phase in phases(feed).items() if node in "bc") == ["LEAVING", "WORKING"]


@pytest.mark.parametrize("others", [0, 2])
def test_machines_on_which_nothing_of_the_feed_runs_are_none_of_its_concern(others):
    feed = Feed()
    feed.open("a")
    drain(feed, *"xyz"[: 1 + others])
    assert not feed.kinds(ev.Note)
    assert not feed.supervisor.draining


def test_a_cache_whose_machine_will_be_gone_is_not_put_to_use_again():
    feed = Feed(own=2)
    feed.open("a", "b")
    drain(feed, "a")
    feed.move_homes()
    (leaving,) = [w.name for w in feed.supervisor.workers.values() if w.node == "a"]
    feed.send(ev.WorkerDone(leaving))
    assert feed.supervisor.caches["a"].phase is CachePhase.VACATING
    name = next(worker.name for worker in feed.supervisor.workers.values() if worker.phase is WorkerPhase.STARTING)
    feed.send(ev.WorkerStarted(name, "a"))
    feed.wait(1.0)
    assert feed.supervisor.caches["a"].phase is CachePhase.VACATING, "although Ray put a worker there"


def test_who_stays_is_neither_on_its_way_nor_on_a_machine_that_will_be_gone():
    feed = Feed(own=2)
    feed.open("a", "b")
    assert feed.supervisor.staying == 2
    feed.send(ev.Scale(1))
    assert feed.supervisor.staying == 1
    drain(feed, "a", "b")
    assert feed.supervisor.staying == 0


def test_staging_hears_also_of_a_dead_machine_where_nothing_but_trials_ran():
    feed = Feed()
    feed.open("a")
    feed.send(ev.NodesDead(frozenset({"trials"})))
    assert [event.node for event in feed.told(staging.NodeDown)] == ["trials"]
    feed.send(ev.NodesDead(frozenset({"trials"})))
    assert not feed.told(staging.NodeDown), "Ray reports it again at each check"
