"""Each staged block has one reason to stay; the weakest reason goes first. Epochs have 4 blocks of 10 bytes."""

import pytest

from mbaas.core.staging.keeping import Reason
from mbaas.core.staging.transitions import ConsumerState
from mbaas.samples.placement import WHOLE
from tests.core.staged_blocks import Table


def test_a_consumer_keeps_what_it_holds_and_the_blocks_ahead_of_it():
    """At block 5 it holds block 4; prep may reach block 8. Its next epoch ends at block 12."""
    table = Table()
    consumer = table.join("ann", 5, released=4)
    consumer.transition(ConsumerState.WAITING)
    table.stage(*range(2, 13))
    assert table.reasons() == {
        2: Reason.UNWANTED,
        3: Reason.UNWANTED,
        4: Reason.HELD,
        5: Reason.AWAITED,
        6: Reason.AHEAD,
        7: Reason.AHEAD,
        **dict.fromkeys(range(8, 12), Reason.USEFUL),
        12: Reason.UNWANTED,
    }
    assert table.unwanted() == [2, 3, 12]


def test_a_block_of_which_a_worker_makes_a_part_stays():
    table = Table()
    table.window.grant(7, 10, [WHOLE]).begin(0, 1, "w")
    assert table.reasons() == {7: Reason.IN_PREPARATION}
    assert table.unwanted() == []


def test_newcomers_can_start_the_epoch_while_all_of_its_blocks_are_staged():
    table = Table()
    table.join("ann", 6)
    table.stage(4, 5)
    assert table.reasons() == {4: Reason.JOINABLE, 5: Reason.JOINABLE}
    assert table.beginnings.join_start(table.consumers.cohorts[0]) == 4
    table.window.drop(4, "its bytes are needed")
    assert table.reasons() == {5: Reason.UNWANTED}
    assert table.beginnings.join_start(table.consumers.cohorts[0]) is None


def test_a_consumer_that_rests_keeps_its_place_while_all_blocks_up_to_the_others_are_staged():
    table = Table()
    rests = table.join("rests", 5)
    table.join("reads", 7, cohort=table.consumers.cohorts[rests.cohort])
    table.consumers.rest(rests)
    table.stage(5, 6)
    assert table.reasons() == {5: Reason.RESTING, 6: Reason.RESTING}
    table.window.drop(6, "its bytes are needed")
    assert table.reasons() == {5: Reason.UNWANTED}


def test_the_strongest_reason_counts():
    """Block 6 is behind one cohort, which could be joined there, ahead of the other, and held by its consumer."""
    table = Table()
    table.join("front", 7)
    table.join("back", 5)
    table.stage(4, 5, 6)
    assert table.reasons() == {4: Reason.JOINABLE, 5: Reason.AHEAD, 6: Reason.AHEAD}
    table.consumers.by_name["front"].released = 6
    assert table.reasons()[6] is Reason.HELD


def test_an_unfinished_block_and_an_error_are_not_kept_for_later():
    """The consumer reaches blocks 4 to 6 soon, and block 8 later."""
    table = Table()
    table.join("ann", 4)
    for number in (5, 8):
        table.window.grant(number, 10, [WHOLE])
    assert table.reasons() == {5: Reason.AHEAD, 8: Reason.UNWANTED}
    table.stage(9)
    table.window.grant(10, 10, [WHOLE])
    table.window.fail(10, "a sample is bad", may_mend=True)
    assert table.reasons()[9] is Reason.USEFUL
    assert table.reasons()[10] is Reason.UNWANTED


def test_a_block_that_waits_for_storage_is_not_awaited():
    """It may go for a block of another cohort: only its own consumers should wait for storage."""
    table = Table()
    table.join("ann", 4).transition(ConsumerState.WAITING)
    block = table.window.grant(4, 10, [WHOLE])
    assert table.reasons() == {4: Reason.AWAITED}
    block.begin(0, 1, "w")
    block.put_off(0, 10.0, "storage is away")
    assert table.reasons() == {4: Reason.AHEAD}


def test_where_all_epochs_are_equal_all_blocks_stay():
    table = Table(keeps_all=True)
    table.join("ann", 42)
    table.stage(0, 3)
    assert table.reasons() == {0: Reason.AHEAD, 3: Reason.AHEAD}


def test_where_all_epochs_are_equal_other_pipelines_may_take_the_place_of_blocks_that_are_not_needed_soon():
    """At block 42, block 2 of the epoch, it needs blocks 2, 3 and 0 next: prep may be three blocks ahead."""
    table = Table(keeps_all=True)
    table.join("ann", 42)
    table.stage(0, 1, 2, 3)
    table.add_stream()
    assert table.reasons() == {0: Reason.AHEAD, 1: Reason.USEFUL, 2: Reason.AHEAD, 3: Reason.AHEAD}
    assert table.unwanted() == []


def test_the_weakest_reason_goes_first_and_of_equal_ones_the_block_that_is_reached_last():
    table = Table()
    rests = table.join("rests", 5)
    ann = table.join("ann", 7, released=6, cohort=table.consumers.cohorts[rests.cohort])
    table.consumers.rest(rests)
    ann.transition(ConsumerState.WAITING)
    table.stage(4, 5, 6, 7, 8, 9, 10)
    order = []
    while (found := table.keeping.weakest(Reason.AWAITED)) is not None:
        order.append((found[0].number, found[1].name))
        table.window.drop(found[0].number, "its bytes are needed")
    assert order == [(4, "JOINABLE"), (5, "RESTING"), (10, "USEFUL"), (9, "AHEAD"), (8, "AHEAD")]
    assert [*table.window.blocks] == [6, 7], "held and awaited"


def test_only_blocks_that_nobody_needs_soon_count_as_room():
    """Four blocks fill the budget: one to join, one held, one ahead, and one for later."""
    table = Table(budget_blocks=4)
    table.join("ann", 6, released=5)
    table.stage(4, 5, 6, 10)
    assert table.keeping.could_free(20)
    assert not table.keeping.could_free(21)


@pytest.mark.parametrize("number", [1, 4, 6])
def test_the_lead_is_counted_from_the_nearest_cohort_before_the_block(number):
    table = Table()
    table.join("back", 2)
    table.join("front", 5)
    assert table.keeping.lead(number) == {1: float("inf"), 4: 2, 6: 1}[number]


def test_only_cohorts_with_the_same_pipeline_count_for_the_lead():
    table = Table()
    first = table.add_stream().first
    table.join("feeds", 2)
    table.join("own", first + 2)
    assert [table.keeping.lead(first + block) for block in (1, 6)] == [float("inf"), 4]


def test_a_block_that_holds_no_bytes_is_not_dropped_for_them():
    """The block whose preparation failed keeps its error; dropping it would free nothing."""
    table = Table()
    table.join("ann", 4)
    table.stage(5)
    table.window.grant(6, 10, [WHOLE])
    table.window.fail(6, "a sample is bad", may_mend=True)
    found = table.keeping.weakest(Reason.AWAITED)
    assert found is not None
    assert found[0].number == 5
    table.window.drop(5, "its bytes are needed")
    assert table.keeping.weakest(Reason.AWAITED) is None
