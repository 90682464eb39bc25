"""Feed blocks map to lane blocks and back."""

from hypothesis import given
from hypothesis import strategies as st

from mbaas.messages import Lane


@st.composite
def feeds(draw):
    """Lanes of a feed, and one of the feed's blocks."""
    blocks = draw(st.integers(1, 40))
    lanes = draw(st.integers(1, blocks))
    return [Lane(blocks, number, lanes) for number in range(lanes)], draw(st.integers(0, 6 * blocks))


@given(feeds())
def test_each_block_of_a_feed_is_one_block_of_one_lane(feed):
    lanes, block = feed
    (lane,) = [lane for lane in lanes if lane.has(block)]
    assert lane.feed_block(lane.first_from(block)) == block
    assert sum(lane.blocks_per_epoch for lane in lanes) == lane.feed_blocks


@given(feeds())
def test_the_first_block_from_a_place_on_is_the_first_of_the_lane_that_does_not_come_before_it(feed):
    lanes, block = feed
    for lane in lanes:
        own = lane.first_from(block)
        assert lane.feed_block(own) >= block
        assert own == 0 or lane.feed_block(own - 1) < block


@given(feeds())
def test_an_epoch_of_the_feed_begins_an_epoch_of_every_lane(feed):
    lanes, block = feed
    epoch = block // lanes[0].feed_blocks
    for lane in lanes:
        assert lane.first_from(epoch * lane.feed_blocks) == epoch * lane.blocks_per_epoch


def test_seven_blocks_in_three_lanes():
    """First epoch: 0 3 6, 1 4 and 2 5. Second epoch: 7 10 13, 8 11 and 9 12."""
    lanes = [Lane(7, number, 3) for number in range(3)]
    own = [[lane.feed_block(block) for block in range(2 * lane.blocks_per_epoch)] for lane in lanes]
    assert own == [[0, 3, 6, 7, 10, 13], [1, 4, 8, 11], [2, 5, 9, 12]]
