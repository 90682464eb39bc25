"""The read-ahead depth agrees with arithmetic by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mbaas.model.tiers import Depth, readahead_depth


def test_even_blocks_need_one_block_ahead() -> None:
    """Reading takes 2 s / 2 threads = 1 s, consuming 10 / 10 = 1 s: while a block is consumed, the next one is read.

    A depth of 1 has no room for the next block until the first one is consumed.
    """
    depth = readahead_depth([2.0] * 6, [10] * 6, consume_bytes_per_s=10, threads=2)
    assert depth == Depth(blocks=2, nbytes=20, keeps_up=True)


def test_a_slow_block_needs_the_time_of_those_before_it() -> None:
    """Consuming takes 1 s per block, reading 0 s except for block 4, which takes 2.5 s.

    Block 4 is due at 4. With depth d its read may begin when block 4 - d is consumed, at 5 - d. So 5 - d + 2.5 <= 4
    must hold, which gives d >= 3.5: 4 blocks.
    """
    depth = readahead_depth([0, 0, 0, 0, 2.5, 0, 0], [1] * 7, consume_bytes_per_s=1, threads=1)
    assert depth == Depth(blocks=4, nbytes=4, keeps_up=True)


def test_the_bytes_are_those_of_the_largest_run() -> None:
    """Depth 2, and the two largest neighbors have 7 + 5 bytes."""
    depth = readahead_depth([0.0] * 4, [3, 7, 5, 1], consume_bytes_per_s=1, threads=1)
    assert (depth.blocks, depth.nbytes) == (1, 7)
    depth = readahead_depth([0.5, 0.5, 0.5, 0.5], [3, 7, 5, 1], consume_bytes_per_s=1, threads=1)
    assert (depth.blocks, depth.nbytes) == (2, 12)


def test_storage_that_is_too_slow_is_told() -> None:
    """4 blocks of 2 s to read and 1 s to consume: 8 s of reading exceed 4 s of consuming.

    With depth 3, block 3 begins when block 0 is consumed, at 1, and arrives at 3, just in time. With depth 2, block 2
    begins at 1 and is due at 2.
    """
    depth = readahead_depth([2.0] * 4, [1] * 4, consume_bytes_per_s=1, threads=1)
    assert depth == Depth(blocks=3, nbytes=3, keeps_up=False)


def waits(read_s: list[float], sizes: list[int], depth: int) -> bool:
    """Return whether a consumer of 1 byte/s that starts after the first ``depth`` blocks waits, by simulation."""
    n, read_end, consumed = len(sizes), [0.0] * len(sizes), [0.0] * len(sizes)
    reader = now = 0.0
    for k in range(n):
        if k >= depth:
            reader = max(reader, consumed[k - depth]) + read_s[k]
            read_end[k] = reader
        if read_end[k] > now + 1e-6:
            return True
        now += sizes[k]
        consumed[k] = now
    return False


BLOCKS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=14)


@given(blocks=BLOCKS)
def test_the_depth_is_the_smallest_with_which_the_consumer_never_waits(blocks: list[tuple[int, int]]) -> None:
    read_s, sizes = [read / 4 for read, _ in blocks], [size for _, size in blocks]
    depth = readahead_depth(read_s, sizes, consume_bytes_per_s=1, threads=1)
    assert not waits(read_s, sizes, depth.blocks)
    assert depth.blocks == 1 or waits(read_s, sizes, depth.blocks - 1)
    windows = [sum(sizes[i : i + depth.blocks]) for i in range(len(sizes) - depth.blocks + 1)]
    assert depth.nbytes == max(windows)
