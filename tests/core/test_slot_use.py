"""Blocks are stored in slots only if the whole feed is on one node, and only until slots prove unreliable."""

from __future__ import annotations

import random

from mbaas.core.staging.rooms import MOST_LOST, SPARE_SLOTS, SlotUse


def test_slots_are_for_feeds_all_of_whose_workers_and_consumers_run_beside_the_coordinator() -> None:
    use = SlotUse("a")
    assert use.most(["a", "a"], {"a"}, 10) == 5 + SPARE_SLOTS
    assert use.most(["a", "a", "a"], {"a"}, 10) == 3 + SPARE_SLOTS
    elsewhere = [("a", ""), ("ab", "a"), ("a", "ab"), ("b", "b"), ("", "a"), ("", "")]
    for workers, consumers in elsewhere:  # each letter is a node
        assert use.most(workers, consumers, 10) == 0
    assert use.most(["a"], {"a"}, 10) == 10 + SPARE_SLOTS, "they are used again once other ranks have left"


def test_slots_are_given_up_when_too_many_are_lost_one_after_the_other_and_that_is_told_once() -> None:
    """Blocks stored as objects in between do not count."""
    choose = random.Random(0)
    for _ in range(200):
        use, lost, told, is_over = SlotUse("a"), 0, 0, False
        for _ in range(40):
            if choose.random() < 0.3:
                use.held()
                lost = 0
            else:
                told += use.lost()
                lost += 1
            is_over = is_over or lost > MOST_LOST
            assert told == is_over
            assert (use.most(["a"], {"a"}, 10) == 0) == is_over


def test_slots_that_a_consumer_cannot_read_are_given_up_at_once() -> None:
    use = SlotUse("a")
    assert use.give_up()
    assert not use.give_up()
    assert not use.lost()
    use.held()
    assert use.most(["a"], {"a"}, 10) == 0
