"""Epochs are shuffled so that out-of-phase consumers get each sample once, and others begin only at valid blocks."""

from __future__ import annotations

import pytest

from mbaas.core.staging.epochs import ASIDE_EPOCHS, MOST_PAGES, PAGE_EPOCHS, EpochTable
from mbaas.core.story import InvariantError
from mbaas.samples.order import ASIDE, MOST_LEVELS, OwnEpoch, Shuffle
from mbaas.wire.consumers import Resumption
from tests.core.staging_feeds import one_stream

BLOCKS, SAMPLES = 4, 10
"""Blocks per epoch and samples per block."""


def begun(*own_epochs: OwnEpoch, epochs: int = 1, is_shuffled: bool = True) -> EpochTable:
    """Table after the start of `epochs` epochs, with these consumers present."""
    table = EpochTable(one_stream(BLOCKS, SAMPLES), is_shuffled=is_shuffled)
    for number in range(epochs):
        table.fix(number * BLOCKS, own_epochs)
    return table


def shuffle(table: EpochTable, epoch: int) -> Shuffle:
    return table.shuffle_of(epoch * BLOCKS)


def test_an_epoch_is_shuffled_as_a_whole_while_all_begin_with_it() -> None:
    table = begun(OwnEpoch(0, 4), OwnEpoch(4, 8), epochs=3)
    assert [shuffle(table, number) for number in range(3)] == [Shuffle(0), Shuffle(1), Shuffle(2)]


def test_whoever_is_in_the_middle_of_its_own_epoch_cuts_the_next_one() -> None:
    table = begun(OwnEpoch(2, 6, 20), epochs=2)
    assert shuffle(table, 1) == Shuffle(1, (20,), Shuffle(0))


def test_whoever_has_just_ended_its_own_epoch_cuts_the_one_after_the_next() -> None:
    """It will begin another epoch there. Otherwise it would have to skip to the stream's next epoch, and be alone."""
    table = begun(OwnEpoch(2, 6, 20), epochs=3)
    assert shuffle(table, 2) == Shuffle(2, (20,), Shuffle(0))


def test_one_whose_epoch_ended_in_the_middle_of_a_block_begins_the_next_with_the_next_block() -> None:
    table = begun(OwnEpoch(2, 7, 25), epochs=3)
    assert shuffle(table, 1).cuts == (25,)
    assert shuffle(table, 2) == Shuffle(2, (30,), shuffle(table, 1))


def test_when_nobody_is_out_of_phase_any_more_epochs_are_shuffled_as_a_whole() -> None:
    table = begun(OwnEpoch(2, 6, 20), epochs=2)
    table.fix(2 * BLOCKS, [OwnEpoch(8, 12)])
    assert shuffle(table, 2) == Shuffle(2)


def test_an_epoch_that_has_begun_stays_as_it_is() -> None:
    table = begun(epochs=2)
    assert table.has_begun(1 * BLOCKS)
    table.fix(1 * BLOCKS, [OwnEpoch(2, 6, 20)])
    assert shuffle(table, 1) == Shuffle(1)


@pytest.mark.parametrize(
    ("epochs", "block", "can"),
    [
        (1, 0, True),
        (1, 2, True),
        (2, 2, False),  # the next epoch has begun, and has other samples before this block
        (2, 4, True),
        (1, 6, False),  # that epoch has not begun: the samples before the block would be unknown
    ],
)
def test_where_somebody_can_begin(epochs: int, block: int, can: bool) -> None:
    assert begun(epochs=epochs).can_begin(block) == can


def test_a_block_that_another_began_at_is_open_while_it_is_there() -> None:
    table = begun(OwnEpoch(2, 6, 20), epochs=2)
    assert table.can_begin(2)
    assert not table.can_begin(3)


def test_who_is_in_an_epoch_of_its_own_gets_all_of_it_unless_the_next_has_begun_without_its_cut() -> None:
    own = OwnEpoch(2, 6, 20)
    assert begun(epochs=1).keeps(own)
    assert begun(own, epochs=2).keeps(own)
    assert not begun(epochs=2).keeps(own)
    assert begun(epochs=2).keeps(OwnEpoch(0, 4)) is True


def test_in_the_datasets_own_order_anybody_may_begin_anywhere_and_gets_all() -> None:
    table = begun(OwnEpoch(2, 6, 20), epochs=2, is_shuffled=False)
    assert table.can_begin(3)
    assert table.can_begin(7 * BLOCKS + 1)
    assert table.keeps(OwnEpoch(3, 7, 30))
    assert shuffle(table, 1) == Shuffle(1)


def test_shuffles_do_not_lie_within_each_other_without_end() -> None:
    """In each epoch another consumer begins at another block, until none may before all are in phase."""
    table = EpochTable(one_stream(BLOCKS, SAMPLES))
    table.fix(0, [])
    number = 0
    while table.can_begin(number * BLOCKS + 1 + number % 2):
        first = number * BLOCKS + 1 + number % 2
        number += 1
        table.fix(number * BLOCKS, [OwnEpoch.at(first, BLOCKS, SAMPLES)])
    assert shuffle(table, number).levels == MOST_LEVELS
    table.fix((number + 1) * BLOCKS, [])
    assert table.can_begin((number + 1) * BLOCKS + 1)


# ---- consumers that resume ----


def resumed(start: int, own: OwnEpoch, epoch: int, how: Shuffle) -> Resumption:
    return Resumption(start, own, epoch, how)


def test_who_goes_on_brings_what_a_restarted_coordinator_does_not_know() -> None:
    table, how = EpochTable(one_stream(BLOCKS, SAMPLES)), Shuffle(5, (20,), Shuffle(4))
    own = OwnEpoch(22, 26, 20)
    assert table.adopt(resumed(23, own, 5, how), [])
    assert shuffle(table, 5) == how
    table.fix(6 * BLOCKS, [own])
    assert shuffle(table, 6).keeps(20, how)


def test_an_epoch_that_was_shuffled_in_another_way_here_is_put_aside() -> None:
    table, how = begun(epochs=2), Shuffle(1, (20,), Shuffle(0))
    wanted = resumed(5, OwnEpoch(2, 6, 20), 1, how)
    assert not table.adopt(wanted, [])
    there = table.put_aside(wanted, [])
    assert there.epoch >= ASIDE
    assert table.is_aside(there.start)
    assert (there.start - there.own_epoch.first, there.start % BLOCKS) == (3, 1)
    assert table.shuffle_of(there.start) == how, "randomness depends on the original epoch, not on the number"
    assert table.put_aside(wanted, []) == there, "a consumer that needs the same epoch shares it"


def test_an_epoch_whose_next_has_begun_without_its_cut_is_put_aside() -> None:
    table = begun(epochs=2)
    wanted = resumed(3, OwnEpoch(2, 6, 20), 0, Shuffle(0))
    assert not table.adopt(wanted, [])
    there = table.put_aside(wanted, [])
    table.fix(there.start + 1, [there.own_epoch])
    assert table.shuffle_of(there.start + 1) == Shuffle(1, (20,), Shuffle(0))


def test_nobody_is_given_an_epoch_that_others_need_in_another_way() -> None:
    """A consumer in the middle of its own epoch needs the beginning of the next one."""
    table = begun(epochs=1)
    others = [OwnEpoch(2, 6, 20)]
    assert not table.adopt(resumed(5, OwnEpoch(4, 8), 1, Shuffle(1)), others)
    assert table.adopt(resumed(5, OwnEpoch(4, 8), 1, Shuffle(1, (20,), Shuffle(0))), others)


@pytest.mark.parametrize(
    ("next_epoch", "wanted"),
    [
        (2, resumed(5, OwnEpoch(3, 8, 35), 1, Shuffle(1, (35,), Shuffle(0)))),  # it ends in the last block of epoch 1
        (1, resumed(4, OwnEpoch(4, 9, 5), 0, Shuffle(0))),  # it begins in the first block of epoch 1
    ],
)
def test_whose_own_epoch_does_not_reach_into_the_next_may_go_on_however_that_is_shuffled(
    next_epoch: int, wanted: Resumption
) -> None:
    """Block sizes have changed, so its own epoch begins in the middle of a block."""
    table = EpochTable(one_stream(BLOCKS, SAMPLES))
    table.fix(next_epoch * BLOCKS, [])
    assert table.adopt(wanted, [])


def test_each_epoch_aside_has_a_run_of_numbers_of_its_own_whichever_comes_first() -> None:
    """A restarted coordinator puts each epoch at the same position, although consumers return in another order."""
    wanted = [resumed(BLOCKS * n + 1, OwnEpoch(BLOCKS * n, BLOCKS * (n + 1)), n, Shuffle(n)) for n in range(100)]
    before, after = EpochTable(one_stream(BLOCKS, SAMPLES)), EpochTable(one_stream(BLOCKS, SAMPLES))
    places = [before.put_aside(each, []).epoch for each in wanted]
    assert [after.put_aside(each, []).epoch for each in reversed(wanted)] == places[::-1]
    assert len({*places}) == len(wanted)
    assert {place % ASIDE_EPOCHS for place in places} == {0}, "the other numbers are for the epochs that follow"


def test_two_places_aside_that_would_be_the_same_are_not() -> None:
    wanted = resumed(5, OwnEpoch(4, 8), 1, Shuffle(1, (20,), Shuffle(0)))
    there = begun(epochs=2).put_aside(wanted, [])
    table = begun(epochs=2)
    assert table.adopt(resumed(there.start, there.own_epoch, there.epoch, Shuffle(9)), []), "another one took it"
    elsewhere = table.put_aside(wanted, [])
    assert elsewhere.epoch != there.epoch
    assert table.shuffle_of(elsewhere.start) == wanted.shuffle


# ---- retention ----


def test_only_epochs_long_ago_are_forgotten_and_none_near_which_anybody_is() -> None:
    epochs = PAGE_EPOCHS * (MOST_PAGES + 3)
    near = [PAGE_EPOCHS * BLOCKS, 4 * PAGE_EPOCHS * BLOCKS - 1]  # the first epoch of one page and the last of another
    table = begun(epochs=epochs)
    table.forget(near)
    forgotten = [number for number in range(epochs) if not table.has_begun(number * BLOCKS)]
    assert forgotten == [*range(2 * PAGE_EPOCHS, 3 * PAGE_EPOCHS)], "only the page without a consumer near it"


def test_an_epoch_aside_is_remembered_like_others() -> None:
    table = begun(epochs=2)
    there = table.put_aside(resumed(5, OwnEpoch(4, 8), 1, Shuffle(1, (20,), Shuffle(0))), [])
    table.forget([])
    assert table.has_begun(there.start)
    for number in range(2, PAGE_EPOCHS * (MOST_PAGES + 1)):
        table.fix(number * BLOCKS, [])
        table.forget([there.start] if number < PAGE_EPOCHS * MOST_PAGES else [])
        if number == PAGE_EPOCHS * MOST_PAGES - 1:
            assert table.has_begun(there.start), "a consumer is there"
    assert not table.has_begun(there.start)


def test_the_first_number_aside_is_one_of_them() -> None:
    table, first = EpochTable(one_stream(BLOCKS, SAMPLES)), ASIDE * BLOCKS
    assert [table.is_aside(block) for block in (first - 1, first)] == [False, True]
    assert table.adopt(resumed(first + 1, OwnEpoch(first, first + BLOCKS), ASIDE, Shuffle(9)), [])
    table.validate()


# ---- persisted shuffles ----


def test_an_epoch_is_open_when_it_is_written_down_how_it_is_shuffled() -> None:
    table = EpochTable(one_stream(BLOCKS, SAMPLES), written={})
    table.fix(0, [])
    table.fix(BLOCKS, [])
    assert not table.is_written(BLOCKS - 1)
    assert table.take_changed() == {0: {0: Shuffle(0), 1: Shuffle(1)}}
    assert table.take_changed() == {}, "it is being written"
    table.note_written([0])
    assert [table.is_written(block) for block in (0, BLOCKS - 1, BLOCKS, 2 * BLOCKS)] == [True, True, False, True]
    table.fix(PAGE_EPOCHS * BLOCKS, [])
    assert table.take_changed() == {1: {PAGE_EPOCHS: Shuffle(PAGE_EPOCHS)}}, "the first page is as it was"


def test_what_an_earlier_coordinator_wrote_down_holds() -> None:
    """No consumer reports epoch 1, because its consumer is away; otherwise it would be fixed without a cut."""
    how = Shuffle(1, (20,), Shuffle(0))
    table = EpochTable(one_stream(BLOCKS, SAMPLES), written={0: Shuffle(0), 1: how})
    assert table.adopt(resumed(2, OwnEpoch(0, 4), 0, Shuffle(0)), [])
    table.fix(BLOCKS, [OwnEpoch(0, 4)])
    assert shuffle(table, 1) == how
    assert table.is_written(BLOCKS)
    assert not table.take_changed()


def test_how_a_returning_consumer_knows_its_epoch_is_written_down() -> None:
    table = EpochTable(one_stream(BLOCKS, SAMPLES), written={})
    assert table.adopt(resumed(5, OwnEpoch(4, 8), 1, Shuffle(1)), [])
    assert table.take_changed() == {0: {1: Shuffle(1)}}


def test_a_page_that_is_forgotten_is_deleted() -> None:
    table = EpochTable(
        one_stream(BLOCKS, SAMPLES), written={number: Shuffle(number) for number in range(PAGE_EPOCHS * MOST_PAGES)}
    )
    table.fix(PAGE_EPOCHS * MOST_PAGES * BLOCKS, [])
    table.forget([])
    assert table.take_changed() == {0: {}, MOST_PAGES: {PAGE_EPOCHS * MOST_PAGES: Shuffle(PAGE_EPOCHS * MOST_PAGES)}}


def test_pages_near_the_epochs_of_kept_blocks_stay() -> None:
    """The epochs before and after a kept block's stay, which may be on the page before or after."""
    pages = MOST_PAGES + 14
    written = {number: Shuffle(number) for number in range(PAGE_EPOCHS * pages)}
    table = EpochTable(one_stream(BLOCKS, SAMPLES), written=written)
    on_both_sides = PAGE_EPOCHS * 2, PAGE_EPOCHS * 9 - 1
    on_one_page = PAGE_EPOCHS * 5 + 1, PAGE_EPOCHS * 12 - 2
    kept = [number * BLOCKS for number in (*on_both_sides, *on_one_page)]
    table.forget(kept)
    gone = {*range(14)} - {1, 2, 5, 8, 9, 11}
    assert table.take_changed() == {page: {} for page in gone}
    assert [table.has_begun(page * PAGE_EPOCHS * BLOCKS) for page in range(15)] == [n not in gone for n in range(15)]
    table.forget(kept)
    assert not table.take_changed()


def test_an_epoch_that_is_forgotten_is_not_waited_for() -> None:
    table = EpochTable(one_stream(BLOCKS, SAMPLES), written={})
    for page in range(MOST_PAGES + 1):
        table.fix(page * PAGE_EPOCHS * BLOCKS, [])
    assert not table.is_written(0)
    table.forget([])
    assert table.is_written(0)
    assert not table.is_written(PAGE_EPOCHS * BLOCKS)


def test_the_pages_that_changed_last_are_remembered() -> None:
    """The first page lacks an epoch. When that begins, the page is the newest, so the second one is forgotten."""
    written = {number: Shuffle(number) for number in range(1, PAGE_EPOCHS * MOST_PAGES)}
    table = EpochTable(one_stream(BLOCKS, SAMPLES), written=written)
    for number in (0, PAGE_EPOCHS * MOST_PAGES):
        table.fix(number * BLOCKS, [])
    table.forget([])
    assert [page for page, epochs in table.take_changed().items() if not epochs] == [1]


def test_an_epoch_under_a_wrong_number_is_a_bug() -> None:
    table = EpochTable(one_stream(BLOCKS, SAMPLES))
    table.adopt(resumed(5, OwnEpoch(4, 8), 1, Shuffle(2)), [])
    with pytest.raises(InvariantError, match="shuffled as others"):
        table.validate()
