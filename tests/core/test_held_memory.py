"""Trials look at a minibatch while they wait for the next one: however many cohorts there are, each gets the next."""

import pytest
from test_staging import Feed

from mbaas.core import events as ev


class Holders:
    """Consumers, each in an epoch of its own, who hold what they were given last until they are given more.

    What is given as a copy is not held.
    """

    def __init__(self, number, **options):
        self.feed = Feed(blocks_per_epoch=100, **options)
        self.cursors, self.released, self.copies = {}, {}, []
        for index in range(number):
            name, start = f"c{index}", 100 * index + 1  # exactly there, in the middle of an epoch
            self.cursors[name] = self.released[name] = self.feed.join(name, start, asks=False)

    def go_on(self, name, want=1):
        """Ask for blocks until some are given; return how many, or 0 if there is no room for one."""
        cursor = self.cursors[name]
        session = self.feed.core.consumers.by_name[name].session
        done = self.feed.send(ev.Ask(name, session, cursor, self.released[name], 0, want))
        while not (given := [i for i in done if isinstance(i, ev.Deliver) and i.consumer == name]):
            if not self.feed.tasks:
                return 0
            done = self.feed.finish(min(self.feed.tasks))
        self.copies.append(given[0].as_copy)
        self.cursors[name] += len(given[0].blocks)
        # It looks at the newest block; a copy takes nothing from the budget.
        self.released[name] = self.cursors[name] - (not given[0].as_copy)
        self.feed.send(ev.Heartbeat(name, session, self.released[name], 0))
        return len(given[0].blocks)


@pytest.mark.parametrize(("cohorts", "blocks"), [(2, 3), (3, 3), (8, 8), (20, 8)])
def test_every_cohort_goes_on_whatever_the_others_hold(cohorts, blocks):
    holders = Holders(cohorts, budget_blocks=blocks, ahead=2)
    for _ in range(5):
        for name in holders.cursors:
            assert holders.go_on(name) == 1, f"{name} stands still"
    assert any(holders.copies)


def test_where_there_is_room_nothing_is_copied():
    holders = Holders(3, budget_blocks=20, ahead=2)
    for _ in range(5):
        for name in holders.cursors:
            assert holders.go_on(name) == 1
    assert not any(holders.copies)


def test_members_of_one_cohort_copy_nothing():
    """The blocks from the slowest on are staged already, so it can always go on."""
    feed = Feed(budget_blocks=3, ahead=2)
    for name in ("ann", "bob"):
        feed.join(name)
    feed.make(0)
    done = feed.send(ev.Ask("ann", 1, 1, 0, 0))
    done += feed.send(ev.Ask("bob", 2, 1, 0, 0))
    done += feed.finish(1)
    given = [i for i in done if isinstance(i, ev.Deliver)]
    assert len(given) == 2
    assert not any(i.as_copy for i in given)


def test_fewer_are_given_at_once_before_anything_is_copied():
    """Of eight blocks two are for each of the two, and one stays free: three more, although seven are ready."""
    holders = Holders(2, budget_blocks=8, ahead=8)
    holders.go_on("c0")
    while holders.feed.tasks:
        holders.feed.finish(min(holders.feed.tasks))
    assert len(holders.feed.core.window.blocks) == 8
    assert holders.go_on("c0", want=10) == 3
    assert not any(holders.copies)
