"""How many workers a feed has, and which ones start or end when that number changes."""

from supervised_feeds import Feed, full

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import RETRY_S
from mbaas.core.staging import events as staging


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


def test_a_worker_is_started_when_all_others_are_lent():
    """The lent workers may die before they come back."""
    feed = Feed(own=1, lent={"other": ("x",)}, is_restart=True)
    assert len(feed.kinds(ev.StartWorker)) == 1
    assert feed.supervisor.wanted == 1


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


def test_an_idle_worker_whose_machine_is_needed_is_told_once_and_again_after_more_were_wanted():
    """Two machines have full caches, so neither can be freed, and a's second worker is all that goes."""
    feed = Feed(own=3)
    feed.open("a", "a", "b")
    feed.send(full("a", "b"))

    def kept():
        return [note.text for note in feed.kinds(ev.Note) if note.text.startswith("keeping")]

    feed.send(ev.Scale(1))
    assert [text.partition(":")[0] for text in kept()] == ["keeping 1 idle prep worker"]
    feed.send(full("a", "b"))
    assert not kept()
    feed.send(ev.Scale(2))
    assert not kept()
    feed.send(ev.Scale(1))
    assert len(kept()) == 1


def test_instructions_of_an_event_stay_readable_after_a_bug():
    feed = Feed(own=2)
    feed.open("a", "a")
    assert feed.send(ev.Lend("other"))
    assert feed.supervisor.instructions == feed.said
