"""Read-ahead recognizes sequences in fetches, and divides its bytes between them."""

from mbaas.cache.readahead import IDLE_FETCHES, MAX_SEQUENCES, SLACK_BLOCKS, ReadAhead


def followed(*blocks: int, budget_bytes: int = 100) -> ReadAhead:
    ahead = ReadAhead(budget_bytes)
    for block in blocks:
        ahead.follow(block)
        ahead.validate()
    return ahead


def test_fetches_out_of_order_are_one_sequence() -> None:
    ahead = followed(3, 2, 5, 4, 6)
    assert [(s.head, s.frontier) for s in ahead.sequences] == [(6, 7)]


def test_two_points_of_the_order_are_two_sequences() -> None:
    ahead = followed(100, 7, 101, 8, 102)
    assert [s.head for s in ahead.sequences] == [102, 8]


def expected(ahead: ReadAhead, block: int) -> bool:
    return any(sequence.covers(block) for sequence in ahead.sequences)


def test_a_sequence_that_nobody_follows_any_more_ends() -> None:
    ahead = followed(1000, *range(IDLE_FETCHES - 1))
    assert len(ahead.sequences) == 2
    ahead.follow(IDLE_FETCHES)
    assert [s.head for s in ahead.sequences] == [IDLE_FETCHES]


def test_the_number_of_sequences_is_bounded() -> None:
    ahead = followed(*range(0, 1000 * (MAX_SEQUENCES + 2), 1000))
    assert len(ahead.sequences) == MAX_SEQUENCES
    assert not expected(ahead, 0)


def test_a_block_that_its_sequence_has_passed_is_not_expected() -> None:
    ahead = followed(0)
    ahead.sequences[0].frontier = 4  # blocks 1 to 3 are scheduled
    assert expected(ahead, 3)
    assert not expected(ahead, 4)
    for block in range(1, 3 + SLACK_BLOCKS + 1):
        ahead.follow(block)
    assert expected(ahead, 3)
    ahead.follow(3 + SLACK_BLOCKS + 1)
    assert not expected(ahead, 3)


def test_where_sequences_overlap_a_fetch_is_the_next_step_of_one() -> None:
    ahead = followed(20, 0, budget_bytes=10)
    ahead.sequences[0].frontier = 40  # the sequence at 0 has read ahead beyond the one at 20
    ahead.follow(21)
    assert sorted(s.head for s in ahead.sequences) == [0, 21]


def test_bytes_are_bounded_and_divided() -> None:
    ahead = followed(0, budget_bytes=100)
    sequence = ahead.sequences[0]
    assert ahead.fits(sequence, 100)
    assert not ahead.fits(sequence, 101)
    sequence.frontier = 2
    ahead.hold(-1, block=1, nbytes=60)
    assert ahead.fits(sequence, 40)
    ahead.follow(500)
    assert not ahead.fits(sequence, 1), "60 of its part of 50 are used"
    assert ahead.fits(ahead.sequences[0], 40), "the first of a sequence may use all that is free"
    ahead.release(-1)
    ahead.release(-1)
    assert ahead.used_bytes == 0
    ahead.validate()


def test_a_depth_below_the_budget_bounds_what_comes_and_not_what_is_held() -> None:
    ahead = followed(0, budget_bytes=100)
    sequence = ahead.sequences[0]
    sequence.frontier = 2
    ahead.hold(-1, block=1, nbytes=60)
    ahead.set_depth(70)
    assert ahead.fits(sequence, 10)
    assert not ahead.fits(sequence, 11)
    ahead.set_depth(50)
    assert not ahead.fits(sequence, 1)
    ahead.validate()
    ahead.set_depth(1000)
    assert ahead.depth_bytes == 100
    ahead.release(-1)
    ahead.set_depth(10)
    assert ahead.fits(sequence, 90), "one block is always read ahead, if the budget has room for it"


def test_a_block_without_room_waits_until_there_is_room_for_it() -> None:
    ahead = followed(0, budget_bytes=100)
    sequence = ahead.sequences[0]
    sequence.frontier = 2
    ahead.hold(-1, block=1, nbytes=60)
    assert not ahead.waits_for_room(sequence), "nothing is known of the block"
    sequence.lacked = 2, 50
    assert ahead.waits_for_room(sequence)
    ahead.follow(2)
    assert not ahead.waits_for_room(sequence), "the next block may need less"
    sequence.lacked = 3, 50
    ahead.release(-1)
    assert not ahead.waits_for_room(sequence)
