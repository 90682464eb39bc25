"""Nothing is prepared beyond the epoch of consumers that leave when it ends."""

from staging_feeds import Feed, give, prepared

from mbaas.core.staging import events as ev


def evaluated(feed, name, *, goes_on=False):
    """Blocks prepared while a consumer joins, reads an epoch (plus one block if `goes_on`) and leaves."""
    start = feed.join(name, asks=False)
    made = []
    for block in range(start, start + 4 + goes_on):
        made += prepared(feed.ask(name, block))
        while feed.tasks:
            made += prepared(feed.finish(min(feed.tasks)))
    feed.send(ev.Leave(name, feed.session))
    assert feed.wait(100.0) == [], "a feed without consumers prepares nothing"
    return made


def test_nothing_is_made_behind_the_epoch_of_those_who_leave_when_it_ends():
    """A loader is reopened for each evaluation: only the first visit also prepares the next epoch."""
    feed = Feed(ahead=6, budget_blocks=10)
    assert evaluated(feed, "first") == [*range(8)]
    for evaluation in range(2, 6):
        assert evaluated(feed, "validation") == [*range(4 * evaluation, 4 * evaluation + 4)]


def test_as_much_as_before_is_made_ahead_once_somebody_goes_on():
    feed = Feed(ahead=6, budget_blocks=10)
    evaluated(feed, "first")
    assert evaluated(feed, "trial", goes_on=True) == [*range(8, 19)]
    assert evaluated(feed, "next") == [*range(20, 28)]


def test_a_visitor_shortens_nothing_for_those_it_reads_with():
    feed = Feed(ahead=6, budget_blocks=12)
    evaluated(feed, "first")
    feed.join("trial", start=40, asks=False)
    feed.core.consumers.by_name["trial"].is_visitor = False
    feed.join("visitor", start=40, asks=False)
    assert feed.core.consumers.by_name["visitor"].is_visitor
    feed.ask("trial", 40)
    feed.make(40)
    feed.ask("visitor", 40)
    (cohort,) = feed.core.consumers.cohorts.values()
    assert cohort.horizon > 44


def test_a_loader_that_joins_again_at_an_epochs_end_is_no_visitor():
    """It loads a state at that position, or was removed; either way it continues."""
    feed = Feed(ahead=6, budget_blocks=10)
    start = feed.join("a", asks=False)
    for block in range(start, start + 4):
        give(feed, "a", block)
    feed.join("a", start=start + 4, asks=False)
    assert not feed.core.consumers.expects_visitors
    feed.send(ev.Leave("a", feed.session))
    assert not feed.core.consumers.expects_visitors, "it had nothing of an epoch in this session"
