"""Workers that are lent to another feed or borrowed from it: deaths, returns, and the end of either feed."""

import pytest
from supervised_feeds import Feed, full

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import RETRY_S, WorkerPhase
from mbaas.core.cluster.supervisor import HAND_OVER_S
from mbaas.core.staging import events as staging


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


def test_a_borrowed_worker_that_dies_is_told_to_its_owner():
    feed = Feed(own=1)
    feed.open("a")
    feed.send(ev.Offered("key", "other"))
    taken = feed.only(ev.TakeIn)
    feed.send(ev.WorkerStarted(taken.worker, "a"))
    feed.send(ev.WorkerDied(taken.worker, "signal 9"))
    assert feed.only(ev.ReportLentGone) == ev.ReportLentGone(taken.worker, "other")


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


def test_the_owner_of_a_borrowed_worker_that_does_not_answer_after_a_restart_is_told():
    """Otherwise the owner would count it as lent forever and start no replacement."""
    feed = Feed(workers={"other-prep-3": ev.FoundWorker("", "other")}, is_restart=True)
    assert feed.said.index(ev.ReportLentGone("other-prep-3", "other")) < feed.said.index(
        ev.EndWorker("other-prep-3")
    ), "its owner is notified before the worker ends"
    assert feed.supervisor.borrowed == {}


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


def test_a_worker_is_lent_from_a_machine_that_loses_nothing():
    """Without cached samples, a's only worker is lent, which frees a. With full caches it must stay, so b lends."""
    feed = Feed(own=4)
    feed.open("a", "b", "b", "b")
    assert feed.supervisor.workers[feed.lend("other")].node == "a"
    feed = Feed(own=4)
    feed.open("a", "b", "b", "b")
    feed.send(full("a", "b"))
    assert feed.supervisor.workers[feed.lend("other")].node == "b"


def test_room_on_a_machine_itself_does_not_save_what_it_has_cached():
    """b has no room for what a has, so both would lose samples, and the machine with more workers lends one."""
    feed = Feed(own=4)
    feed.open("a", "b", "b", "b")
    feed.send(ev.CachesMeasured({"a": (60, 100), "b": (100, 100)}))
    assert feed.supervisor.workers[feed.lend("other")].node == "b"


def test_own_workers_are_away_from_their_loan_to_their_return():
    """A borrowed worker and one that starts here are not."""
    feed = Feed(own=3)
    feed.open("a", "a", "b")
    feed.borrow("a")
    feed.send(ev.Scale(5))
    assert feed.kinds(ev.StartWorker)
    assert feed.supervisor.away == 0
    first = feed.lend("other")
    assert feed.supervisor.away == 1, "the other feed has not answered yet"
    feed.send(ev.HandedOver(first, taken=True))
    feed.lend("third")
    assert feed.supervisor.away == 2
    feed.send(ev.Offered(first, None))
    assert feed.supervisor.away == 2, "it is on its way back"
    feed.send(ev.WorkerStarted(feed.only(ev.TakeIn).worker, "a"))
    assert feed.supervisor.away == 1


def test_a_worker_that_leaves_needs_its_machine_no_more():
    feed = Feed(own=3)
    feed.open("a", "b", "b")
    assert feed.supervisor.machines == {"a", "b"}
    feed.send(ev.Lend("other"))
    assert feed.supervisor.workers[feed.told(staging.WorkerLeaves)[0].worker].node == "a"
    assert feed.supervisor.machines == {"b"}
