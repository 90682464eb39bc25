"""Ranks that join in any order, leave, and return elsewhere always get the same plan and the same start."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

from mbaas.core.ranks import KEPT_EPOCHS, KEPT_TRIALS, RankTable
from mbaas.errors import StateError
from mbaas.samples.order import Shuffle
from mbaas.samples.placement import NodeWeight, Placement
from mbaas.wire.consumers import ConsumerName
from mbaas.wire.ranks import RankOrders, RankPlan, RankReport

BLOCKS = 10
PLACEMENT = Placement(1, (NodeWeight("a", 0), NodeWeight("b", 0)), (np.inf, np.inf))
NEWER = Placement(2, (NodeWeight("b", 0),), (np.inf,))


class Feed:
    """Ranks of a feed and their open sessions."""

    def __init__(self, written=()) -> None:
        self.cursors: dict[tuple[str, int], int] = {}
        self.done: dict[tuple[str, int], int] = {}
        self.leases: dict[tuple[str, int], float] = defaultdict(float)
        self.ranks = RankTable(BLOCKS, self._session_of, written)
        self._sessions = itertools.count(1)

    def _session_of(self, name: str, session: int) -> SimpleNamespace | None:
        cursor = self.cursors.get((name, session))
        if cursor is None:
            return None
        done = self.done.get((name, session), cursor)
        return SimpleNamespace(cursor=cursor, done=done, deadline=self.leases[name, session])

    def enter(
        self, rank: int, node: str, cursor: int = 0, *, floats=True, size=2, batch_size=8, aside=0, due=None
    ) -> RankReport:
        rank_name = ConsumerName("t", rank, size)
        name = str(rank_name)
        for key in [key for key in self.cursors if key[0] == name]:
            del self.cursors[key]
        session = next(self._sessions)
        self.cursors[name, session] = cursor
        report = RankReport(rank_name, batch_size, session, node, cursor, floats, aside, due)
        self.ranks.enlist(report)
        return report

    def leave(self, report: RankReport) -> None:
        del self.cursors[report.consumer, report.session]

    def ask(self, report: RankReport, epoch: int = 0, placement: Placement = PLACEMENT, shuffle=None) -> RankOrders:
        return self.ranks.orders(report, epoch, placement, {}, shuffle)


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
    """Two ranks belong to one trial; then rank 1 leaves and rejoins with another minibatch size."""
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    trials = feed.ranks.trials()
    assert trials == {"t[0]": first.group, "t[1]": first.group}
    feed.leave(second)
    other = feed.enter(1, "b", batch_size=6)
    assert feed.ranks.trials() == {"t[0]": first.group, "t[1]": other.group}
    assert first.group != other.group


def test_ranks_with_minibatches_of_other_sizes_do_not_meet(feed):
    """Rank 1 of an earlier run, with another size, is still present at first; it does not count."""
    left_over, first = feed.enter(1, "a", batch_size=32), feed.enter(0, "b", batch_size=64)
    orders = feed.ask(first)
    assert (orders.plan, orders.missing, orders.others) == (None, (1,), {1: "batch_size 32"})
    assert feed.ask(left_over).others == {0: "batch_size 64"}
    second = feed.enter(1, "a", batch_size=64)
    assert feed.ask(first).plan == feed.ask(second).plan == RankPlan(("b", "a"), PLACEMENT)


def test_only_missing_ranks_of_the_same_trial_are_told_to_have_minibatches_of_another_size(feed):
    """Rank 2 of three is missing. Rank 1 is present, and also with another size; another world size does not matter."""
    first = feed.enter(0, "a", size=3)
    feed.enter(1, "a", size=3)
    feed.enter(2, "a", size=4, batch_size=32)
    orders = feed.ask(first)
    assert (orders.missing, orders.others) == ((2,), {})
    feed.cursors["t[1]", 99] = 0
    feed.ranks.enlist(RankReport(ConsumerName("t", 1, 3), 32, 99, "a", 0, True))
    assert feed.ask(first).others == {}, "rank 1 is there"
    feed.enter(2, "a", size=3, batch_size=16)
    assert feed.ask(first).others == {2: "batch_size 16"}


def test_an_old_session_of_a_rank_gets_no_plan(feed):
    """It would follow a plan with a node where the rank no longer runs."""
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
    assert feed.ask(exact, 2, NEWER).plan == RankPlan(("a", "b"), NEWER), "and for no other"


def test_a_rank_begins_with_an_epoch_even_if_a_sister_resumes_in_the_middle_of_one(feed):
    first, sister = feed.enter(0, "a"), feed.enter(1, "b", BLOCKS + 3, floats=False)
    assert feed.ask(first).start == 0
    assert feed.ask(sister, 1).start == BLOCKS + 3


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
    """Rank 1's old session is still open, one or two epochs after its start."""
    first, second = feed.enter(0, "a"), feed.enter(1, "b")
    assert [feed.ask(report).start for report in (first, second)] == [0, 0]
    feed.cursors[second.consumer, second.session] = blocks
    first = feed.enter(0, "a", cursor=3 * BLOCKS)
    assert feed.ask(first).start == 3 * BLOCKS
    second = feed.enter(1, "c", cursor=4 * BLOCKS)
    assert feed.ask(second).start == 3 * BLOCKS
    assert feed.ask(first).plan == feed.ask(second).plan


def test_a_trial_whose_ranks_have_all_ended_is_told_to_nobody_and_finds_its_plan_when_it_comes_back(feed):
    """One rank may have advanced further in the epoch than another; a new plan would give it other samples."""
    first, second = feed.enter(0, "a", 3, floats=False), feed.enter(1, "b", 5, floats=False)
    plan = feed.ask(first).plan
    feed.leave(first)
    assert feed.ranks.trials() == {"t[1]": second.group}
    feed.leave(second)
    assert feed.ask(second).missing == (0, 1), "its session is not open"
    assert feed.ranks.trials() == {}
    first, second = feed.enter(0, "b", 3, floats=False), feed.enter(1, "b", 5, floats=False)
    assert feed.ask(first).plan == feed.ask(second).plan == plan
    assert feed.ask(first, 1).plan == RankPlan(("b", "b"), PLACEMENT)


@pytest.mark.parametrize("lease_ends", [False, True], ids=["it comes soon", "its dead session ends before"])
@pytest.mark.parametrize("floats", [True, False])
def test_a_rank_that_comes_when_the_others_are_done_and_gone_goes_by_their_plan(feed, floats, lease_ends):
    """The trial restarts. Rank 0 does not wait for rank 1, whose dead session is open, and finishes its last epoch."""
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


def test_a_rank_that_began_where_others_had_been_is_joined_there_by_those_who_come_after_all(feed):
    """Rank 1 of the previous run died before it began, and rank 0 restarts long after rank 1."""
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


def test_plans_that_some_ranks_went_by_are_kept_for_a_number_of_trials_only(feed):
    for trial in range(2 * KEPT_TRIALS):
        report = feed.enter(0, "a", floats=False, batch_size=trial + 1)
        other = feed.enter(1, "a", floats=False, batch_size=trial + 1)
        feed.ask(report)
        feed.leave(report)
        feed.leave(other)
    assert len(feed.ranks._trials) <= KEPT_TRIALS + 1
    assert report.group in feed.ranks._trials


# ---- ranks that return between two epochs ----


def begun(feed: Feed, epochs: int) -> list[RankReport]:
    """Reports of two ranks that both began with epoch 1; rank 1 is in the middle of epoch `epochs`."""
    reports = [feed.enter(rank, "ab"[rank], BLOCKS) for rank in range(2)]
    assert [feed.ask(report).start for report in reports] == [BLOCKS, BLOCKS]
    for epoch in range(1, epochs):
        for report in reports:
            feed.cursors[report.consumer, report.session] = epoch * BLOCKS
            feed.ask(structs.replace(report, floats=False), epoch)
    feed.cursors[reports[1].consumer, reports[1].session] = epochs * BLOCKS + 3
    feed.ask(structs.replace(reports[1], floats=False), epochs)
    return reports


def test_a_rank_that_comes_back_between_two_epochs_goes_on_where_its_sister_did(feed):
    """The feed would let it begin elsewhere, but its share of epoch 2 belongs to no other rank."""
    _, sister = begun(feed, 2)
    back = feed.enter(0, "c", 3 * BLOCKS, due=2 * BLOCKS)
    orders = feed.ask(back, 3)
    assert (orders.plan, orders.missing) == (None, (1,)), "it did not answers sister since: it may be dead"
    feed.leases[sister.consumer, sister.session] += 1.0
    orders = feed.ask(back, 3)
    assert (orders.start, orders.plan) == (2 * BLOCKS, RankPlan(("a", "b"), PLACEMENT))


def test_ranks_that_all_come_back_between_two_epochs_begin_where_others_do(feed):
    """Rank 1's session stays open for a while after its death."""
    begun(feed, 2)
    first = feed.enter(0, "c", 3 * BLOCKS, due=2 * BLOCKS)
    assert feed.ask(first, 3).plan is None
    second = feed.enter(1, "c", 4 * BLOCKS, due=2 * BLOCKS)
    assert [feed.ask(report, 3).start for report in (first, second)] == [4 * BLOCKS] * 2


def test_a_rank_that_comes_back_between_two_epochs_goes_on_where_its_sister_waits_for_it(feed):
    first, sister = begun(feed, 2)
    feed.leave(first)
    feed.cursors[sister.consumer, sister.session] = 3 * BLOCKS
    exact = structs.replace(sister, floats=False)
    assert feed.ask(exact, 3).missing == (0,)
    back = feed.enter(0, "c", 4 * BLOCKS, due=3 * BLOCKS)
    feed.leases[sister.consumer, sister.session] += 1.0
    assert feed.ask(back, 4).start == 3 * BLOCKS
    assert feed.ask(exact, 3).plan == feed.ask(back, 4).plan


def test_a_rank_that_comes_back_ahead_of_its_sister_goes_on_with_its_own_next_epoch(feed):
    _, sister = begun(feed, 2)
    back = feed.enter(0, "c", 5 * BLOCKS, due=4 * BLOCKS)
    feed.leases[sister.consumer, sister.session] += 1.0
    assert feed.ask(back, 5).start == 4 * BLOCKS


def test_a_sister_that_died_before_another_came_back_does_not_count_as_alive(feed):
    """Her last heartbeat was after all ranks were last looked at, but before rank 0 returned."""
    _, sister = begun(feed, 2)
    feed.leases[sister.consumer, sister.session] += 1.0
    back = feed.enter(0, "c", 3 * BLOCKS, due=2 * BLOCKS)
    assert (feed.ask(back, 3).plan, feed.ask(back, 3).missing) == (None, (1,))


def test_a_sister_that_returns_late_takes_her_share_of_an_epoch_that_was_begun_without_her(feed):
    """Rank 0 is already in the next epoch, but nobody else reads rank 1's part of epoch 2."""
    _, sister = begun(feed, 2)
    back = feed.enter(0, "c", 3 * BLOCKS, due=2 * BLOCKS)
    feed.leases[sister.consumer, sister.session] += 1.0
    assert feed.ask(back, 3).start == 2 * BLOCKS
    feed.cursors[back.consumer, back.session] = 3 * BLOCKS + 1
    late = feed.enter(1, "d", 5 * BLOCKS)
    assert feed.ask(late, 5).start == 2 * BLOCKS


# ---- ranks that return alone ----


@pytest.mark.parametrize("had_it", [(0, 1), (0,)], ids=["both had it", "it alone had it"])
def test_a_rank_that_returns_alone_to_an_epoch_that_it_had_waits_for_the_others(feed, had_it):
    """All ranks have left: the run starts again, and its ranks may be let in at a later epoch."""
    reports = [feed.enter(rank, "ab"[rank]) for rank in range(2)]
    for rank in had_it:
        assert feed.ask(reports[rank]).start == 0
    for report in reports:
        feed.leave(report)
    back = feed.enter(0, "a", 2 * BLOCKS)
    orders = feed.ask(back, 2)
    assert (orders.plan, orders.missing) == (None, (1,))


def test_an_epoch_that_a_rank_began_again_is_owed_to_the_others_again(feed):
    """Rank 0 returns, begins where rank 1 did, and is done before rank 1 returns."""
    for report in [feed.enter(rank, "ab"[rank]) for rank in range(2)]:
        assert feed.ask(report).start == 0
    back = feed.enter(0, "c", 2 * BLOCKS)
    orders = feed.ask(back, 2)
    assert orders.start == 0
    feed.leave(back)
    assert feed.ask(feed.enter(1, "d", 3 * BLOCKS), 3) == orders


def test_a_rank_that_began_with_the_others_is_ahead_like_one_that_named_its_block(feed):
    slow, fast = (feed.enter(rank, "ab"[rank]) for rank in range(2))
    for report in (slow, fast):
        assert feed.ask(report).start == 0
    feed.cursors[fast.consumer, fast.session] = 4 * BLOCKS + 1
    assert feed.ask(structs.replace(slow, floats=False), 2).ahead == (1,)


# ---- persisted plans and lost plans ----


def test_a_restarted_coordinator_knows_the_plans_that_were_written_down():
    """Rank 1 is two epochs ahead, and rank 0 returns on another node."""
    before = Feed()
    slow, fast = (before.enter(rank, "ab"[rank], floats=False) for rank in range(2))
    assert before.ranks.to_write() == [], "no plan has been handed out"
    plans = [before.ask(fast, epoch).plan for epoch in range(3)]
    before.cursors[fast.consumer, fast.session] = 2 * BLOCKS + 1
    assert before.ask(slow).plan == plans[0]
    written = before.ranks.to_write()
    assert [kept.plans for kept in written] == [dict(enumerate(plans))]
    assert before.ranks.to_write() == []
    before.ranks.write_again(written)
    assert before.ranks.to_write() == written, "it could not be written down at first"

    after = Feed(written)
    slow, fast = after.enter(0, "c", 5, floats=False), after.enter(1, "b", 2 * BLOCKS + 1, floats=False)
    assert [after.ask(slow, epoch, NEWER).plan for epoch in range(3)] == plans
    assert after.ask(fast, 3, NEWER).plan == RankPlan(("c", "b"), NEWER)


def test_the_plans_of_epochs_in_which_a_rank_died_are_kept_until_it_is_through_them(feed):
    """The rank may return long after its session has ended, while the other rank is far ahead."""
    dies, stays = feed.enter(0, "a", BLOCKS, floats=False), feed.enter(1, "b", BLOCKS, floats=False)
    for epoch in range(1, 2 * KEPT_EPOCHS):
        feed.cursors[stays.consumer, stays.session] = epoch * BLOCKS
        plan = feed.ask(stays, epoch).plan
    feed.leave(dies)
    feed.ask(stays, 2 * KEPT_EPOCHS)
    back = feed.enter(0, "c", BLOCKS + 3, floats=False)
    assert [feed.ask(back, epoch, NEWER).plan for epoch in range(1, 2 * KEPT_EPOCHS)] == [plan] * (2 * KEPT_EPOCHS - 1)


def test_a_rank_that_joins_first_and_loads_its_state_later_finds_its_plan(feed):
    """Its first session is where others are, many epochs ahead of its state, and gets no plan there."""
    slow, fast = (feed.enter(rank, "ab"[rank], BLOCKS, floats=False) for rank in range(2))
    plan = feed.ask(fast, 1).plan
    for epoch in range(2, 3 * KEPT_EPOCHS):
        feed.cursors[fast.consumer, fast.session] = epoch * BLOCKS + 1
        feed.ask(fast, epoch)
    feed.leave(slow)
    feed.enter(0, "c", 3 * KEPT_EPOCHS * BLOCKS)
    assert feed.ask(fast, 3 * KEPT_EPOCHS).plan == RankPlan(("c", "b"), PLACEMENT)
    loaded = feed.enter(0, "c", BLOCKS + 3, floats=False)
    assert feed.ask(loaded, 1, NEWER).plan == plan


def test_a_sister_that_has_not_loaded_her_state_yet_does_not_count_as_behind(feed):
    """The plan of epoch 2 is lost, and rank 1, which was in epoch 4, joins anew where rank 0 waits."""
    slow, fast = feed.enter(0, "a", 2 * BLOCKS + 3, floats=False), feed.enter(1, "b", 4 * BLOCKS, floats=False)
    feed.ask(fast, 4)
    feed.leave(fast)
    feed.enter(1, "b", 2 * BLOCKS + 3)
    assert (feed.ask(slow, 2).plan, feed.ask(slow, 2).ahead) == (None, (1,))
    feed.enter(1, "b", 2 * BLOCKS + 1, floats=False)
    assert feed.ask(slow, 2).plan == RankPlan(("a", "b"), PLACEMENT), "both begin anew there"


def test_no_plan_is_forgotten_before_each_rank_had_one(feed):
    fast, slow = feed.enter(1, "b", floats=False), feed.enter(0, "a")
    plan = feed.ask(fast, 0).plan
    for epoch in range(1, 3 * KEPT_EPOCHS):
        feed.cursors[fast.consumer, fast.session] = epoch * BLOCKS + 1
        feed.ask(fast, epoch, NEWER)
    assert feed.ask(slow, 0, NEWER).plan == plan


def test_an_epoch_that_is_shuffled_in_another_way_than_a_sister_had_it_is_an_error(feed):
    first, second = feed.enter(0, "a", floats=False), feed.enter(1, "b", floats=False)
    assert feed.ask(first).plan.shuffle is None, "it has no block yet"
    how = Shuffle(0, (3,), Shuffle(7))
    assert feed.ask(first, shuffle=how).plan.shuffle == feed.ask(second, shuffle=how).plan.shuffle == how
    with pytest.raises(
        StateError, match=r"rank 1 .* epoch 0 .* as 0, and other ranks had it as 0, in segments cut at 3 "
    ):
        feed.ask(second, shuffle=Shuffle(0))


def test_an_epoch_aside_is_shared_out_like_the_one_whose_order_it_has(feed):
    far = 1 << 32
    first = feed.enter(0, "a", 2 * BLOCKS, floats=False)
    second = feed.enter(1, "b", (far + 2) * BLOCKS, floats=False, aside=far)
    assert feed.ask(first, 2).plan == feed.ask(second, far + 2, NEWER).plan


@pytest.mark.parametrize("aside", [0, 1 << 32])
def test_who_is_ahead_by_a_plan_that_is_lost_is_told_of(feed, aside):
    slow = feed.enter(0, "a", 2 * BLOCKS + 3, floats=False)
    fast = feed.enter(1, "b", (4 + aside) * BLOCKS, floats=False, aside=aside)
    orders = feed.ask(slow, 2)
    assert (orders.plan, orders.missing, orders.ahead) == (None, (), (1,))
    assert feed.ask(fast, 4 + aside).plan == RankPlan(("a", "b"), PLACEMENT), "no rank had this plan before"
    feed.leave(fast)
    feed.enter(1, "b", 2 * BLOCKS + 5, floats=False)
    assert feed.ask(slow, 2).plan == RankPlan(("a", "b"), PLACEMENT), "the lost plan was left over from an earlier run"


@pytest.mark.parametrize("done", [2 * BLOCKS - 1, 2 * BLOCKS], ids=["in its last block", "at its end"])
def test_a_sister_that_was_given_blocks_ahead_is_not_beyond_the_epoch_that_she_has_not_begun(feed, done):
    """A call for blocks may have brought the first block of the next epoch too."""
    first, second = (feed.enter(rank, "a", BLOCKS, floats=False) for rank in range(2))
    feed.cursors[second.consumer, second.session] = 2 * BLOCKS + 1
    feed.done[second.consumer, second.session] = done
    assert feed.ask(first, 1).plan is not None


def test_a_rank_that_has_used_nothing_is_in_the_first_epoch_even_if_epochs_have_one_block(feed):
    reports = []
    for rank in range(2):
        report = structs.replace(feed.enter(rank, "a", floats=False), blocks_per_epoch=1)
        feed.ranks.enlist(report)
        reports.append(report)
    assert feed.ask(reports[0], 0).plan == RankPlan(("a", "a"), PLACEMENT)


def test_of_trials_that_are_forgotten_nothing_stays_written_down(feed):
    for trial in range(KEPT_TRIALS + 2):
        report, other = (feed.enter(rank, "a", floats=False, batch_size=trial + 1) for rank in range(2))
        feed.ask(report)
        feed.leave(report)
        feed.leave(other)
    feed.ranks.trials()
    gone = [kept.group for kept in feed.ranks.to_write() if not kept.plans]
    assert gone == [("t", 2, 1, ""), ("t", 2, 2, "")]
    assert feed.ranks.to_write() == []


def forget_first(feed):
    """Fill the table with later trials, so that the first one, of batch size 1, is forgotten; return its ranks."""
    for trial in range(KEPT_TRIALS + 1):
        ranks = [feed.enter(rank, "a", floats=False, batch_size=trial + 1) for rank in range(2)]
        feed.ask(ranks[0])
        for report in ranks:
            feed.leave(report)
    feed.ranks.trials()


def test_a_trial_whose_deletion_could_not_be_written_down_is_deleted_the_next_time(feed):
    forget_first(feed)
    written = feed.ranks.to_write()
    gone = [kept for kept in written if not kept.plans]
    assert [kept.group for kept in gone] == [("t", 2, 1, "")]
    feed.ranks.write_again(written)
    assert [kept for kept in feed.ranks.to_write() if not kept.plans] == gone


def test_a_forgotten_trial_that_returns_is_written_down_and_not_deleted(feed):
    forget_first(feed)
    ranks = [feed.enter(rank, "b", floats=False, batch_size=1) for rank in range(2)]
    plan = feed.ask(ranks[0]).plan
    assert [kept.plans for kept in feed.ranks.to_write() if kept.group == ranks[0].group] == [{0: plan}]


def test_trials_that_ended_without_a_plan_do_not_push_out_those_that_have_one(feed):
    ranks = [feed.enter(rank, "a", floats=False) for rank in range(2)]
    plan = feed.ask(ranks[0]).plan
    for report in ranks:
        feed.leave(report)
    for trial in range(KEPT_TRIALS + 1):
        feed.leave(feed.enter(0, "a", size=3, batch_size=trial + 1))
    ranks = [feed.enter(rank, "b", floats=False) for rank in range(2)]
    assert feed.ask(ranks[0], 0, NEWER).plan == plan
    assert {kept.group for kept in feed.ranks.to_write()} == {ranks[0].group}, "none of the others was written"


def test_the_plan_of_an_epoch_to_which_a_rank_returned_is_kept_even_if_it_died_there_at_once(feed):
    """Both ranks are in epoch 9 when rank 0 returns to epoch 3, where it did not ask for its plan before it died."""
    slow, fast = (feed.enter(rank, "ab"[rank], floats=False) for rank in range(2))
    plans = [feed.ask(slow, epoch).plan for epoch in range(10)]
    for report in (slow, fast):
        feed.cursors[report.consumer, report.session] = 9 * BLOCKS + 1
    feed.ranks.trials()
    feed.leave(feed.enter(0, "c", 3 * BLOCKS + 1, floats=False))
    assert feed.ask(fast, 9).plan == plans[9]
    back = feed.enter(0, "c", 3 * BLOCKS + 1, floats=False)
    assert feed.ask(back, 3, NEWER).plan == plans[3]


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
    """The ranks are in epochs 7 and 9: the plan of epoch 3 is kept, and the plan of epoch 2 is not."""
    slow, fast = (feed.enter(rank, "a", floats=False) for rank in range(2))
    for epoch in range(10):
        feed.ask(slow, epoch)
    feed.cursors[slow.consumer, slow.session] = 7 * BLOCKS + 1
    feed.cursors[fast.consumer, fast.session] = 9 * BLOCKS + 1
    feed.ask(slow, 9)
    assert feed.ask(slow, 7 - KEPT_EPOCHS, NEWER).plan == RankPlan(("a", "a"), PLACEMENT)
    assert feed.ask(slow, 6 - KEPT_EPOCHS, NEWER).ahead == (1,)
