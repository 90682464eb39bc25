"""A consumer requests, holds and gives up the right blocks. Epochs have 4 blocks."""

from dataclasses import dataclass

from mbaas.client.position import Position
from mbaas.samples.order import ASIDE, OwnEpoch, Shuffle
from mbaas.wire.consumers import Resumption, Start


@dataclass
class Delivered:
    number: int

    @property
    def shuffle(self):
        return Shuffle(self.number // 4)


class OfAside(Delivered):
    @property
    def shuffle(self):
        return Shuffle(1, (20,), Shuffle(0))


def position(cursor=0, most=3, first=None):
    """A consumer that joined at block ``cursor`` and whose epoch began at ``first``."""
    found = Position(most)
    found.enter(cursor, OwnEpoch.at(cursor - cursor % 4 if first is None else first, 4, 10), 4, 10)
    return found


def take(found, *blocks):
    """Receive blocks, then read and hold the first one. Calling the result releases it."""
    found.take_in(map(Delivered, blocks))
    looks = [True]
    found.hold(found.received[0].number, lambda: bool(looks))
    found.move_on()
    return looks.clear


def test_one_block_is_asked_for_where_an_epoch_begins_and_several_within():
    found = position()
    assert found.want == 1
    take(found, 0)
    assert (found.following, found.want) == (1, 3)


def test_more_is_asked_for_earlier_where_blocks_come_from_other_nodes_but_not_across_an_epochs_end():
    found = position()
    found.take_in([Delivered(0)])
    assert found.runs_short(are_remote=True)
    assert not found.runs_short(are_remote=False)
    found.take_in([Delivered(1), Delivered(2), Delivered(3)])
    for _ in range(3):
        found.move_on()
    assert not found.runs_short(are_remote=True)


def test_who_keeps_an_old_block_says_what_it_holds_nothing_of():
    """Block 0 is held, blocks 1 and 2 were copied, and block 3 is unread."""
    found = position(most=4)
    let_go = take(found, 0, 1, 2, 3)
    assert found.unheld() is None, "nothing behind it was read"
    found.move_on()
    found.move_on()
    assert (found.released(), found.unheld()) == (0, (1, 3))
    let_go()
    assert (found.released(), found.unheld()) == (3, None)


def test_who_keeps_several_blocks_counts_as_holding_all_in_between():
    found = position(most=4)
    take(found, 0)
    let_go = take(found, 1)
    take(found, 2)
    let_go()
    assert (found.released(), found.unheld()) == (0, None)


def test_what_is_looked_at_is_held_and_what_was_received_too():
    found = position()
    let_go = take(found, 0, 1)
    assert found.released() == 0
    let_go()
    assert found.released() == 1
    take(found, 2)
    found.released()
    assert len(found._held) == 1


def test_who_skips_what_was_delivered_and_looks_at_an_older_block_gives_the_rest_up():
    """Block 0 is held, and 1 and 2 were delivered. Blocks count as held unless known to be given up."""
    found = position()
    take(found, 0, 1, 2)
    assert found.leap(4)
    assert (found.cursor, found.following, found.released(), found.given_up) == (4, 4, 0, 1)
    assert found.leap(8)
    assert found.given_up == 1, "the first skip may not have reached the coordinator"
    take(found, 8)
    assert found.given_up is None


def test_a_skip_within_what_was_received_gives_nothing_up():
    found = position(most=8)
    take(found, 0, 1, 2, 3, 4)
    assert not found.leap(4)
    assert (found.cursor, [block.number for block in found.received], found.given_up) == (4, [4], None)
    assert not found.leap(4), "it stands there already"


def test_a_block_that_cannot_be_read_comes_again_with_all_behind_it():
    found = position()
    found.take_in(map(Delivered, (0, 1, 2)))
    found.go_back(0)
    assert (found.following, list(found.received)) == (0, [])


# ---- epochs that differ from the stream's ----


def test_one_block_is_asked_for_where_its_own_epoch_begins():
    found = position(2, first=2)
    assert found.want == 1
    take(found, 2, 3, 4)
    assert found.want == 3, "the beginning of the stream's epoch is the middle of its own"
    take(found, 5)
    assert found.following == 6
    assert found.want == 1


def test_it_begins_the_next_epoch_where_it_is_put():
    found = position(2, first=2)
    take(found, 2, 3, 4, 5)
    take(found, 8)
    assert found.own_epochs[-1] == OwnEpoch(8, 12)
    assert found.is_beginning(12)
    assert not found.is_beginning(10)


def test_who_goes_back_to_a_block_of_the_epoch_before_needs_it_for_that():
    found = position(2, first=2)
    found.take_in(map(Delivered, (2, 3, 4, 5, 6)))
    assert found.own_epoch_of(5) == OwnEpoch(2, 6, 20)
    assert found.own_epoch_of(6) == OwnEpoch(6, 10, 20)


def test_a_new_session_goes_on_in_its_own_epoch():
    found = position(2, first=2)
    assert found.start_at(2) == Start(now=True), "it has received nothing so far"
    take(found, 2, 3)
    assert found.start_at(4) == Start(4, resumed=Resumption(4, OwnEpoch(2, 6, 20), 0, Shuffle(0)))
    take(found, 4)
    assert found.start_at(5).resumed == Resumption(5, OwnEpoch(2, 6, 20), 1, Shuffle(1))
    take(found, 5)
    assert found.start_at(6).resumed == Resumption(6, OwnEpoch(6, 10, 20), 1, Shuffle(1), taken=False)


def test_who_began_now_and_received_nothing_still_gets_no_epoch_from_before_the_requested_block():
    """It had the epochs before block 6, and was admitted in the middle of a later one."""
    found = Position(3)
    found.enter(7, OwnEpoch(7, 11, 20), 4, 10, requested=6)
    assert found.start_at(7) == Start(6, now=True)


def test_whose_epochs_are_those_of_the_stream_only_says_where_it_begins():
    """It begins at that block, or with consumers that have passed it. Ranks of a trial begin only there."""
    found = position(4)
    take(found, 4, 5, 6, 7)
    assert found.start_at(8) == Start(8, now=True)
    found.moves = False
    assert found.start_at(8) == Start(8)
    assert found.start_at(6).resumed == Resumption(6, OwnEpoch(4, 8), 1, Shuffle(1))


def test_who_was_given_nothing_so_far_begins_where_it_was_told_to():
    """Its state may hold a position inside that block."""
    assert position(4).start_at(4) == Start(4)


def test_what_an_earlier_session_handed_out_says_nothing_of_what_this_one_holds():
    """It read the rest of its epoch as a side epoch, still holds the last block, and continues with the others."""
    found, aside = position(), ASIDE * 4
    found.enter(2 + aside, OwnEpoch(aside, 4 + aside), 4, 10)
    take(found, 2 + aside, 3 + aside)
    found.enter(8, OwnEpoch(8, 12), 4, 10)
    assert (found.released(), len(found._held)) == (8, 0)
    let_go = take(found, 8)
    assert found.released() == 8, "it looks at block 8"
    let_go()
    assert found.released() == 9


def test_a_new_session_may_count_from_another_number_on():
    """The rest of its epoch was moved to a side epoch. Afterwards it rejoins the others and sees no sample twice."""
    found, by = position(2, first=2), ASIDE * 4
    take(found, 2, 3)
    start = found.start_at(4)
    found.enter(4 + by, OwnEpoch(2 + by, 6 + by, 20), 4, 10)
    found.resume(start.resumed, by)
    assert found.start_at(4 + by).resumed == start.resumed.moved(ASIDE, 4)
    assert found.released() == 4 + by, "the minibatch that it still holds was delivered in another session"
    found.take_in([OfAside(4 + by), OfAside(5 + by)])
    assert found.start_at(6 + by) == Start(8)
    assert found.next_epoch(6 + by) == 2
    found.moves = False
    assert found.start_at(6 + by).resumed == Resumption(
        6 + by, OwnEpoch(6 + by, 10 + by, 20), ASIDE + 1, Shuffle(1, (20,), Shuffle(0)), taken=False
    )


def test_who_stays_aside_says_there_how_the_epoch_before_was_shuffled():
    """The next shuffle thus follows from that epoch's, even after a coordinator restart."""
    found, first = position(), ASIDE * 4
    found.enter(first, OwnEpoch(first, first + 4), 4, 10)
    found.moves = False
    found.take_in(OfAside(first + i) for i in range(4))
    resumed = found.start_at(first + 4).resumed
    assert (resumed.epoch, resumed.shuffle.epoch, resumed.taken) == (ASIDE, 1, False)


def test_the_next_epoch_is_one_of_which_it_has_seen_nothing():
    assert position(4).next_epoch(4) == 1
    assert position(4).next_epoch(5) == 1, "its first block was bad, so it has used nothing from that epoch"
    assert position(2, first=2).next_epoch(2) == 1


def test_who_skips_the_rest_of_an_epoch_aside_goes_on_with_the_others_in_the_next_one():
    """It received no block at that epoch's end. Found by seed 694435 of the whole-feed schedules."""
    found, by = position(), (ASIDE - 1) * 4
    found.enter(6 + by, OwnEpoch(6 + by, 10 + by, 20), 4, 10)
    found.resume(Resumption(6, OwnEpoch(6, 10, 20), 1, Shuffle(1), taken=False), by)
    found.leap(10 + by)
    assert found.next_epoch(10 + by) == 3, "it was in epochs 1 and 2"
    assert found.start_at(10 + by) == Start(12)


def test_many_epochs_later_it_still_knows_the_last_ones():
    found = position()
    for number in (*range(ASIDE * 4, ASIDE * 4 + 80), *range(80)):
        take(found, number)
    assert found.start_at(79).resumed.shuffle == Shuffle(19)
