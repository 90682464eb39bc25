"""Where consumers begin: newcomers, announced, successors, restored, and those that leave an epoch midway."""

from staging_feeds import Feed, delivered, kinds, prepared

from mbaas.core.staging import events as ev


def test_a_newcomer_steps_in_at_the_epochs_beginning_while_its_blocks_are_staged():
    feed = Feed()
    feed.join("a")
    feed.ask("a", 0)
    feed.make(0)
    feed.ask("a", 1)
    feed.make(1)
    assert feed.join("b") == 0
    assert delivered(feed.ask("b", 0, want=2)) == {"b": (0, 1)}


def test_a_newcomer_waits_for_the_next_epoch_when_the_beginning_is_gone():
    feed = Feed(budget_blocks=2, ahead=2)
    feed.join("a")
    for block in range(3):
        feed.ask("a", block)
        feed.make(block)
    assert feed.join("b") == 4


def test_an_announced_consumer_finds_its_reservation_although_others_went_on():
    feed = Feed(ahead=3, credit=8)
    feed.join("a")
    feed.send(ev.Announce("b"))
    feed.make(0, 1, 2)
    feed.ask("a", 0, want=3)
    feed.ask("a", 3)
    assert feed.join("b") == 0


def test_an_announced_consumer_that_does_not_come_holds_nobody_for_longer_than_the_reservation_time():
    feed = Feed(ahead=3, credit=8, reservation_s=5.0, lease_s=100.0)
    feed.join("a")
    feed.send(ev.Announce("b"))
    feed.make(0, 1, 2)
    feed.ask("a", 0, want=3)
    assert prepared(feed.ask("a", 3)) == []
    assert prepared(feed.wait(4.9)) == []
    done = feed.wait(0.2)
    assert prepared(done) == [3, 4, 5]
    assert "b did not come within 5 s" in kinds(done, ev.Note)[0].text


def test_the_place_of_a_trial_that_ended_goes_to_its_successor():
    """a and b finish epoch 0, b stops there, and a runs ahead. c takes b's reservation and starts epoch 1 at once."""
    feed = Feed(budget_blocks=8, ahead=4, credit=8)
    feed.join("a")
    feed.join("b")
    feed.make(0, 1, 2, 3)
    feed.ask("a", 0, want=4)
    feed.ask("b", 0, want=4)
    feed.send(ev.Heartbeat("b", 2, released=0, done=4))
    feed.ask("a", 4)
    feed.make(4, 5, 6, 7)
    feed.ask("a", 5, want=3)
    feed.send(ev.Leave("b", successors=1))
    feed.send(ev.Announce("c"))
    assert feed.join("c") == 4
    assert delivered(feed.ask("c", 4, want=4)) == {"c": (4, 5, 6, 7)}


def test_a_consumer_restored_far_away_gets_its_exact_block_in_a_cohort_of_its_own():
    feed = Feed(credit=8, ahead=2)
    feed.join("a")
    assert feed.join("restored", start=41) == 41
    assert len(feed.core.consumers.cohorts) == 2
    assert {41, 42} <= set(feed.tasks)


def test_a_consumer_restored_at_an_epochs_first_block_is_not_moved_to_a_later_epoch():
    """Its position may be inside that block; another epoch would not contain its samples."""
    feed = Feed()
    feed.join("other", start=8)
    assert feed.join("restored", start=0) == 0
    assert feed.core.consumers.by_name["restored"].cursor == 0


def test_a_state_between_epochs_joins_an_epoch_that_others_begin_and_that_it_has_not_had():
    feed = Feed()
    feed.join("a", start=48)
    assert feed.join("restored", start=40, flexible=True) == 48
    assert feed.join("further", start=52, flexible=True) == 52, "it has had the one that they are in"
    assert feed.join("same", start=48, flexible=True) == 48


def test_a_place_that_is_held_is_taken_only_for_an_epoch_that_was_not_had():
    feed = Feed()
    feed.join("a")
    feed.send(ev.Announce("restored"))
    assert feed.core.consumers.by_name["restored"].cursor == 0
    assert feed.join("restored", start=8, flexible=True) == 8


def test_a_state_between_epochs_starts_where_it_says_if_nobody_is_there():
    feed = Feed()
    assert feed.join("restored", start=40, flexible=True, asks=False) == 40
    feed.join("other", start=48)
    feed.ask("restored", 40)
    assert feed.core.consumers.by_name["restored"].cursor == 48, "and it may still begin another one with others"


def test_a_feed_that_all_have_left_starts_a_fresh_epoch():
    feed = Feed()
    feed.join("a")
    feed.make(0)
    feed.send(ev.Leave("a"))
    assert feed.join("b") == 4


def test_who_leaves_an_epoch_half_way_and_holds_its_last_block_gets_the_next_epoch():
    """Epochs have 8 blocks, the budget is 4: block 0 is held and 1 to 3 are ready when the consumer skips to 8.

    Blocks 1 to 3 were never delivered and no consumer needs them, so they are dropped at once.
    """
    feed = Feed(budget_blocks=4, ahead=4, blocks_per_epoch=8)
    feed.join("ann")
    feed.finish(0)
    feed.make(1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    done = feed.send(ev.Ask("ann", session, 8, 0, 0, 1))
    assert kinds(done, ev.DropBlock) == [ev.DropBlock(1), ev.DropBlock(2), ev.DropBlock(3)]
    assert delivered(feed.finish(8)) == {"ann": (8,)}
    assert 0 in feed.core.window.blocks
    feed.send(ev.Ask("ann", session, 9, 0, 0, 1))
    assert delivered(feed.finish(9)) == {"ann": (9,)}
    assert sorted(feed.core.window.blocks) == [0, 8, 9, 10]


def test_who_gives_up_what_it_was_given_ahead_and_holds_an_older_block_gets_the_next_epoch():
    """As in the test above, but blocks 1 to 3 were already delivered, and the consumer hands them back."""
    feed = Feed(budget_blocks=5, ahead=4, blocks_per_epoch=8, credit=4)
    feed.join("ann")
    feed.finish(0)
    feed.make(1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    assert delivered(feed.send(ev.Ask("ann", session, 1, 0, 0, 3))) == {"ann": (1, 2, 3)}
    feed.send(ev.HandBack("ann", session, 1, 0))
    feed.send(ev.Ask("ann", session, 8, 0, 0, 1))
    assert delivered(feed.finish(8)) == {"ann": (8,)}
    assert 0 in feed.core.window.blocks


def test_who_is_moved_to_the_epoch_that_others_begin_still_holds_its_last_block():
    """Its trial works on block 3 when it requests the next epoch, which it starts at block 16 with the other."""
    feed = Feed(budget_blocks=12, ahead=8, workers=2, credit=4)
    feed.join("ann")
    feed.make(*range(4))
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 0, 0, 0, 4))
    feed.join("bob", start=16)
    feed.ask("bob", 16)
    feed.send(ev.Ask("ann", session, 4, 3, 3, 1))
    ann = feed.core.consumers.by_name["ann"]
    assert ann.cursor == 16, "it begins the epoch that bob begins"
    assert ann.holds(3)
    assert not ann.holds(4)
    assert 3 in feed.core.window.blocks
    feed.send(ev.Heartbeat("ann", session, 4, 4))
    assert 3 not in feed.core.window.blocks


def test_a_successor_begins_behind_the_epoch_that_its_predecessor_used_up():
    """This also holds while another trial is so far behind that the whole epoch is still staged."""
    feed = Feed(ahead=4, credit=8)
    feed.join("ann")
    feed.join("bob")
    feed.make(0, 1, 2, 3)
    feed.send(ev.Ask("bob", 2, 0, 0, 0, 4))
    feed.send(ev.Heartbeat("bob", 2, released=4, done=4))
    feed.send(ev.Leave("bob", 2, successors=1))
    feed.send(ev.Announce("eve"))
    assert feed.join("eve") == 4


def test_the_place_of_one_that_left_is_held_for_the_reservation_time():
    feed = Feed(reservation_s=5.0)
    feed.join("ann")
    feed.send(ev.Leave("ann", successors=1))
    feed.wait(4.0)
    assert [*feed.core.consumers.by_name] == ["reservation 0"]
    feed.wait(1.0)
    assert feed.core.consumers.by_name == {}


def test_one_that_is_announced_has_no_session_before_it_joins():
    feed = Feed()
    feed.send(ev.Announce("ann"))
    for session in (0, 1):
        (refused,) = feed.send(ev.Heartbeat("ann", session, 0, 0))
        assert refused.reason == f"the service has no session {session} of consumer 'ann': it left or was removed"
