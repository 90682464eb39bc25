"""Which streams read-ahead sees in a sequence of fetches, and how it shares its bytes."""

import pytest

from mbaas.cache.readahead import IDLE_FETCHES, MAX_STREAMS, SLACK_BLOCKS, ReadAhead
from mbaas.errors import ConfigError


def followed(*blocks: int, budget_bytes: int = 100) -> ReadAhead:
    ahead = ReadAhead(budget_bytes)
    for block in blocks:
        ahead.follow(block)
        ahead.validate()
    return ahead


def test_fetches_out_of_order_are_one_stream() -> None:
    ahead = followed(3, 2, 5, 4, 6)
    assert [(s.head, s.frontier) for s in ahead.streams] == [(6, 7)]


def test_two_places_of_the_order_are_two_streams() -> None:
    ahead = followed(100, 7, 101, 8, 102)
    assert [s.head for s in ahead.streams] == [102, 8]


def test_a_stream_that_nobody_follows_any_more_ends() -> None:
    ahead = followed(1000, *range(IDLE_FETCHES - 1))
    assert len(ahead.streams) == 2
    ahead.follow(IDLE_FETCHES)
    assert [s.head for s in ahead.streams] == [IDLE_FETCHES]


def test_the_number_of_streams_is_bounded() -> None:
    ahead = followed(*range(0, 1000 * (MAX_STREAMS + 2), 1000))
    assert len(ahead.streams) == MAX_STREAMS
    assert not ahead.wants(0)


def test_a_block_that_its_stream_has_passed_is_not_wanted() -> None:
    ahead = followed(0)
    ahead.streams[0].frontier = 4  # blocks 1 to 3 are scheduled
    assert ahead.wants(3)
    assert not ahead.wants(4)
    for block in range(1, 3 + SLACK_BLOCKS + 1):
        ahead.follow(block)
    assert ahead.wants(3)
    ahead.follow(3 + SLACK_BLOCKS + 1)
    assert not ahead.wants(3)


def test_where_streams_overlap_a_fetch_is_the_next_step_of_one() -> None:
    ahead = followed(20, 0, budget_bytes=10)
    ahead.streams[0].frontier = 40  # the one at 0 has looked ahead beyond the one at 20
    ahead.follow(21)
    assert sorted(s.head for s in ahead.streams) == [0, 21]


def test_bytes_are_bounded_and_shared() -> None:
    ahead = followed(0, budget_bytes=100)
    stream = ahead.streams[0]
    assert ahead.fits(stream, 100)
    assert not ahead.fits(stream, 101)
    stream.frontier = 2
    ahead.hold(-1, block=1, nbytes=60)
    assert ahead.fits(stream, 40)
    ahead.follow(500)
    assert not ahead.fits(stream, 1), "60 of its share of 50 are used"
    assert ahead.fits(ahead.streams[0], 40), "the first of a stream may use all that is free"
    ahead.let_go(-1)
    ahead.let_go(-1)
    assert ahead.used_bytes == 0
    ahead.validate()


def test_a_depth_below_the_budget_bounds_what_comes_and_not_what_is_held() -> None:
    ahead = followed(0, budget_bytes=100)
    stream = ahead.streams[0]
    stream.frontier = 2
    ahead.hold(-1, block=1, nbytes=60)
    ahead.reach(70)
    assert ahead.fits(stream, 10)
    assert not ahead.fits(stream, 11)
    ahead.reach(50)
    assert not ahead.fits(stream, 1)
    ahead.validate()
    ahead.reach(1000)
    assert ahead.depth_bytes == 100
    ahead.let_go(-1)
    ahead.reach(10)
    assert ahead.fits(stream, 90), "one block is always read ahead, if the budget has room for it"


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="readahead_bytes must be at least 0, got -5"):
        ReadAhead(-5)
