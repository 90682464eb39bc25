"""Blocks staged on a node that is about to leave are copied to other nodes and used from there.

Epochs have 8 blocks.
"""

from __future__ import annotations

from staging_feeds import Feed, delivered, give, kinds

from mbaas.core.staging import events as ev
from mbaas.core.staging.moving import MOST_AT_ONCE


def staged_on(node: str, blocks: int, *, others: tuple[str, ...] = ("b", "c")) -> Feed:
    """Feed with its first blocks on `node`; workers on `others` prepared nothing, and "me" works on block 0."""
    feed = Feed(blocks_per_epoch=8, ahead=blocks - 1, budget_blocks=16, workers=0)
    feed.send(ev.WorkerUp("old", 8, node))
    feed.join("me", asks=False)
    give(feed, "me", 0)
    feed.make(*feed.tasks)
    for other in others:
        feed.send(ev.WorkerUp(f"on {other}", 1, other))
    feed.send(ev.WorkerLeaves("old"))
    return feed


def moves(done: list[ev.Instruction]) -> list[tuple[int, str]]:
    return [(move.block, move.node) for move in kinds(done, ev.MovePart)]


def made(done: list[ev.Instruction]) -> list[int]:
    return [made.block for made in kinds(done, ev.Prepare)]


def test_what_is_needed_soonest_goes_first_and_a_few_at_a_time():
    """Block 0 is last, because "me" already has it."""
    feed = staged_on("a", 5)
    done = feed.send(ev.NodeLeaves("a"))
    assert moves(done) == [(1, "b"), (2, "c")]
    assert len(moves(done)) == MOST_AT_ONCE
    assert moves(feed.send(ev.PartMoved(1))) == [(3, "b")]
    assert moves(feed.send(ev.PartMoved(0))) == [(4, "c")]
    assert moves(feed.send(ev.PartMoved(2))) == [(0, "b")]
    assert not moves(feed.send(ev.PartMoved(3)) + feed.send(ev.PartMoved(4)))


def test_what_was_moved_is_not_made_again_when_the_machine_is_gone():
    feed = staged_on("a", 4)
    feed.send(ev.NodeLeaves("a"))
    (used,) = kinds(feed.send(ev.PartMoved(0)), ev.UsePart)
    assert (used.move, used.block, used.part) == (0, 1, 0)
    feed.send(ev.PartMoved(1))
    done = feed.send(ev.NodeDown("a", "it was reclaimed"))
    assert 1 not in made(done)
    assert 2 not in made(done)
    assert 3 in made(done), "the copy was on its way"
    assert not kinds(feed.send(ev.PartMoved(2)), ev.UsePart), "which came too late"
    assert [give(feed, "me", block) for block in range(1, 4)] == [(1,), (2,), (3,)]


def test_a_complaint_about_the_original_does_not_throw_the_copy_away():
    """A consumer received the original earlier, and now finds it unreadable."""
    feed = staged_on("a", 3)
    original = feed.core.window.blocks[1].parts[0].task
    feed.send(ev.NodeLeaves("a"))
    (used,) = kinds(feed.send(ev.PartMoved(0)), ev.UsePart)
    assert used.task != original
    assert feed.core.window.has(1, 0, used.task)
    assert not made(feed.send(ev.UnreadablePart(1, 0, original)))
    assert feed.core.window.is_ready(1)


def test_a_part_that_cannot_be_copied_stays_and_is_made_again_later():
    feed = staged_on("a", 4)
    feed.send(ev.NodeLeaves("a"))
    assert moves(feed.send(ev.PartStays(0))) == [(3, "b")], "not the same again"
    assert moves(feed.send(ev.PartMoved(1))) == [(0, "c")]
    feed.send(ev.PartMoved(2))
    feed.send(ev.PartMoved(3))
    assert not moves(feed.send(ev.Tick()))
    assert made(feed.send(ev.NodeDown("a", "gone"))) == [1]


def test_a_copy_of_what_was_dropped_or_made_again_meanwhile_is_of_no_use():
    feed = staged_on("a", 4)
    feed.send(ev.NodeLeaves("a"))
    assert made(feed.send(ev.UnreadablePart(1, 0, feed.core.window.blocks[1].parts[0].task))) == [1]
    assert not kinds(feed.send(ev.PartMoved(0)), ev.UsePart)
    feed.send(ev.Leave("me"))
    assert not feed.core.window.blocks.keys() - {1}, "they are not needed"
    assert not kinds(feed.send(ev.PartMoved(1)), ev.UsePart)


def test_nothing_moves_where_nobody_else_works():
    feed = staged_on("a", 3, others=())
    assert not moves(feed.send(ev.NodeLeaves("a")))
    assert moves(feed.send(ev.WorkerUp("new", 1, "b"))) == [(1, "b"), (2, "b")]


def test_nothing_moves_from_one_leaving_machine_to_another():
    feed = staged_on("a", 3)
    feed.send(ev.NodeLeaves("b"))
    assert {node for _, node in moves(feed.send(ev.NodeLeaves("a")))} == {"c"}


def test_a_machine_that_stays_after_all_keeps_what_lies_there():
    """A worker that comes up there proves nothing: it may have been starting when the notice arrived."""
    feed = staged_on("a", 5)
    feed.send(ev.NodeLeaves("a"))
    assert moves(feed.send(ev.WorkerUp("late", 1, "a")) + feed.send(ev.PartMoved(0))) == [(3, "b")]
    feed.send(ev.NodeStays("a"))
    assert not moves(feed.send(ev.PartMoved(1)) + feed.send(ev.PartMoved(2)))


def test_a_consumer_is_given_blocks_while_they_are_copied():
    feed = staged_on("a", 3)
    feed.send(ev.NodeLeaves("a"))
    assert delivered(feed.ask("me", 1, want=2)) == {"me": (1, 2)}


def test_a_report_that_comes_twice_changes_nothing():
    feed = staged_on("a", 3)
    feed.send(ev.NodeLeaves("a"))
    feed.send(ev.PartMoved(0))
    assert not kinds(feed.send(ev.PartMoved(0)), ev.UsePart)
    assert not kinds(feed.send(ev.PartStays(0)), ev.UsePart)
    assert not kinds(feed.send(ev.PartMoved(77)), ev.UsePart)


def test_a_part_that_could_not_be_copied_is_tried_anew_when_the_machine_is_to_go_once_more():
    feed = staged_on("a", 3)
    assert moves(feed.send(ev.NodeLeaves("a"))) == [(1, "b"), (2, "c")]
    assert moves(feed.send(ev.PartStays(0)) + feed.send(ev.PartMoved(1))) == [(0, "b")]
    feed.send(ev.PartMoved(2))
    feed.send(ev.NodeStays("a"))
    assert moves(feed.send(ev.NodeLeaves("a"))) == [(1, "c")]


def test_another_machine_that_stays_does_not_mean_that_this_one_can_be_copied_from():
    feed = staged_on("a", 3)
    feed.send(ev.NodeLeaves("a"))
    feed.send(ev.NodeLeaves("b"))
    feed.send(ev.PartStays(0))
    assert not moves(feed.send(ev.NodeStays("b")) + feed.send(ev.PartMoved(1)) + feed.send(ev.PartMoved(2)))


def test_a_machine_that_comes_back_after_it_was_gone_is_like_any_other():
    """It was cut off for a while; blocks prepared there now stay there."""
    feed = staged_on("a", 3, others=())
    feed.send(ev.NodeLeaves("a"))
    feed.send(ev.NodeDown("a", "it does not answer"))
    assert made(feed.send(ev.WorkerUp("back", 8, "a"))) == [1, 2], "block 0 is used up"
    feed.make(*feed.tasks)
    assert not moves(feed.send(ev.WorkerUp("new", 1, "b")))


def test_a_copy_on_a_machine_that_is_gone_is_of_no_use():
    """The copy arrived, but the machine was given up before that was reported."""
    feed = staged_on("a", 3)
    assert moves(feed.send(ev.NodeLeaves("a"))) == [(1, "b"), (2, "c")]
    done = feed.send(ev.NodeDown("b", "it was reclaimed, too"))
    assert moves(done) == [(1, "c")], "it is copied elsewhere"
    assert not kinds(feed.send(ev.PartMoved(0)), ev.UsePart)
    assert feed.core.window.blocks[1].parts[0].node == "a"
