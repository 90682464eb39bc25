"""Calls that are old, late, repeated or from another session change nothing."""

from staging_feeds import Feed, delivered, kinds

from mbaas.core.staging import events as ev


def test_calls_of_an_old_session_are_refused():
    feed = Feed()
    feed.join("a")
    feed.join("a")
    done = feed.send(ev.Ask("a", 1, 0, 0, 0))
    assert "is now in session 2, this call is from session 1" in kinds(done, ev.Refuse)[0].reason


def test_a_word_that_was_overtaken_changes_nothing():
    """If a late hand-back of blocks 1 to 3 were applied after block 8 was delivered, block 8 would count as skipped."""
    feed = Feed(budget_blocks=12, ahead=4, blocks_per_epoch=8, credit=4)
    feed.join("ann")
    feed.make(0, 1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 1, 0, 0, 3, number=1))
    feed.send(ev.Ask("ann", session, 8, 0, 0, 1, number=3))
    feed.make(4, 8)
    feed.send(ev.HandBack("ann", session, 1, 0, number=2))
    feed.send(ev.Ask("ann", session, 9, 0, 0, 1, number=4))
    assert feed.core.consumers.by_name["ann"].holds(8)
    assert not feed.send(ev.Ask("ann", session, 1, 0, 0, 3, number=1)), "a repeated call"
    assert feed.core.consumers.by_name["ann"].cursor == 9


def test_a_call_that_comes_again_after_its_block_was_used_up_is_left_alone():
    """Its answer did arrive. Delivering the block again would count it both as used and as outstanding."""
    feed = Feed()
    session = feed.session + 1
    feed.join("ann", asks=False)
    for number, block in enumerate(range(4), 1):
        feed.send(ev.Ask("ann", session, block, block, 0, number=number))
        feed.finish(block)
    feed.send(ev.Heartbeat("ann", session, released=3, done=4))
    assert not feed.send(ev.Ask("ann", session, 3, 3, 0, number=4)), "neither answered nor refused"
    feed.send(ev.Heartbeat("ann", session, released=4, done=4))
    assert not feed.send(ev.Ask("ann", session, 3, 3, 0, number=4))
    assert feed.core.consumers.by_name["ann"].cursor == 4


def test_a_call_that_comes_twice_is_answered_twice_and_what_it_got_first_stays():
    """Blocks 1 to 3 are held when the call is repeated; the second answer may contain fewer blocks."""
    feed = Feed(budget_blocks=5, ahead=4, blocks_per_epoch=8, credit=4)
    feed.join("ann")
    feed.make(0, 1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    first = ev.Ask("ann", session, 1, 0, 0, 3, number=1)
    assert delivered(feed.send(first)) == {"ann": (1, 2, 3)}
    assert delivered(feed.send(first)) == {"ann": (1, 2, 3)}, "the first answer may not have arrived"
    assert delivered(feed.send(ev.Ask("ann", session, 1, 0, 0, 1, number=1))) == {"ann": (1,)}
    feed.send(ev.Ask("ann", session, 4, 0, 3, 1, number=2))
    assert [feed.core.consumers.by_name["ann"].holds(block) for block in range(5)] == [True, True, True, True, False]


def test_what_is_handed_back_says_what_is_let_go_too():
    feed = Feed(credit=3)
    feed.join("ann")
    feed.make(0, 1, 2)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 1, 0, 0, 3))
    feed.send(ev.HandBack("ann", session, 2, 1))
    ann = feed.core.consumers.by_name["ann"]
    assert (ann.released, ann.cursor, ann.waiting) == (1, 2, False)


def test_who_comes_after_the_feed_failed_learns_why_and_all_else_is_silence():
    feed = Feed()
    feed.join("ann")
    assert feed.send(ev.Stop("it was stopped")) == [ev.Refuse("ann", 1, "it was stopped")], "a waiting trial is refused"
    assert feed.send(ev.Stop("another reason")) == []
    for thing in ("ann", "w0", "block 0"):
        story = feed.core.stories.lines(thing)
        assert story[-1].endswith("the feed ended: it was stopped  <- Stop(reason='it was stopped')")
    for event in (ev.Join("bob", 9), ev.Ask("ann", 1, 0, 0, 0)):
        assert [i.reason for i in kinds(feed.send(event), ev.Refuse)] == ["it was stopped"]
    assert feed.send(ev.TaskEnded(0)) == []


def test_who_asks_for_what_it_let_go_of_is_refused():
    feed = Feed()
    feed.join("ann")
    feed.make(0)
    feed.ask("ann", 1)
    (refused,) = kinds(feed.send(ev.Ask("ann", 1, 0, 0, 0)), ev.Refuse)
    assert refused.reason == "it asked for block 0 after it let go of all blocks below 1"


def test_who_hands_back_while_it_waits_waits_no_more():
    feed = Feed()
    feed.join("ann")
    assert feed.core.consumers.by_name["ann"].waiting
    feed.send(ev.HandBack("ann", 1, 0, 0))
    assert not feed.core.consumers.by_name["ann"].waiting
    assert delivered(feed.finish(0)) == {}


def test_a_session_that_is_not_newer_than_the_open_one_is_refused():
    """The join call was overtaken, or arrived twice."""
    feed = Feed()
    feed.send(ev.Join("ann", 5))
    for session in (4, 5):
        (refused,) = feed.send(ev.Join("ann", session))
        assert refused == ev.Refuse("ann", session, "session 5 of 'ann' is newer")
    assert feed.core.consumers.by_name["ann"].session == 5


def test_who_leaves_ends_its_own_session_only():
    feed = Feed()
    feed.join("ann")
    feed.join("ann")
    feed.send(ev.Leave("ann", 1))
    assert "ann" in feed.core.consumers.by_name
    feed.send(ev.Leave("ann", 2))
    assert feed.core.consumers.by_name == {}
