"""Ranks are treated as one trial when their number changes, in reservations, and when their node dies.

Epochs have 8 blocks.
"""

from __future__ import annotations

import pytest
from staging_feeds import Feed, delivered, give, kinds

from mbaas.core.staging import events as ev


def make_feed(**changed: object) -> Feed:
    return Feed(**{"blocks_per_epoch": 8, "ahead": 2, "credit": 4, "lease_s": 30.0, "patience_s": 500.0, **changed})


def come(feed: Feed, name: str, born: int, *, start: int | None = None, node: str = "") -> list[ev.Instruction]:
    """Join a rank "t[r] of n", or a trial that is one consumer."""
    feed.session += 1
    own, _, size = name.partition(" of ")
    trial, ranks = own.partition("[")[0], int(size or 1)
    return feed.send(ev.Join(own, feed.session, start, trial=trial, world_size=ranks, node=node, born=born))


def begun_by_four() -> Feed:
    """Feed with two trials in mid-epoch: one of four ranks, born at 1, and another one."""
    feed = make_feed()
    names = [f"t[{rank}]" for rank in range(4)]
    for name in names:
        assert kinds(come(feed, f"{name} of 4", 1), ev.Admitted)
    come(feed, "other", 1)
    for block in range(3):
        for name in (*names, "other"):
            give(feed, name, block)
    return feed


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_a_trial_that_comes_with_another_number_of_ranks_ends_what_is_left_of_its_last_run(size: int) -> None:
    """Otherwise the others would wait for the dead ranks until their leases end."""
    feed = begun_by_four()
    name = "t" if size == 1 else f"t[0] of {size}"
    done = come(feed, name, 2, start=8)
    assert [gone.consumer for gone in kinds(done, ev.RemoveConsumer)] == [f"t[{rank}]" for rank in range(4)]
    ranks = "one process" if size == 1 else f"{size} ranks"
    assert {gone.reason for gone in kinds(done, ev.RemoveConsumer)} == {f"trial 't' goes on with {ranks}"}
    assert kinds(done, ev.Admitted)
    assert {consumer.name for consumer in feed.core.consumers.of_trial("t")} == {name.partition(" of ")[0]}
    # No consumer delays the other trial: it waits only for prep.
    for block in range(3, 8):
        assert give(feed, "other", block) == (block,)


def test_what_is_left_of_the_last_run_cannot_come_back() -> None:
    feed = begun_by_four()
    come(feed, "t[0] of 2", 2, start=8)
    (refused,) = kinds(come(feed, "t[3] of 4", 1), ev.Refuse)
    assert refused.reason == "trial 't' was started again later, with 2 ranks"
    assert not kinds(come(feed, "t[1] of 2", 3, start=8), ev.RemoveConsumer), "ranks of one run do not end each other"


def test_of_two_runs_of_which_neither_is_younger_the_one_that_comes_goes_on() -> None:
    """Their ages are unknown then, and the earlier run may be dead."""
    feed = begun_by_four()
    assert kinds(come(feed, "t[0] of 2", 1, start=8), ev.Admitted)
    assert {consumer.name for consumer in feed.core.consumers.of_trial("t")} == {"t[0]"}


def test_two_consumers_of_other_names_do_not_end_each_other() -> None:
    feed = begun_by_four()
    assert not kinds(come(feed, "tt[0] of 2", 2), ev.RemoveConsumer)
    assert not kinds(come(feed, "u", 2), ev.RemoveConsumer)


def test_one_place_is_held_for_all_ranks_of_a_trial() -> None:
    """The number of ranks does not matter and is not announced."""
    feed = make_feed()
    come(feed, "other", 1)
    feed.send(ev.Announce("t"))
    assert [give(feed, "other", block) for block in range(3)] == [(0,), (1,), ()], "it waits for them"
    feed.wait(15.0)
    assert [kinds(come(feed, f"t[{rank}] of 3", 5), ev.Admitted)[0].cursor for rank in (2, 0, 1)] == [0, 0, 0]
    assert sorted(feed.core.consumers.by_name) == ["other", "t[0]", "t[1]", "t[2]"], "the place is taken"


def test_a_rank_begins_where_the_one_is_that_waits_for_it() -> None:
    """This holds even if another cohort could share an epoch sooner."""
    feed = make_feed(budget_blocks=40)
    come(feed, "other", 1)
    for block in range(4):
        give(feed, "other", block)
    (first,) = kinds(come(feed, "t[0] of 2", 5), ev.Admitted)
    come(feed, "third", 6, start=80)
    (second,) = kinds(come(feed, "t[1] of 2", 5), ev.Admitted)
    assert second.cursor == first.cursor


def test_a_trial_that_is_removed_is_gone_with_all_of_its_ranks_and_leaves_one_place() -> None:
    feed = begun_by_four()
    feed.send(ev.Leave("t", None, successors=1))
    assert sorted(feed.core.consumers.by_name) == ["other", "reservation 0"]
    feed.send(ev.Leave("reservation 0", None))
    assert sorted(feed.core.consumers.by_name) == ["other"]


def test_the_place_that_a_trial_leaves_is_at_the_next_epoch_of_its_slowest_rank() -> None:
    """One rank has used 9 blocks, including the first of its second epoch, and the other rank has used 7."""
    feed = make_feed(budget_blocks=40, ahead=8)
    for rank in range(2):
        come(feed, f"t[{rank}] of 2", 1)
    for rank, blocks in enumerate((10, 8)):
        for block in range(blocks):
            give(feed, f"t[{rank}]", block)
    assert [consumer.done for consumer in feed.core.consumers.of_trial("t")] == [9, 7]
    feed.send(ev.Leave("t", None, successors=1))
    assert {name: place.cursor for name, place in feed.core.consumers.by_name.items()} == {"reservation 0": 8}


def test_a_rank_that_leaves_by_itself_leaves_alone() -> None:
    feed = begun_by_four()
    feed.send(ev.Leave("t[1]", feed.core.consumers.by_name["t[1]"].session))
    assert sorted(feed.core.consumers.by_name) == ["other", "t[0]", "t[2]", "t[3]"]


def test_consumers_on_a_machine_that_is_gone_hold_up_nobody() -> None:
    """Leases of 1,000 s would detect the dead node far too late."""
    feed = make_feed(lease_s=1000.0)
    for name, node in (("there", "n1"), ("also there", "n1"), ("here", "n2"), ("anywhere", "")):
        come(feed, name, 1, node=node)
    for name in ("there", "also there", "here", "anywhere"):
        give(feed, name, 0)
    for name in ("here", "anywhere"):
        give(feed, name, 1)
        give(feed, name, 2)
        assert give(feed, name, 3) == (), "it waits for consumers at block 1"
    done = feed.send(ev.NodeDown("n1", "Ray says that it is dead"))
    gone = {removed.consumer: removed.reason for removed in kinds(done, ev.RemoveConsumer)}
    reason = "its node is gone: Ray says that it is dead"
    assert gone == {"there": reason, "also there": reason}
    feed.make(3)
    assert set(delivered(feed.ask("here", 3))) == {"here"}


def test_a_consumer_that_lives_although_its_machine_was_given_up_joins_again_where_it_was() -> None:
    feed = make_feed()
    come(feed, "cut off", 1, node="n1")
    give(feed, "cut off", 0)
    feed.send(ev.NodeDown("n1", "Ray says that it is dead"))
    feed.session += 1
    (admitted,) = kinds(feed.send(ev.Join("cut off", feed.session, 1, node="n1")), ev.Admitted)
    assert admitted.cursor == 1
