"""Ranks that come in any order, leave, come again elsewhere: they always get the same plan and the same beginning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec import structs

from mbaas.core.ranks import KEPT_EPOCHS, KEPT_TRIALS, RankTable
from mbaas.messages import ConsumerName, RankOrders, RankPlan, RankReport
from mbaas.placement import NodeWeight, Placement

BLOCKS = 10
PLACEMENT = Placement(1, (NodeWeight("a", 0), NodeWeight("b", 0)), (np.inf, np.inf))
NEWER = Placement(2, (NodeWeight("b", 0),), (np.inf,))


class Feed:
    """The ranks of a feed, and the sessions that are open."""

    def __init__(self) -> None:
        self.cursors: dict[tuple[str, int], int] = {}
        self.ranks = RankTable(BLOCKS, lambda name, session: self.cursors.get((name, session)))
        self._sessions = itertools.count(1)

    def enter(self, rank: int, node: str, cursor: int = 0, *, floats=True, size=2, batch_size=8, **plans) -> RankReport:
        rank_name = ConsumerName("t", rank, size)
        name = str(rank_name)
        for key in [key for key in self.cursors if key[0] == name]:
            del self.cursors[key]
        session = next(self._sessions)
        self.cursors[name, session] = cursor
        report = RankReport(rank_name, batch_size, session, node, cursor, floats, plans.get("plans", {}))
        self.ranks.enlist(report)
        return report

    def leave(self, report: RankReport) -> None:
        del self.cursors[report.consumer, report.session]

    def ask(self, report: RankReport, epoch: int = 0, placement: Placement = PLACEMENT) -> RankOrders:
        return self.ranks.orders(report, epoch, placement, {})


@pytest.fixture
def feed() -> Feed:
    return Feed()


def test_ranks_wait_for_each_other(feed):
    first = feed.enter(1, "b", size=3)
    assert feed.ask(first).missing == (0, 2)
    second = feed.enter(0, "a", size=3)
    third = feed.enter(2, "b", size=3)
    plans = [feed.ask(report).plan for report in (third, first, second)]
    assert plans == [RankPlan(("a", "b", "b"), PLACEMENT)] * 3


def test_ranks_are_told_to_their_trials(feed):
    """Two ranks of a trial, one of another with minibatches of another size; a rank that left is nobody's."""
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    trials = feed.ranks.trials()
    assert trials == {"t[0]": first.group, "t[1]": first.group}
    feed.leave(second)
    other = feed.enter(1, "b", batch_size=6)
    assert feed.ranks.trials() == {"t[0]": first.group, "t[1]": other.group}
    assert first.group != other.group


def test_ranks_with_minibatches_of_other_sizes_do_not_meet(feed):
    """What an earlier run of the trial left does not count either, until it has ended."""
    left_over, first = feed.enter(1, "a", batch_size=32), feed.enter(0, "b", batch_size=64)
    orders = feed.ask(first)
    assert (orders.plan, orders.missing, orders.others) == (None, (1,), {1: 32})
    assert feed.ask(left_over).others == {0: 64}
    second = feed.enter(1, "a", batch_size=64)
    assert feed.ask(first).plan == feed.ask(second).plan == RankPlan(("b", "a"), PLACEMENT)


def test_only_missing_ranks_of_the_same_trial_are_told_to_have_minibatches_of_another_size(feed):
    """Of three ranks, 2 is missing; 1 is there, and once more with another size; another trial is no matter."""
    first = feed.enter(0, "a", size=3)
    feed.enter(1, "a", size=3)
    feed.enter(2, "a", size=4, batch_size=32)
    orders = feed.ask(first)
    assert (orders.missing, orders.others) == ((2,), {})
    feed.cursors["t[1]", 99] = 0
    feed.ranks.enlist(RankReport(ConsumerName("t", 1, 3), 32, 99, "a", 0, True, {}))
    assert feed.ask(first).others == {}, "rank 1 is there"
    feed.enter(2, "a", size=3, batch_size=16)
    assert feed.ask(first).others == {2: 16}


def test_an_old_session_of_a_rank_gets_no_plan(feed):
    """It would go by a node where the rank no longer is."""
    old, second = feed.enter(0, "a"), feed.enter(1, "b")
    new = feed.enter(0, "c")
    orders = feed.ask(old)
    assert (orders.plan, orders.missing, orders.others) == (None, (0,), {})
    assert feed.ask(new).plan == feed.ask(second).plan == RankPlan(("c", "b"), PLACEMENT)


def test_a_plan_holds_for_its_epoch_and_the_next_sees_the_new_placement(feed):
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    old = feed.ask(first).plan
    assert feed.ask(second, placement=NEWER).plan == old
    exact = [structs.replace(report, floats=False) for report in (first, second)]
    assert [feed.ask(report, 1, NEWER).plan for report in exact] == [RankPlan(("a", "b"), NEWER)] * 2
    assert feed.ask(exact[0], 0, NEWER).plan == old


def test_ranks_that_were_let_in_at_different_epochs_begin_at_the_later(feed):
    first, second = feed.enter(0, "a", cursor=0), feed.enter(1, "b", cursor=BLOCKS)
    assert {feed.ask(report).start for report in (first, second)} == {BLOCKS}
    exact = structs.replace(first, floats=False)
    assert feed.ask(exact, 1, NEWER).plan == RankPlan(("a", "b"), PLACEMENT), "it was fixed for the epoch that began"
    assert feed.ask(exact, 0, NEWER).plan == RankPlan(("a", "b"), NEWER), "and for no other"


def test_who_comes_after_others_began_begins_where_they_did(feed):
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    assert feed.ask(first).start == 0
    second = feed.enter(1, "b", cursor=BLOCKS)
    assert feed.ask(second).start == 0


@pytest.mark.parametrize("floats", [True, False])
def test_a_rank_that_is_done_and_gone_holds_up_no_other(feed, floats):
    first, second = feed.enter(0, "a", floats=floats), feed.enter(1, "b", floats=floats)
    plan = feed.ask(first).plan
    feed.leave(first)
    assert feed.ask(second).plan == plan
    later = structs.replace(second, floats=False)
    assert feed.ask(later, 1).missing == (0,)


@pytest.mark.parametrize("blocks", [BLOCKS, 2 * BLOCKS + 3])
def test_a_trial_that_starts_again_does_not_follow_its_dead(feed, blocks):
    """Rank 1's old session is still open, one or two epochs further on than it began."""
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    assert [feed.ask(report).start for report in (first, second)] == [0, 0]
    feed.cursors[second.consumer, second.session] = blocks
    first = feed.enter(0, "a", cursor=3 * BLOCKS)
    assert feed.ask(first).start == 3 * BLOCKS
    second = feed.enter(1, "c", cursor=4 * BLOCKS)
    assert feed.ask(second).start == 3 * BLOCKS
    assert feed.ask(first).plan == feed.ask(second).plan


def test_a_trial_is_forgotten_with_its_last_rank(feed):
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    old = feed.ask(first).plan
    assert feed.ask(second).plan == old
    feed.leave(first)
    feed.leave(second)
    assert feed.ask(second).missing == (0, 1), "its session is not open"
    assert feed.ranks.trials() == {}
    first, second = feed.enter(0, "b"), feed.enter(1, "b")
    assert feed.ask(first).plan == feed.ask(second).plan == RankPlan(("b", "b"), PLACEMENT) != old


def test_a_trial_whose_ranks_have_ended_is_told_to_nobody_and_leaves_no_plan(feed):
    """Also if nobody asked anything between."""
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    assert feed.ask(first).plan == feed.ask(second).plan
    feed.leave(first)
    assert feed.ranks.trials() == {"t[1]": second.group}
    feed.leave(second)
    first, second = feed.enter(0, "b"), feed.enter(1, "b")
    assert feed.ask(first).plan == RankPlan(("b", "b"), PLACEMENT)


@pytest.mark.parametrize("lease_ends", [False, True], ids=["it comes soon", "its dead session ends before"])
@pytest.mark.parametrize("floats", [True, False])
def test_a_rank_that_comes_when_the_others_are_done_and_gone_goes_by_their_plan(feed, floats, lease_ends):
    """A trial starts again. Rank 0 does not wait for rank 1, whose dead session is open, and ends its last epoch."""
    first, dead = (feed.enter(rank, "ab"[rank], BLOCKS, floats=floats) for rank in range(2))
    assert feed.ask(first, 1).plan == feed.ask(dead, 1).plan
    first = feed.enter(0, "c", BLOCKS, floats=floats)
    orders = feed.ask(first, 1)
    assert orders.plan is not None
    feed.leave(first)
    if lease_ends:
        feed.leave(dead)
        assert feed.ranks.trials() == {}
    second = feed.enter(1, "d", BLOCKS, floats=floats)
    assert feed.ask(second, 1) == orders
    feed.leave(second)
    assert feed.ranks.trials() == {}
    assert not feed.ranks._trials, "all have gone by it"


def test_a_rank_that_began_where_others_had_been_is_joined_there_by_those_who_come_after_all(feed):
    """Rank 1 of the run before died before it began, and rank 0 is started again long after rank 1."""
    first, dead = feed.enter(0, "a"), feed.enter(1, "b")
    assert feed.ask(first).start == 0
    feed.leave(first)
    feed.leave(dead)
    second = feed.enter(1, "b", cursor=2 * BLOCKS)
    orders = feed.ask(second)
    assert orders.start == 0
    feed.cursors[second.consumer, second.session] = BLOCKS + 3
    first = feed.enter(0, "c", cursor=3 * BLOCKS)
    assert feed.ask(first) == orders


def test_a_trial_that_is_over_is_forgotten_also_if_one_that_came_before_goes_on(feed):
    stays = feed.enter(0, "a", batch_size=4)
    ends = feed.enter(1, "a", batch_size=8)
    feed.leave(ends)
    assert feed.ranks.trials() == {"t[0]": stays.group}
    assert feed.ranks._trials.keys() == {stays.group}


def test_plans_that_some_ranks_went_by_are_kept_for_a_number_of_trials_only(feed):
    for trial in range(2 * KEPT_TRIALS):
        report = feed.enter(0, "a", floats=False, batch_size=trial + 1)
        other = feed.enter(1, "a", floats=False, batch_size=trial + 1)
        feed.ask(report)
        feed.leave(report)
        feed.leave(other)
    assert len(feed.ranks._trials) <= KEPT_TRIALS + 1
    assert report.group in feed.ranks._trials


def test_a_restarted_coordinator_learns_the_plan_from_those_that_have_it(feed):
    held = RankPlan(("a", "b"), NEWER)
    first = feed.enter(0, "a", 13, floats=False, plans={1: held})
    second = feed.enter(1, "c", 11, floats=False)
    assert [feed.ask(report, 1).plan for report in (second, first)] == [held, held]


def test_plans_of_passed_epochs_are_forgotten(feed):
    reports = [feed.enter(rank, "a", floats=False) for rank in range(2)]
    for epoch in range(20):
        for report in reports:
            feed.cursors[report.consumer, report.session] = epoch * BLOCKS
            assert feed.ask(report, epoch).plan is not None
    (trial,) = feed.ranks._trials.values()
    assert len(trial.plans) < 8
    assert trial.given.keys() == trial.plans.keys()


def test_plans_are_kept_for_some_epochs_behind_the_slowest_rank(feed):
    """The ranks are in epochs 7 and 9: the plan of epoch 3 is kept, and the one of epoch 2 is not."""
    slow, fast = (feed.enter(rank, "a", floats=False) for rank in range(2))
    for epoch in range(10):
        feed.ask(slow, epoch)
    feed.cursors[slow.consumer, slow.session] = 7 * BLOCKS
    feed.cursors[fast.consumer, fast.session] = 9 * BLOCKS
    feed.ask(slow, 9)
    placements = {epoch: feed.ask(slow, epoch, NEWER).plan.placement for epoch in (7 - KEPT_EPOCHS, 6 - KEPT_EPOCHS)}
    assert placements == {7 - KEPT_EPOCHS: PLACEMENT, 6 - KEPT_EPOCHS: NEWER}
