"""What a consumer of one lane asks for, holds and gives up. Epochs have 4 blocks."""

from dataclasses import dataclass

from mbaas.client.lane_position import LanePosition


@dataclass
class Delivered:
    number: int


def position(cursor=0, most=3):
    found = LanePosition(most)
    found.enter(cursor, blocks_per_epoch=4)
    return found


def take(found, *blocks):
    """Blocks come, and the first is read and looked at; the result ends that."""
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


def test_what_is_looked_at_is_held_and_what_was_received_too():
    found = position()
    let_go = take(found, 0, 1)
    assert found.released() == 0
    let_go()
    assert found.released() == 1
    take(found, 2)
    assert found.held_blocks() == 1


def test_who_skips_what_was_delivered_and_looks_at_an_older_block_gives_the_rest_up():
    """Block 0 is looked at, 1 and 2 were delivered: only what is known to be given up is not counted as held."""
    found = position()
    take(found, 0, 1, 2)
    assert found.leap(4)
    assert (found.cursor, found.following, found.released(), found.given_up) == (4, 4, 0, 1)
    assert found.leap(8)
    assert found.given_up == 1, "the coordinator may not have heard of the first skip"
    take(found, 8)
    assert found.given_up is None


def test_a_skip_within_what_was_received_gives_nothing_up():
    found = position(most=8)
    take(found, 0, 1, 2, 3, 4)
    assert not found.leap(4)
    assert (found.cursor, [block.number for block in found.received], found.given_up) == (4, [4], None)
    assert not found.leap(4), "it stands there already"


def test_what_was_received_ahead_and_is_handed_back_is_asked_for_again():
    found = position()
    take(found, 0, 1, 2)
    found.give_up_received()
    assert (found.following, found.given_up) == (1, 1)


def test_a_block_that_cannot_be_read_comes_again_with_all_behind_it():
    found = position()
    found.take_in(map(Delivered, (0, 1, 2)))
    found.go_back(0)
    assert (found.following, list(found.received)) == (0, [])
