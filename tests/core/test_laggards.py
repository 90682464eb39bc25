"""How long others wait for a slow or silent consumer, and how it continues alone and shares again."""

from staging_feeds import Feed, delivered, kinds, prepared

from mbaas.core.staging import events as ev
from mbaas.core.staging import explain


def test_a_silent_consumer_is_removed_and_its_bytes_come_back():
    feed = Feed(credit=8, ahead=3, lease_s=5.0)
    feed.join("a")
    feed.make(0, 1, 2)
    feed.ask("a", 0, want=3)
    assert feed.core.window.used_bytes == 30 + 10 * len(feed.tasks)
    for block in list(feed.tasks):
        feed.finish(block)
    done = feed.wait(5.0)
    assert kinds(done, ev.RemoveConsumer) == [ev.RemoveConsumer("a", 1, "it was silent for 5 s")]
    assert feed.core.window.used_bytes == 0


def test_a_heartbeat_keeps_the_lease_and_frees_what_was_let_go():
    feed = Feed(credit=8, ahead=2, lease_s=5.0, budget_blocks=2)
    feed.join("a")
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.now = 4.0
    done = feed.send(ev.Heartbeat("a", 1, released=1, done=1))
    assert ev.DropBlock(0, for_room=True) in done
    assert prepared(done) == [2]
    assert kinds(feed.wait(4.0), ev.RemoveConsumer) == []


def test_a_laggard_goes_on_alone_after_the_others_patience_and_nobody_loses_a_block():
    feed = Feed(budget_blocks=4, ahead=2, credit=8, patience_s=5.0, lease_s=1000.0)
    feed.join("a")
    feed.join("slow")
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.ask("slow", 0, want=1)
    feed.make(2)
    feed.ask("a", 2)
    feed.ask("a", 3)
    feed.wait(0.1)
    assert 3 not in feed.tasks
    done = feed.wait(5.0)
    assert "slow kept a waiting at block 1 for 5 s" in kinds(done, ev.Note)[0].text
    assert 3 in feed.tasks
    feed.make(3)
    assert delivered(feed.ask("slow", 1)) == {"slow": (1,)}


def detached(feed):
    return [member.name for member in feed.core.consumers.by_name.values() if member.apart]


def test_a_loader_that_nobody_reads_is_waited_for_no_longer_than_a_reservation():
    """It joined at its own block, so it cannot rest."""
    feed = Feed(budget_blocks=4, ahead=2, credit=8, reservation_s=20.0, patience_s=30.0, lease_s=1000.0)
    feed.wait(100)
    feed.join("unread", start=0, asks=False)
    feed.wait(15)
    feed.join("a")
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.ask("a", 2)
    feed.wait(4)
    assert detached(feed) == []
    assert 2 not in feed.tasks
    done = feed.wait(1)
    assert detached(feed) == ["unread"]
    assert "unread kept a waiting at block 0 for 1 s, and has asked for nothing since it joined" in (
        kinds(done, ev.Note)[0].text
    )
    assert 2 in feed.tasks
    assert delivered(feed.ask("unread", 0)) == {"unread": (0,)}, "it begins where it joined as long as that is staged"


def test_a_laggard_that_catches_up_shares_again():
    feed = Feed(budget_blocks=6, ahead=2, credit=8, patience_s=5.0, lease_s=1000.0)
    cohorts = feed.core.consumers.cohorts
    feed.join("a")
    feed.join("slow", start=0, asks=False)
    feed.make(0, 1)
    feed.ask("a", 0, want=2)
    feed.ask("a", 2)
    feed.wait(0.1)
    feed.wait(5.0)
    assert len(cohorts) == 2
    assert kinds(feed.ask("slow", 0, want=2), ev.Note) == [ev.Note("slow joined the cohort of a")]
    assert kinds(feed.ask("slow", 2), ev.Note) == []
    assert len(cohorts) == 1


def test_those_who_wait_do_not_pull_a_laggard_back_in_by_asking_again():
    """A long wait repeats its call. If that rejoined the cohorts, the fast one would lose `patience_s` each time."""
    feed = Feed(patience_s=5.0)
    feed.join("slow", start=0, asks=False)
    feed.join("fast")
    feed.make(0, 1, 2)
    feed.ask("fast", 0, want=3)
    feed.ask("fast", 3)
    feed.wait(1.0)
    feed.wait(5.0)
    feed.ask("fast", 3)
    members = feed.core.consumers.by_name
    assert members["fast"].cohort != members["slow"].cohort
    assert delivered(feed.finish(3)) == {"fast": (3,)}


def test_asking_renews_the_lease():
    feed = Feed(lease_s=10.0)
    feed.join("ann")
    feed.wait(9.0)
    feed.ask("ann", 0)
    feed.wait(9.0)
    assert "ann" in feed.core.consumers.by_name
    feed.wait(1.0)
    assert not feed.core.consumers.by_name


def test_who_is_ahead_waits_for_the_slowest_and_is_told_so():
    feed = Feed(ahead=1)
    feed.join("ann")
    feed.join("bob", asks=False)
    feed.make(0)
    feed.ask("ann", 1)
    assert explain.wait(feed.core, "ann") == "the slowest consumer, bob, is at block 0, this one at 1"


def test_patience_begins_anew_when_nobody_waited_between():
    feed = Feed(patience_s=5.0, lease_s=1000.0, reservation_s=1000.0)
    feed.join("slow", start=0, asks=False)
    feed.join("fast")
    feed.make(0, 1, 2)
    feed.ask("fast", 3)
    feed.wait(0.0)
    feed.wait(4.0)
    feed.send(ev.HandBack("fast", 2, 3, 3))
    feed.wait(0.5)
    feed.ask("fast", 3)
    feed.wait(0.5)
    feed.wait(4.5)
    assert detached(feed) == []
    feed.wait(0.5)
    assert detached(feed) == ["slow"]


def test_of_two_that_others_wait_for_the_one_goes_first_that_never_began_and_the_other_has_its_time():
    """A third consumer waits: 20 s for the one at block 0 that never asked, then 30 s for the one at block 1."""
    feed = Feed(ahead=2, credit=8, reservation_s=20.0, patience_s=30.0, lease_s=1000.0)
    feed.join("works")
    feed.join("never began", start=0, asks=False)
    feed.join("waits")
    feed.make(0, 1)
    feed.ask("waits", 2)
    feed.wait(0.0)
    for seconds, gone in ((19.0, []), (1.0, ["never began"])):
        feed.wait(seconds)
        assert detached(feed) == gone
    feed.make(2)
    feed.ask("waits", 3)
    feed.wait(0.0)
    for seconds, gone in ((29.0, ["never began"]), (1.0, ["works", "never began"])):
        feed.wait(seconds)
        assert detached(feed) == gone
