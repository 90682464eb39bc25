"""Consumers by node, stream and pace, and the blocks between those that one of them holds."""

import pytest

from mbaas.core.staging.pace import Group
from mbaas.core.staging.transitions import ConsumerState
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
