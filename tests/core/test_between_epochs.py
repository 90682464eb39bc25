"""A consumer that finished an epoch and requests nothing delays no other, and continues where others are.

Epochs have 8 blocks.
"""

from __future__ import annotations

import pytest
from staging_feeds import Feed, delivered, give, kinds

from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import REST_AFTER_S
from mbaas.core.staging.transitions import ConsumerState
from mbaas.samples.order import ASIDE, OwnEpoch, Shuffle


def feed_of_two(**changed: object) -> Feed:
    """Feed whose consumers "rests" and "goes on" have received the first epoch; two blocks are prepared ahead."""
    options = {"blocks_per_epoch": 8, "ahead": 2, "credit": 4, "lease_s": 1000.0, "patience_s": 500.0}
    feed = Feed(**{**options, **changed})
    feed.join("rests", asks=False)
    feed.join("goes on", asks=False)
    for block in range(8):
        give(feed, "rests", block)
        give(feed, "goes on", block)
    return feed


def state(feed: Feed, name: str) -> ConsumerState:
    return feed.core.consumers.by_name[name].state


def test_who_ended_an_epoch_and_does_not_ask_holds_up_nobody() -> None:
    feed = feed_of_two()
    assert [give(feed, "goes on", block) for block in (8, 9)] == [(8,), (9,)]
    assert give(feed, "goes on", 10) == (), "its position is kept for a moment"
    feed.wait(REST_AFTER_S)
    assert state(feed, "rests") is ConsumerState.RESTING
    given = delivered(feed.finish(10))
    assert given == {"goes on": (10,)}
    assert [give(feed, "goes on", block) for block in range(11, 40)] == [(block,) for block in range(11, 40)]


def test_it_begins_its_next_epoch_with_the_others_as_long_as_that_is_kept() -> None:
    feed = feed_of_two()
    give(feed, "goes on", 8)
    feed.wait(REST_AFTER_S)
    assert feed.core.window.is_ready(8), "while memory lasts, it is kept for consumers that begin there"
    assert delivered(feed.ask("rests", 8, began=8)) == {"rests": (8,)}
    assert feed.core.consumers.by_name["rests"].own_epoch == OwnEpoch(8, 16)


def test_its_place_is_kept_as_long_as_there_is_room() -> None:
    """This also holds when other consumers are past its resting epoch."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=40, lease_s=1000.0)
    feed.join("unread", asks=False)
    feed.join("goes on", asks=False)
    for block in range(12):
        give(feed, "goes on", block)
        feed.wait(REST_AFTER_S)
    feed.send(ev.Leave("goes on"))
    assert delivered(feed.ask("unread", 0, want=4, began=0)) == {"unread": (0, 1, 2, 3)}
    for block in range(4, 12):
        assert delivered(feed.ask("unread", block)) == {"unread": (block,)}, "nothing is prepared again"


def test_where_others_are_far_ahead_it_does_not_hold_them_up_although_there_is_room() -> None:
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=40, lease_s=1000.0)
    feed.join("unread", asks=False)
    feed.join("goes on", asks=False)
    feed.wait(REST_AFTER_S)
    for block in range(5):
        give(feed, "goes on", block)
    (begin,) = delivered(feed.ask("unread", 0, began=0))["unread"]
    assert begin >= 3
    assert give(feed, "goes on", 5) == (5,)


def test_a_rank_whose_others_are_far_ahead_goes_on_apart_from_them_with_what_is_there() -> None:
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=40, lease_s=1000.0)
    for number, name in enumerate(("rank", "goes on"), 1):
        feed.session = number
        feed.send(ev.Join(name, number, trial="t" if name == "rank" else None))
    for block in range(8):
        for name in ("rank", "goes on"):
            give(feed, name, block)
    feed.wait(REST_AFTER_S)
    for block in range(8, 14):
        give(feed, "goes on", block)
    assert delivered(feed.ask("rank", 8, began=8)) == {"rank": (8,)}, "it was kept"
    assert give(feed, "goes on", 14) == (14,)
    assert len(feed.core.consumers.cohorts) == 2


def test_later_it_begins_at_once_where_the_others_are() -> None:
    """The next epoch is shuffled so that the consumer gets each sample once."""
    feed = feed_of_two(budget_blocks=4)
    feed.wait(REST_AFTER_S)
    for block in range(8, 13):
        give(feed, "goes on", block)
    (begin,) = delivered(feed.ask("rests", 8, began=8))["rests"]
    assert 11 <= begin <= 13
    assert feed.core.consumers.by_name["rests"].own_epoch == OwnEpoch(begin, begin + 8, 3 + begin - 11)
    assert len(feed.core.consumers.cohorts) == 1
    for block in range(begin + 1, begin + 8):
        assert give(feed, "rests", block) == (block,)
        give(feed, "goes on", block)
    assert feed.core.epochs.shuffle_of(16) == Shuffle(2, (begin - 8,), Shuffle(1))


def test_what_it_looks_at_stays_while_it_rests() -> None:
    """It holds block 7. If that block were dropped, its bytes would be granted twice."""
    feed = feed_of_two(budget_blocks=4)
    feed.wait(REST_AFTER_S)
    for block in range(8, 15):
        assert give(feed, "goes on", block) == (block,)
        assert 7 in feed.core.window.blocks
    session = feed.core.consumers.by_name["rests"].session
    assert ev.DropBlock(7) in feed.send(ev.Heartbeat("rests", session, released=8, done=8))


def test_whoever_rests_and_holds_blocks_leaves_room_for_those_who_go_on() -> None:
    """The budget is three blocks and the resting consumer holds one, so blocks are delivered for copying."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=3, lease_s=1000.0)
    feed.join("rests", asks=False)
    for block in range(8):
        give(feed, "rests", block)
    feed.join("goes on", 8, asks=False)
    feed.wait(REST_AFTER_S)
    session = feed.core.consumers.by_name["goes on"].session
    for block in range(8, 15):
        done = feed.send(ev.Ask("goes on", session, block, block - 1, block - 1))
        while not delivered(done):
            done = feed.finish(min(feed.tasks))
        assert kinds(done, ev.Deliver)[0].as_copy


def test_when_all_rest_prep_goes_on_where_the_furthest_of_them_is() -> None:
    feed = feed_of_two(budget_blocks=4)
    feed.wait(REST_AFTER_S)
    for block in range(8, 16):
        give(feed, "goes on", block)
    feed.wait(REST_AFTER_S)
    assert state(feed, "goes on") is ConsumerState.RESTING
    while feed.tasks:
        feed.finish(min(feed.tasks))
    assert sorted(feed.core.window.blocks) == [7, 15, 16, 17]
    assert delivered(feed.ask("rests", 8, began=8)) == {"rests": (16,)}
    assert feed.join("new", asks=False) == 16


def come_back(feed: Feed, name: str, block: int) -> int:
    """Join a consumer whose last epoch ended at a block under an earlier coordinator; return its cursor."""
    feed.session += 1
    (admitted,) = kinds(feed.send(ev.Join(name, feed.session, block, now=True)), ev.Admitted)
    return admitted.cursor


def test_who_comes_back_to_a_restarted_coordinator_between_its_epochs_begins_where_the_others_are() -> None:
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=40, lease_s=1000.0)
    feed.join("goes on", 8, asks=False)
    for block in range(8, 10):
        give(feed, "goes on", block)
    assert come_back(feed, "near", 8) == 8, "the others' lead is no larger than prep's may be"
    feed.send(ev.Leave("near"))
    for block in range(10, 14):
        give(feed, "goes on", block)
    assert 12 <= come_back(feed, "far behind", 8) <= 14
    assert come_back(feed, "far ahead", 40) == 40
    assert come_back(feed, "alone", 48) == 48


def test_who_works_for_longer_on_its_blocks_than_others_is_not_taken_to_rest() -> None:
    """Its blocks take 3 s each, so at the end of its epoch it counts as resting only after 2 x 3 s."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, lease_s=1000.0, patience_s=500.0)
    feed.join("slow", asks=False)
    for block in range(8):
        give(feed, "slow", block)
        feed.now += 3.0
    feed.wait(2.9)
    assert state(feed, "slow") is ConsumerState.BUSY
    feed.wait(0.2)
    assert state(feed, "slow") is ConsumerState.RESTING


def test_what_lay_between_two_epochs_says_nothing_of_how_long_it_works() -> None:
    feed = feed_of_two()
    feed.now += 60.0
    give(feed, "goes on", 8)
    assert feed.core.consumers.by_name["goes on"].longest_s == 0.0


def test_a_call_of_one_that_rests_may_end_later_and_still_be_explained() -> None:
    """The consumer gave up the call, which the service keeps until the call's timeout."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, lease_s=1000.0)
    feed.join("a")
    feed.send(ev.HandBack("a", 1, 0, 0))
    feed.finish(0)
    feed.finish(1)
    feed.wait(REST_AFTER_S)
    assert state(feed, "a") is ConsumerState.RESTING
    assert explain.wait(feed.core, "a")


def test_who_stands_still_in_the_middle_of_an_epoch_does_not_rest() -> None:
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, lease_s=1000.0)
    feed.join("a", asks=False)
    give(feed, "a", 0)
    feed.wait(100.0)
    assert state(feed, "a") is ConsumerState.BUSY


def test_a_loader_that_nobody_reads_holds_up_nobody() -> None:
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=4, lease_s=1000.0)
    feed.join("unread", asks=False)
    feed.join("a", asks=False)
    feed.wait(REST_AFTER_S)
    assert [give(feed, "a", block) for block in range(20)] == [(block,) for block in range(20)]


def test_who_named_its_block_keeps_it_until_it_asks() -> None:
    """Its position may be inside that block; another block would not contain its samples."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, lease_s=1000.0)
    feed.join("restored", start=8, asks=False)
    feed.wait(100.0)
    assert state(feed, "restored") is ConsumerState.BUSY


def test_a_rank_goes_on_at_its_own_block() -> None:
    """All ranks of a trial must be in the same epoch, so they continue together in a separate cohort."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=8, lease_s=1000.0)
    for number, name in enumerate(("t[0]", "t[1]", "goes on"), 1):
        feed.session = number
        feed.send(ev.Join(name, number, trial=None if name == "goes on" else "t"))
    for block in range(8):
        for name in ("t[0]", "t[1]", "goes on"):
            give(feed, name, block)
    feed.wait(REST_AFTER_S)
    for block in range(8, 20):
        give(feed, "goes on", block)
    assert give(feed, "t[0]", 8) == (8,)
    assert give(feed, "t[1]", 8) == (8,)
    members = feed.core.consumers.by_name
    assert members["t[0]"].cohort == members["t[1]"].cohort != members["goes on"].cohort


def test_who_rests_and_asks_for_an_older_block_again_gets_it() -> None:
    """A part of its last block could not be read, and the others are far ahead by then."""
    feed = feed_of_two(budget_blocks=4)
    feed.wait(REST_AFTER_S)
    for block in range(8, 14):
        give(feed, "goes on", block)
    session = feed.core.consumers.by_name["rests"].session
    feed.send(ev.Ask("rests", session, 7, 7, 7, began=0))
    feed.finish(7) if 7 in feed.tasks else None
    assert feed.core.consumers.by_name["rests"].cursor == 8
    assert feed.core.consumers.by_name["rests"].own_epoch == OwnEpoch(0, 8)


def ranks_in_mid_epoch(*others: str) -> Feed:
    """Feed whose two ranks of trial "t", and `others`, have received 20 blocks (two and a half epochs)."""
    feed = Feed(blocks_per_epoch=8, ahead=2, credit=4, budget_blocks=40, lease_s=1000.0)
    names = ("t[0]", "t[1]", *others)
    for number, name in enumerate(names, 1):
        feed.session = number
        feed.send(ev.Join(name, number, trial=None if name in others else "t"))
    for block in range(20):
        for name in names:
            give(feed, name, block)
    return feed


def restore(feed: Feed, rank: str) -> int:
    """Join a rank restored from a state between the first and the second epoch; return its cursor."""
    feed.session += 1
    (admitted,) = kinds(feed.send(ev.Join(rank, feed.session, 8, flexible=True, trial="t")), ev.Admitted)
    return admitted.cursor


@pytest.mark.parametrize("ranks", [("t[0]", "t[1]"), ("t[1]", "t[0]")])
def test_ranks_that_are_restored_do_not_follow_their_own_past(ranks: tuple[str, str]) -> None:
    """The past run ended in mid-epoch with open leases. Alone, the ranks continue at their state's position."""
    feed = ranks_in_mid_epoch()
    assert [restore(feed, rank) for rank in ranks] == [8, 8]
    assert [give(feed, rank, 8) for rank in ranks] == [(8,), (8,)]


def test_ranks_that_are_restored_begin_an_epoch_with_others_who_are_there() -> None:
    """Their past run is ignored here, too."""
    feed = ranks_in_mid_epoch("other")
    assert [restore(feed, rank) for rank in ("t[0]", "t[1]")] == [16, 16], "the other trial is there, so it is kept"


def test_a_rank_that_is_restored_begins_with_the_one_that_waits_for_it() -> None:
    """The trial with which the waiting rank was to share the epoch has left in the meantime."""
    feed = ranks_in_mid_epoch("other")
    first = restore(feed, "t[0]")
    feed.send(ev.Leave("other"))
    assert (first, restore(feed, "t[1]")) == (16, 16)


def test_a_trial_that_was_one_consumer_and_comes_as_ranks_does_not_follow_its_own_past() -> None:
    feed = feed_of_two()
    for block in range(8, 20):
        for name in ("rests", "goes on"):
            give(feed, name, block)
    feed.send(ev.Leave("goes on"))
    feed.session += 1
    done = feed.send(ev.Join("rests[0]", feed.session, 8, flexible=True, trial="rests"))
    assert [admitted.cursor for admitted in kinds(done, ev.Admitted)] == [8]


def two_answers(at: int) -> tuple[Feed, int, int]:
    """Feed whose consumer "rests" got two answers while the other was near block `at`, and the start in each answer."""
    feed = feed_of_two(budget_blocks=4)
    feed.wait(REST_AFTER_S)
    for block in range(8, at):
        give(feed, "goes on", block)
    session = feed.core.consumers.by_name["rests"].session
    (first,) = delivered(feed.send(ev.Ask("rests", session, 8, 8, 8, number=90, began=8)))["rests"]
    for block in range(at, at + 2):
        give(feed, "goes on", block)
    (second,) = delivered(feed.send(ev.Ask("rests", session, 8, 8, 8, number=90, began=8)))["rests"]
    assert second > first
    return feed, first, second


def test_of_two_answers_the_one_counts_that_the_consumer_took() -> None:
    """The consumer reports where its own epoch began, so the next epoch is cut there."""
    feed, first, _ = two_answers(12)
    session = feed.core.consumers.by_name["rests"].session
    feed.send(ev.Ask("rests", session, first + 1, first + 1, first + 1, number=91, began=first))
    assert feed.core.consumers.by_name["rests"].own_epoch == OwnEpoch(first, first + 8, first % 8)


def test_if_the_next_epoch_is_cut_for_the_other_answer_already_it_goes_on_alone() -> None:
    """Otherwise it would get some samples twice. Its loader rejoins silently, with the samples that it lacks."""
    feed, first, second = two_answers(13)
    assert feed.core.epochs.shuffle_of(16).cuts == (second % 8,)
    session = feed.core.consumers.by_name["rests"].session
    done = feed.send(ev.Ask("rests", session, first + 1, first + 1, first + 1, number=91, began=first))
    assert [refusal.consumer for refusal in kinds(done, ev.Refuse)] == ["rests"]
    assert "rests" not in feed.core.consumers.by_name
    assert feed.core.next_epoch < ASIDE


@pytest.mark.parametrize("began", [9, 100, 2**61])
def test_an_epoch_of_its_own_that_cannot_hold_the_block_is_refused(began: int) -> None:
    feed = feed_of_two()
    (refused,) = kinds(feed.ask("rests", 8, began=began), ev.Refuse)
    assert refused.reason == f"it asked for block 8 in an epoch of its own that began with block {began}"
    assert "rests" in feed.core.consumers.by_name
