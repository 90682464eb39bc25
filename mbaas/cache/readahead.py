"""Read-ahead: which blocks to read before anybody asks for them, within a budget of bytes.

The order is known, so whoever fetches block g will fetch g + 1, g + 2, ... Fetches come a little out of
order, because several workers make them; and from two places of the order at once while a consumer that fell
behind is served again. So read-ahead follows *streams* of fetches, and shares its budget between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.errors import ConfigError

DEPTH_BLOCKS = 64
"""How far ahead of a stream's head blocks are looked at; what costs no bytes is bounded by this."""

SLACK_BLOCKS = 16
"""How far out of order the fetches of one stream may come."""

IDLE_FETCHES = 64
"""A stream is over when so many fetches have come and none of them was its own."""

MAX_STREAMS = 4


@dataclass
class Stream:
    """A run of fetches that moves forwards.

    Attributes:
        head: the furthest block that was fetched.
        frontier: the next block to look at; each one in (head, frontier) was scheduled or needs no storage.
        last_fetch: the number of its newest fetch, counted over all streams.
    """

    head: int
    frontier: int
    last_fetch: int

    def covers(self, block: int) -> bool:
        """Whether the block was scheduled for this stream and may still be fetched by it."""
        return self.head - SLACK_BLOCKS <= block < self.frontier

    def owns_fetch(self, block: int) -> bool:
        return self.head - SLACK_BLOCKS <= block < self.frontier + SLACK_BLOCKS


class ReadAhead:
    """The streams, and the bytes that are held for blocks that nobody has asked for yet.

    Attributes:
        budget_bytes: the most that may be held; 0 reads nothing ahead.
        depth_bytes: what is worth holding, at most `budget_bytes`; what is held already may be more.
        streams: newest fetch first; at most MAX_STREAMS.
        used_bytes: the sum over all held slabs; in [0, budget_bytes].
    """

    def __init__(self, budget_bytes: int) -> None:
        """
        Raises:
            ConfigError: the budget is negative.
        """
        if budget_bytes < 0:
            raise ConfigError(f"readahead_bytes must be at least 0, got {budget_bytes}")
        self.budget_bytes = self.depth_bytes = budget_bytes
        self.streams: list[Stream] = []
        self.used_bytes = 0
        self._fetches = 0
        self._held: dict[int, tuple[int, int]] = {}  # slab -> (block, bytes); adds up to used_bytes

    def follow(self, block: int) -> None:
        """Notes that somebody fetched `block`."""
        self._fetches += 1
        owners = [s for s in self.streams if s.owns_fetch(block)]
        # Where two streams overlap, the fetch is the next step of one of them.
        stream = min(owners, key=lambda s: abs(block - s.head - 1), default=Stream(block, block, 0))
        stream.head = max(stream.head, block)
        stream.frontier = max(stream.frontier, block + 1)
        stream.last_fetch = self._fetches
        alive = [s for s in self.streams if s is not stream and self._fetches - s.last_fetch < IDLE_FETCHES]
        self.streams = [stream, *alive][:MAX_STREAMS]

    def retreat(self, block: int) -> None:
        """`block` was scheduled ahead and could not be read: it is to be looked at again."""
        for stream in self.streams:
            if stream.head < block < stream.frontier:
                stream.frontier = block

    def wants(self, block: int) -> bool:
        """Whether some stream is still expected to fetch `block`, which was scheduled ahead."""
        return any(stream.covers(block) for stream in self.streams)

    def fits(self, stream: Stream, nbytes: int) -> bool:
        """Whether so many more bytes may be held for `stream`: within the budget, and an even share of the depth."""
        mine = sum(size for block, size in self._held.values() if stream.covers(block))
        share = self.depth_bytes // len(self.streams)
        return self.used_bytes + nbytes <= self.budget_bytes and (mine == 0 or mine + nbytes <= share)

    def reach(self, depth_bytes: int) -> None:
        """Read so far ahead from now on, within the budget."""
        self.depth_bytes = max(0, min(depth_bytes, self.budget_bytes))

    def hold(self, slab: int, *, block: int, nbytes: int) -> None:
        """Charges a slab that is read ahead for `block`."""
        self._held[slab] = (block, nbytes)
        self.used_bytes += nbytes

    def let_go(self, slab: int) -> None:
        """The slab is asked for, dropped, or part of the cache now; nothing happens if it is not held."""
        self.used_bytes -= self._held.pop(slab, (0, 0))[1]

    def held_slabs(self) -> dict[int, int]:
        """Slab -> bytes of everything that is held."""
        return {slab: nbytes for slab, (_, nbytes) in self._held.items()}

    def validate(self) -> None:
        """
        Raises:
            AssertionError: a sum or an order is wrong.
        """
        assert self.used_bytes == sum(self.held_slabs().values()) <= self.budget_bytes, self._held
        assert 0 <= self.depth_bytes <= self.budget_bytes, self.depth_bytes
        assert len(self.streams) <= MAX_STREAMS
        assert all(s.head < s.frontier <= s.head + 1 + DEPTH_BLOCKS for s in self.streams), self.streams
