"""Every cohort gets its next block although trials hold a minibatch while they wait, whatever the number of cohorts."""

import pytest
from staging_feeds import Feed, delivered, give, kinds

from mbaas.core.staging import events as ev


class Holders:
    """Consumers in separate epochs; each holds its last blocks until it gets more.

    Blocks delivered as copies are not held.
    """

    def __init__(self, number, **options):
        self.feed = Feed(blocks_per_epoch=100, **options)
        self.cursors, self.released, self.copies = {}, {}, []
        for index in range(number):
            name, start = f"c{index}", 100 * index + 1  # an exact start, in mid-epoch
            self.cursors[name] = self.released[name] = self.feed.join(name, start, asks=False)

    def go_on(self, name, want=1):
        """Request blocks until some are delivered; return how many, or 0 if memory is full."""
        cursor = self.cursors[name]
        session = self.feed.core.consumers.by_name[name].session
        done = self.feed.send(ev.Ask(name, session, cursor, self.released[name], 0, want))
        while not (given := [i for i in done if isinstance(i, ev.Deliver) and i.consumer == name]):
            if not self.feed.tasks:
                return 0
            done = self.feed.finish(min(self.feed.tasks))
        self.copies.append(given[0].as_copy)
        self.cursors[name] += len(given[0].blocks)
        # It holds the newest block; a copy does not count against the budget.
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
    """The blocks from the slowest member on are staged already, so that member can always continue."""
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


@pytest.mark.parametrize("budget_blocks", [8, 16])
def test_who_keeps_all_that_it_was_given_copies_it_in_the_end_and_holds_up_nobody(budget_blocks):
    """No other consumer copies anything, and the hoarder keeps its views."""
    feed = Feed(budget_blocks=budget_blocks, ahead=2, blocks_per_epoch=100)
    for name in ("hoards", "ann", "bob"):
        feed.join(name, asks=False)
    copies = {name: [] for name in ("hoards", "ann", "bob")}
    for block in range(40):
        for session, name in enumerate(copies, 1):
            released = 0 if name == "hoards" else max(0, block - 1)
            views = copies[name].count(False)
            unheld = (views, block) if name == "hoards" and views < block else None
            done = feed.send(ev.Ask(name, session, block, released, 0, unheld=unheld))
            while not (given := [i for i in done if isinstance(i, ev.Deliver) and i.consumer == name]):
                done = feed.finish(min(feed.tasks))
            copies[name].append(given[0].as_copy)
    views = copies["hoards"].index(True)
    assert all(copies["hoards"][views:]), "it holds its views, so all later blocks are copies"
    assert views == budget_blocks - 5
    assert {*range(views)} <= feed.core.window.blocks.keys()
    assert not any(copies["ann"] + copies["bob"])
    assert len(feed.core.consumers.by_name["hoards"].skipped) == 1, "one range tells of all that it copied"


def test_who_lets_go_of_what_it_kept_need_not_copy_any_more():
    feed = Feed(budget_blocks=4, ahead=2, blocks_per_epoch=100)
    feed.join("hoards", asks=False)
    views = 0
    for block in range(10):
        done = feed.send(ev.Ask("hoards", 1, block, 0, 0, unheld=(views, block) if views < block else None))
        while not (given := [i for i in done if isinstance(i, ev.Deliver)]):
            done = feed.finish(min(feed.tasks))
        views += not given[0].as_copy
    assert given[0].as_copy
    done = feed.send(ev.Ask("hoards", 1, 10, 9, 9))
    while not (given := [i for i in done if isinstance(i, ev.Deliver)]):
        done = feed.finish(min(feed.tasks))
    assert not given[0].as_copy


def test_fewer_are_given_at_once_before_anything_is_copied():
    """8 blocks - 2 for each of two consumers - 1 that stays free = 3, although seven are ready."""
    holders = Holders(2, budget_blocks=8, ahead=8)
    holders.go_on("c0")
    while holders.feed.tasks:
        holders.feed.finish(min(holders.feed.tasks))
    assert len(holders.feed.core.window.blocks) == 8
    assert holders.go_on("c0", want=10) == 3
    assert not any(holders.copies)


def test_who_catches_up_is_not_given_so_much_at_once_that_nobody_gets_room_for_the_next():
    """Its delivery must leave room for the blocks that others hold, and for the block that they need next."""
    feed = Feed(budget_blocks=4, ahead=4, blocks_per_epoch=6)
    for name in ("late", "front"):
        feed.join(name, asks=False)
    give(feed, "late", 0)
    assert [give(feed, "front", block) for block in range(4)] == [(0,), (1,), (2,), (3,)]
    given = delivered(feed.send(ev.Ask("late", 1, 1, 0, 0, want=4)))["late"]
    assert given == (1,), f"blocks 0 and 3 are held; with blocks {given} as well, block 4 does not fit"


def test_what_the_one_in_front_holds_counts_also_where_the_one_that_asks_is_far_behind():
    feed = Feed(budget_blocks=10, ahead=10, blocks_per_epoch=20)
    for name in ("late", "front"):
        feed.join(name, asks=False)
    give(feed, "late", 0)
    assert [give(feed, "front", block) for block in range(5)] == [(block,) for block in range(5)]
    while feed.tasks:
        feed.finish(min(feed.tasks))
    assert delivered(feed.send(ev.Ask("front", 2, 5, 5, 5, want=5)))["front"] == (5, 6, 7, 8, 9)
    assert delivered(feed.send(ev.Ask("late", 1, 1, 0, 0, want=4)))["late"] == (1, 2, 3), "9 of 10 are held now"


@pytest.mark.parametrize("heard_again", [False, True])
def test_who_holds_just_what_it_works_on_and_the_one_before_keeps_nothing_old(heard_again):
    """It gets a view as long as there is any room."""
    feed = Feed(budget_blocks=6, ahead=6, blocks_per_epoch=20)
    for name in ("works", "front"):
        feed.join(name, asks=False)
    for block in range(4):
        give(feed, "works", block, holds=min(block, 2))  # finally it holds two blocks, 2 and 3
        give(feed, "front", block)
    assert give(feed, "front", 4) == (4,)
    assert give(feed, "front", 5) == (5,)
    assert give(feed, "front", 6, holds=5) == (6,)
    for _ in range(1 + heard_again):
        (given,) = kinds(feed.send(ev.Ask("works", 1, 4, 2, 2, 1, number=7)), ev.Deliver)
        assert given.blocks == (4,)
        assert not given.as_copy


def test_who_keeps_everything_holds_up_nobody_where_each_second_block_is_a_small_one():
    """Epochs have two blocks, of 10 and 1 bytes; the budget is counted in full blocks."""
    feed = Feed(budget_blocks=8, ahead=2, blocks_per_epoch=2, block_bytes=lambda block: (10, 1)[block % 2])
    feed.join("hoards", asks=False)
    views = 0
    for block in range(40):
        done = feed.send(ev.Ask("hoards", 1, block, 0, 0, unheld=(views, block) if views < block else None))
        while not (given := kinds(done, ev.Deliver)):
            assert feed.tasks, f"block {block} does not fit"
            done = feed.finish(min(feed.tasks))
        views += not given[0].as_copy
