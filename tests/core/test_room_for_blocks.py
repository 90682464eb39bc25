"""Which blocks make room, and whose blocks come first, where bytes are short."""

import pytest
from staging_feeds import Feed, delivered, kinds, prepared

from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.story import InvariantError
from mbaas.samples.placement import BlockPart


def test_blocks_kept_for_newcomers_yield_to_blocks_that_are_needed():
    """The budget is 2 blocks: preparing block 2 needs the bytes of block 0, which is staged only for newcomers."""
    feed = Feed(budget_blocks=2, ahead=2)
    feed.join("a")
    feed.ask("a", 0)
    feed.make(0)
    done = feed.ask("a", 1)
    assert prepared(done) == []  # block 1 is in preparation already, and blocks 0 and 1 fill the budget
    done = feed.finish(1)
    assert kinds(done, ev.DropBlock) == [ev.DropBlock(0, for_room=True)]
    assert prepared(done) == [2]


def test_the_longest_waiting_cohort_is_served_first_when_bytes_are_short():
    """Two cohorts share a budget of two blocks: neither may starve."""
    feed = Feed(budget_blocks=2, ahead=1, credit=2)
    feed.join("a")
    feed.join("b", start=21)
    next_block, taken = {"a": 0, "b": 21}, {"a": 0, "b": 0}

    def note(done):
        for consumer, blocks in delivered(done).items():
            next_block[consumer] = blocks[-1] + 1
            taken[consumer] += len(blocks)

    for _ in range(40):
        for name, block in list(next_block.items()):
            note(feed.ask(name, block))
        for block in list(feed.tasks):
            note(feed.finish(block))
    assert min(taken.values()) > 15


def test_the_block_that_is_needed_last_by_everybody_makes_room():
    """The budget is 4 blocks: ann holds 0 and waits for 1. Blocks 2 and 3 are not held, and 3 is needed last."""
    feed = Feed(budget_blocks=4, ahead=4, credit=4, blocks_per_epoch=8)
    feed.join("ann")
    feed.make(0, 1, 2, 3)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 1, 0, 0, 1))
    feed.join("has not asked yet", start=16, asks=False)
    feed.join("far", start=16)
    assert [i.block for i in kinds(feed.ask("far", 16), ev.DropBlock)] == []
    assert sorted(feed.core.window.blocks) == [0, 1, 2, 16]


def test_who_keeps_the_budget_is_named():
    feed = Feed(budget_blocks=2, ahead=2)
    feed.join("ann")
    feed.make(0)
    session = feed.core.consumers.by_name["ann"].session
    feed.send(ev.Ask("ann", session, 0, 0, 0, 1))
    feed.finish(1)
    feed.send(ev.Ask("ann", session, 1, 0, 0, 1))
    feed.join("bob", start=30)
    assert explain.wait(feed.core, "bob") == "the staging budget of 20 B is held by ann", "bob holds nothing"
    assert "not a consumer" in explain.wait(feed.core, "nobody")


def test_small_blocks_do_not_pass_a_large_one_that_waits_for_room():
    """The budget is 40 bytes. One consumer holds 20 and the other waits for 30, so the 20 free bytes are reserved."""
    feed = Feed(budget_blocks=4, ahead=2, credit=4, block_bytes=lambda block: 30 if block >= 40 else 10)
    feed.join("holds", asks=False)
    feed.send(ev.Ask("holds", 1, 0, 0, 0, 2))
    feed.make(1, 0, 2, 3)
    assert feed.join("waits", 40) == 40
    assert feed.tasks == {}
    assert sorted(feed.core.window.blocks) == [0, 1], "blocks 2 and 3 were dropped, which is not enough"
    assert prepared(feed.ask("waits", 40)) == [], "block 2 is not prepared for the other one either"
    assert prepared(feed.send(ev.Heartbeat("holds", 1, released=1, done=1))) == [40]


def test_of_the_blocks_ahead_the_one_makes_room_that_is_furthest_from_whoever_comes_there_next():
    """One consumer is at block 1 with 1 to 3 staged, another at 21 with 21 and 22 staged; a third waits for 40."""
    feed = Feed(budget_blocks=5, credit=8)
    feed.join("at 1")
    feed.make(0, 1, 2, 3)
    feed.send(ev.Heartbeat("at 1", 1, released=1, done=1))
    feed.join("at 21", start=20)
    feed.make(20)
    feed.send(ev.Heartbeat("at 21", 2, released=21, done=21))
    feed.make(21, 22)
    assert sorted(feed.core.window.blocks) == [1, 2, 3, 21, 22]
    feed.join("waits", start=40)
    assert sorted(feed.core.window.blocks) == [1, 2, 21, 22, 40]


@pytest.mark.timeout(20)  # a failure is an endless loop: two cohorts take each other's bytes
def test_two_who_wait_do_not_take_each_others_bytes_while_another_node_is_at_it():
    """All samples have home node a, whose only worker prepares block 0; the worker on b is idle."""
    feed = Feed(budget_blocks=2, workers=0, cut=lambda block, _: (BlockPart("a", 1),))
    feed.send(ev.WorkerUp("on a", 1, "a"))
    feed.join("ann")
    feed.send(ev.WorkerUp("on b", 2, "b"))
    for second, (name, start) in enumerate((("ben", 20), ("cid", 40)), 1):
        feed.now = second
        feed.join(name, start)
    assert sorted(feed.core.window.blocks) == [0, 20], "ben joined first"
    feed.finish(0)
    assert delivered(feed.finish(20)) == {"ben": (20,)}
    feed.send(ev.Heartbeat("ben", 2, released=21, done=21))
    assert delivered(feed.finish(40)) == {"cid": (40,)}


@pytest.mark.timeout(20)
def test_bytes_that_are_taken_back_without_end_are_an_error_and_no_standstill(monkeypatch):
    """Each block is dropped as soon as it is granted."""
    feed = Feed(workers=0, cut=lambda block, _: (BlockPart("a", 1),))
    feed.send(ev.WorkerUp("on b", 2, "b"))
    feed.send(ev.WorkerUp("on a", 1, "a"))
    feed.join("ann", asks=False)
    feed.core.tasks.workers["on a"].credit = 0
    monkeypatch.setattr(feed.core.window, "fits", lambda nbytes: True)
    grant = feed.core.window.grant

    def granted_and_dropped(number, nbytes, parts):
        block = grant(number, nbytes, parts)
        feed.core.window.drop(number, "for this test")
        return block

    monkeypatch.setattr(feed.core.window, "grant", granted_and_dropped)
    with pytest.raises(InvariantError, match="block 0 was granted more than 100 times after one event"):
        feed.ask("ann", 0)


def test_whoever_waits_for_a_block_that_is_being_made_does_not_come_before_one_whose_block_nobody_makes():
    feed = Feed()
    feed.join("first")
    feed.now = 5.0
    feed.join("second", start=20)
    assert sorted(feed.tasks) == [0]
    assert prepared(feed.send(ev.WorkerUp("w1", 1))) == [20]


def test_where_nobody_waits_the_block_is_made_that_is_needed_soonest():
    """One consumer waits for block 0; the other has all blocks up to 20 and needs 21 next."""
    feed = Feed()
    feed.join("at 21", start=20)
    feed.send(ev.WorkerLeaves("w0"))
    feed.make(20)
    feed.join("at 0", start=0)
    assert prepared(feed.send(ev.WorkerUp("w1", 1))) == [0]
    assert prepared(feed.send(ev.WorkerUp("w2", 1))) == [21]


def test_what_was_made_ahead_stays_when_a_slower_one_joins():
    """Blocks are prepared one ahead: block 1 is ready when a consumer joins at 0, and is not prepared again."""
    feed = Feed(ahead=1)
    feed.join("fast")
    feed.make(0, 1)
    assert feed.core.consumers.by_name["fast"].cursor == 1
    assert feed.join("slow", asks=False) == 0
    assert feed.core.window.is_ready(1)


def test_the_cohort_is_served_first_of_which_somebody_waits_longest():
    """Consumers have been waiting at block 0 since 0 s and 10 s, and at block 20 since 5 s."""
    feed = Feed(workers=0)
    feed.join("longest", start=0)
    feed.now = 5.0
    feed.join("elsewhere", start=20)
    feed.now = 10.0
    feed.join("beside", start=0)
    assert prepared(feed.send(ev.WorkerUp("w0", 1))) == [0]
