"""Consumers by node, stream and pace; gaps in what a consumer holds."""

import pytest

from mbaas.core.staging.pace import Group
from mbaas.core.staging.transitions import ConsumerState
from mbaas.samples.order import OwnEpoch
from tests.core.staged_blocks import Table


def test_consumers_are_counted_on_their_nodes_and_a_reservation_is_on_none():
    table = Table()
    for name, node in {"ann": "a", "bob": "a", "cat": "b", "to come": ""}.items():
        table.join(name, 0).node = node
    assert table.consumers.nodes == {"a", "b"}
    assert [table.consumers.on_node(node) for node in "abc"] == [2, 1, 0]


def test_a_trial_is_counted_once_in_its_stream_while_any_of_its_ranks_reads():
    """A stream that nobody reads counts as one trial, so that its share of the workers is not zero."""
    table = Table()
    table.add_stream()
    ranks = [table.join(f"ann[{rank}]", 0) for rank in range(2)]
    for rank in ranks:
        rank.trial = "ann"
    table.join("bob", 0)
    assert table.consumers.trials_in(0) == 2
    assert table.consumers.trials_in(1) == 1
    ranks[0].transition(ConsumerState.RESTING)
    table.consumers.cohorts[ranks[0].cohort].active.remove(ranks[0])
    assert table.consumers.trials_in(0) == 2
    table.join("cat", 1 << 64)
    table.join("dan", 1 << 64)
    assert table.consumers.trials_in(1) == 2


@pytest.mark.parametrize(
    ("first", "end", "held"),
    [
        (3, 5, [range(1, 3), range(5, 6), range(8, 10)]),  # before the gap
        (8, 9, [range(1, 6), range(9, 10)]),  # right behind it
        (4, 7, [range(1, 4), range(8, 10)]),  # into it
        (7, 9, [range(1, 6), range(9, 10)]),  # out of it
        (9, 20, [range(1, 6), range(8, 9)]),  # no further than to the cursor
        (5, 5, [range(1, 6), range(8, 10)]),  # nothing
    ],
)
def test_blocks_between_those_that_are_held_are_let_go(first, end, held):
    """The consumer holds blocks 1 to 9 except 6 and 7, which it has skipped."""
    consumer = Table().join("ann", 10, released=1)
    consumer.skipped = (range(6, 8),)
    consumer.let_go_between(first, end)
    assert [blocks for blocks in consumer.held() if blocks] == held
    assert [block for block in range(12) if consumer.holds(block)] == [block for blocks in held for block in blocks]


def test_the_group_of_a_cohort_has_its_known_paces_fastest_first():
    table = Table()
    ann = table.join("ann", 3)
    cohort = table.consumers.cohorts[ann.cohort]
    assert cohort.group is None
    for name, pace in {"bob": 2.0, "cat": 5.0, "new": 0.0}.items():
        table.join(name, 1, cohort=cohort).blocks_per_s = pace
    assert list(cohort.paces().items()) == [("cat", 5.0), ("bob", 2.0)]
    assert cohort.group == Group(2, 2.0)
    assert (cohort.slowest, cohort.front) == (1, 3)


def test_a_consumer_is_a_group_of_one_trial_with_its_pace():
    ann = Table().join("ann", 0)
    assert ann.group is None
    ann.blocks_per_s = 3.0
    assert ann.group == Group(1, 3.0)


def test_trials_of_equal_paces_are_in_the_order_of_their_names():
    """So that the same ones are split off whoever joined first."""
    table = Table()
    cohort = table.consumers.cohorts[table.join("zoe", 0).cohort]
    for name in ("ann", "mia"):
        table.join(name, 0, cohort=cohort)
    for member in cohort.members:
        member.blocks_per_s = 2.0
    assert [*cohort.paces()] == ["ann", "mia", "zoe"]


def rest(table, consumer):
    table.consumers.rest(consumer)
    return consumer


def test_a_cohort_whose_members_all_rest_is_at_the_furthest_and_holds_what_that_one_holds():
    table = Table()
    near = table.join("near", 3, released=1)
    cohort = table.consumers.cohorts[near.cohort]
    far = table.join("far", 8, released=6, cohort=cohort)
    assert (cohort.slowest, cohort.front, cohort.lowest_held) == (3, 8, 1)
    rest(table, near)
    rest(table, far)
    assert (cohort.slowest, cohort.front, cohort.lowest_held) == (8, 0, 6)


def test_blocks_before_skipped_ones_are_held_apart():
    """The member holds blocks 1, 4 and 7 to 9; blocks from 7 on are next to its cursor."""
    table = Table()
    ann = table.join("ann", 10, released=1)
    ann.skipped = (range(2, 4), range(5, 7))
    cohort = table.consumers.cohorts[ann.cohort]
    assert cohort.lowest_held == 7
    assert cohort.held_apart() == [range(1, 2), range(4, 5)]


def test_a_member_that_rests_and_holds_nothing_holds_nothing_apart():
    table = Table()
    ann = table.join("ann", 4, released=3)
    bob = table.join("bob", 4, cohort=table.consumers.cohorts[ann.cohort])
    cohort = table.consumers.cohorts[ann.cohort]
    rest(table, bob)
    assert cohort.held_apart() == []
    rest(table, ann)
    assert cohort.held_apart() == [range(3, 4)]


def test_without_a_lead_a_block_is_prepared_while_any_of_the_slowest_waits_for_it():
    table = Table()
    ann = table.join("ann", 5)
    cohort = table.consumers.cohorts[ann.cohort]
    table.join("bob", 5, cohort=cohort)
    cohort.ahead_blocks = 0
    assert cohort.horizon == 5
    ann.transition(ConsumerState.WAITING)
    assert cohort.horizon == 6


def test_for_visitors_nothing_is_prepared_beyond_the_epoch_that_ends_last():
    """Both are at block 6, and prep may be 3 blocks ahead; their epochs end at blocks 7 and 8."""
    table = Table()
    ann = table.join("ann", 6)
    cohort = table.consumers.cohorts[ann.cohort]
    bob = table.join("bob", 6, cohort=cohort)
    assert cohort.horizon == 9
    ann.is_visitor = bob.is_visitor = True
    ann.own_epoch, bob.own_epoch = OwnEpoch(3, 7, 3), OwnEpoch(4, 8, 0)
    assert cohort.horizon == 8


def test_blocks_that_were_prepared_for_the_furthest_stay_when_a_slower_one_joins():
    """With 3 blocks of lead, blocks up to 7 are prepared for a member at block 5, and up to 2 for one at block 0."""
    table = Table()
    fast = table.join("fast", 5)
    cohort = table.consumers.cohorts[fast.cohort]
    assert (cohort.horizon, cohort.ahead_end) == (8, 8)
    table.join("slow", 0, cohort=cohort)
    assert (cohort.horizon, cohort.ahead_end) == (3, 8)


def test_blocks_are_useful_up_to_the_slack_and_the_lead_together():
    """Prep may be 3 + 20 blocks ahead of a member at block 1, which is more than its next epoch, up to block 8."""
    table = Table()
    cohort = table.consumers.cohorts[table.join("ann", 1).cohort]
    assert cohort.useful == range(1, 8)
    cohort.slack_blocks = 20
    assert cohort.useful == range(1, 24)


@pytest.mark.parametrize(("epochs", "is_visitor"), [(1, True), (2, False)])
def test_who_leaves_after_its_first_epoch_is_a_visitor_and_who_leaves_after_the_next_is_none(epochs, is_visitor):
    table = Table()
    ann = table.join("ann", 0)
    for epoch in range(1, epochs):
        ann.go_to(4 * epoch)
        table.consumers.update_own_epoch(ann, None)
    ann.go_to(4 * epochs)
    table.consumers.note_leaving(ann)
    assert table.consumers.expects_visitors == is_visitor


def test_a_cohort_that_lost_members_is_measured_anew_before_it_is_split():
    table = Table()
    ann = table.join("ann", 0)
    cohort = table.consumers.cohorts[ann.cohort]
    bob = table.join("bob", 0, cohort=cohort)
    cohort.uneven = frozenset({"ann"}), 1.0
    apart = table.consumers.detach([bob], "it lags")
    assert cohort.uneven is None
    assert (cohort.members, apart.members, bob.apart) == ([ann], [bob], "it lags")


def test_a_block_that_lacks_samples_is_due_when_any_consumer_of_its_pipeline_comes_near():
    """Block 2 was delivered in the first epoch; "ann" is at the beginning of the second, and prep may go to block 6."""
    table = Table(keeps_all=True)
    table.add_stream()
    table.join("other", 1 << 64)
    assert not table.consumers.needs_anew(2, 2), "another pipeline does not need it"
    table.join("ann", 4)
    assert table.consumers.needs_anew(2, 2)
    assert not table.consumers.needs_anew(2, 6), "it is of this epoch"


def test_a_block_that_lacks_samples_stays_until_it_is_released():
    """At block 8, "ann" holds blocks 5 to 7; block 6 is block 2 of the second epoch."""
    table = Table(keeps_all=True)
    ann = table.join("ann", 8, released=5)
    assert not table.consumers.needs_anew(2, 2)
    ann.let_go(7, 7)
    assert table.consumers.needs_anew(2, 2)


def test_a_block_that_lacks_samples_stays_for_a_consumer_that_repeats_its_call():
    """It may have received block 6 before it asked for it again."""
    table = Table(keeps_all=True)
    ann = table.join("ann", 6)
    assert table.consumers.needs_anew(2, 2)
    ann.given = 7
    assert not table.consumers.needs_anew(2, 2)
