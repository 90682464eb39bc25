"""A consumer's end of the protocol: blocks in order, one call in flight ahead, and what it still holds."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas.client.block_view import BlockView
from mbaas.client.figures import StreamStats
from mbaas.client.rpc import CALL_TIMEOUT_S, UnreadableError, bring, call, call_patiently, read
from mbaas.errors import BadSampleError, ConsumerRemovedError, FeedRestartingError, WaitTimeoutError
from mbaas.messages import (
    POLL_S,
    Admission,
    Arrays,
    BadSample,
    ConsumerReport,
    DeliveredBlock,
    DeliveredPart,
    Delivery,
    FeedInfo,
    PartLost,
)

_log = logging.getLogger(__name__)

WANT = 4
"""Blocks that one call may bring; across an epoch's end, which may be the consumer's last, it is one."""

READ_TIMEOUT_S = 30.0
"""A block that cannot be read within so long counts as lost: the node where it lies may be unreachable. It has longer
where it lies on other nodes: as long as it takes at `SLOWEST_LINK`.
"""

SLOWEST_LINK = 1e6
"""Bytes a second that come from another node at least."""

LOOK_S = 2.0
"""A reader that waits for so long asks whether the block is still there."""

UNREAD_S = 0.5
"""Of a lost block, the parts that can be read within so long are not lost."""

TELL_S = 30.0
"""A consumer that has waited for so long says so in its log, and again whenever the wait has doubled."""


def _root(array: NDArray[Any]) -> NDArray[Any]:
    """The array that every view of ``array`` keeps alive: NumPy's views skip the views between them and it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@dataclass(frozen=True)
class Block:
    """A block in the consumer's hands: its number, its samples, and those that were left out as bad."""

    number: int
    samples: BlockView
    bad: tuple[BadSample, ...]


class Stream(Protocol):
    """The blocks of a feed for one consumer, from its cursor on, without end.

    Attributes:
        info: of the feed.
        cursor: the next block that `next` returns.
        done: all blocks below are used up, as the stream's owner says.
    """

    info: FeedInfo
    cursor: int
    done: int

    def next(self) -> Block:
        """The block at the cursor.

        Raises:
            BadSampleError: the block holds a bad sample and the feed's ``on_bad_sample`` is "raise".
            WaitTimeoutError: no block came, and the feed made no progress, for the time that was set.
            FeedFailedError: the feed cannot go on.
        """

    def look_ahead(self) -> None:
        """Called after `next` and between minibatches: begin what can be begun for the next block."""

    def skip_to(self, block: int) -> None:
        """Go on at ``block``, which lies ahead; what was received before it is let go."""

    def held_blocks(self) -> int:
        """Blocks whose arrays are alive in this process."""

    def heartbeat(self, report: ConsumerReport) -> None:
        """Tell the service that this consumer lives and what it holds; called from a thread of its own."""

    def leave(self, report: ConsumerReport | None) -> None:
        """Give the place back."""


class BlockStream:
    """A `Stream` of one lane's own blocks; in most feeds these are all of its blocks.

    Args:
        coordinator: the lane's actor.
        consumer: name; unique among the feed's consumers.
        start: the first block; None for an epoch's beginning.
        flexible: whether ``start`` (an epoch's beginning) may be another epoch's that is shared.
        wait_timeout_s: a wait in which the feed makes no progress ends after so long.
        figures: where waits and bytes are counted.

    Attributes:
        lane: whose own blocks are counted here.
        node: id of the consumer's node.
        want: blocks that one call may bring, but across an epoch's end.
        poll_s: seconds after which a call that brings nothing returns.
        starves: called whenever one did.
    """

    def __init__(
        self,
        coordinator: Any,
        consumer: str,
        *,
        start: int | None,
        flexible: bool,
        wait_timeout_s: float,
        figures: StreamStats,
    ) -> None:
        self._coordinator, self._consumer, self._figures = coordinator, consumer, figures
        self._wait_timeout_s, self.poll_s = wait_timeout_s, min(POLL_S, wait_timeout_s / 2)
        self.want = WANT
        self.starves: Callable[[], None] | None = None
        self._queue: deque[DeliveredBlock] = deque()
        self._is_far = False  # whether the blocks that came last have parts on other nodes
        self._brought: weakref.ref[DeliveredBlock] | None = None  # the last one whose parts were asked of other nodes
        self._held: deque[tuple[int, list[weakref.ref[Any]]]] = deque()
        self._in_flight: Any = None
        self._lock = threading.Lock()
        self._expelled = False
        self.node: str = ray.get_runtime_context().get_node_id()
        self._enter(start, flexible)

    def _enter(self, start: int | None, flexible: bool) -> None:
        admission: Admission = call_patiently(
            lambda: self._coordinator.join.remote(self._consumer, start, flexible),
            CALL_TIMEOUT_S,
            f"consumer {self._consumer!r} joins",
        )
        self.session, self.cursor, self.info = admission.session, admission.cursor, admission.info
        self.lane = admission.lane
        self._received = self.done = self.cursor
        self._expelled = False

    def rejoin(self, start: int, flexible: bool = False) -> None:
        """Open a new session, which begins at block ``start``; what was received ahead is let go."""
        self._queue.clear()
        self._in_flight = None
        self._enter(start, flexible)

    # ---- blocks ----

    def next(self) -> Block:
        """The block at the cursor.

        Raises:
            BadSampleError: the block holds a bad sample and the feed's ``on_bad_sample`` is "raise".
            WaitTimeoutError: no block came, and the feed made no progress, for ``wait_timeout_s``.
            FeedFailedError: the feed cannot go on.
        """
        began = time.perf_counter()
        parts: list[Arrays] | None = None
        while parts is None:
            if not self._queue:
                self._wait()
            block = self._queue[0]
            parts = self._open(block)
        self._figures.block_came(
            began,
            time.perf_counter(),
            fetch_s=sum(part.meta.fetch_s for part in block.parts),
            prep_s=sum(part.meta.prep_s for part in block.parts),
        )
        self._queue.popleft()
        self.cursor = block.number + 1
        self.ask_ahead()
        bad = tuple(bad for part in block.parts for bad in part.meta.bad)
        if not parts:
            raise BadSampleError(bad[0].uri, bad[0].reason)
        return Block(block.number, BlockView(parts), bad)

    def _open(self, block: DeliveredBlock) -> list[Arrays] | None:
        """The arrays of a block's parts, which count as held from here on; empty if the block ended in an error.

        None if they cannot be read because the node where they lay is gone: they are asked for again.
        """
        self._bring(block)
        far_bytes = sum(part.meta.nbytes for part in self._far_parts(block))
        end, arrays = time.monotonic() + READ_TIMEOUT_S + far_bytes / SLOWEST_LINK, None
        while arrays is None:
            try:
                arrays = self._arrays(block, LOOK_S)
            except UnreadableError as error:
                if error.for_good or time.monotonic() > end or self._is_given_up(block):
                    self._ask_again(block)
                    return None
        with self._lock:
            roots = [weakref.ref(_root(array)) for part in arrays for array in part.values()]
            self._held.append((block.number, roots))
        return arrays

    def _arrays(self, block: DeliveredBlock, timeout_s: float) -> list[Arrays]:
        """The arrays of a block's parts, whole; a rank reads less."""
        arrays = read([ref for part in block.parts for ref in part.payload], timeout_s)
        far = sum(part.meta.nbytes for part in self._far_parts(block))
        self._figures.local_bytes += sum(part.meta.nbytes for part in block.parts) - far
        self._figures.remote_bytes += far
        return arrays

    def _is_given_up(self, block: DeliveredBlock) -> bool:
        """Whether the coordinator knows that a part of the block is gone: it knows sooner than Ray tells readers."""
        parts = [(part.number, part.task) for part in block.parts]
        ref = self._coordinator.is_given_up.remote(block.number, parts)
        try:
            return bool(call(ref, CALL_TIMEOUT_S, f"consumer {self._consumer!r} asks after block {block.number}"))
        except FeedRestartingError:
            return True

    def _ask_again(self, block: DeliveredBlock) -> None:
        """Parts of the block cannot be read: have them made again, and go on from there."""
        lost = []
        for part in block.parts:
            try:
                read(part.payload, UNREAD_S)
            except UnreadableError:
                lost.append(PartLost(block.number, part.number, part.task))
        self._queue.clear()
        self._received = block.number
        self._ask(tuple(lost))

    def _wait(self) -> None:
        """Fill the queue."""
        began = since = time.monotonic()
        progress, tell_s = -1, TELL_S
        while not self._queue:
            if self._in_flight is None:
                self._ask()
            ref, self._in_flight = self._in_flight, None
            try:
                delivery: Delivery = call(ref, POLL_S + CALL_TIMEOUT_S, f"consumer {self._consumer!r} asks for blocks")
            except FeedRestartingError:
                self._enter(self._received, False)
                continue
            if delivery.error is not None:
                self._recover(delivery)
            elif delivery.blocks:
                self._take(delivery)
            else:
                if self.starves is not None:
                    self.starves()
                now = time.monotonic()
                if delivery.progress != progress:
                    progress, since = delivery.progress, now
                elif now - since >= self._wait_timeout_s:
                    what = f"{self._waited(self._wait_timeout_s)} and the feed made no progress: {delivery.waits_for}"
                    raise WaitTimeoutError(what)
                if now - began >= tell_s:
                    _log.warning("%s: %s", self._waited(now - began), delivery.waits_for)
                    tell_s *= 2

    def _waited(self, seconds: float) -> str:
        feed, block = self.info.settings.name, self.lane.feed_block(self._received)
        return f"consumer {self._consumer!r} waited {seconds:.3g} s for block {block} of feed {feed!r}"

    def _take(self, delivery: Delivery) -> None:
        self._queue.extend(delivery.blocks)
        self._received = delivery.blocks[-1].number + 1
        self._is_far = any(map(self._far_parts, delivery.blocks))

    def _take_what_came(self) -> None:
        """Take in an answer that is here already; one that brings no blocks is left to `_wait`."""
        if self._queue or self._in_flight is None or not ray.wait([self._in_flight], timeout=0)[0]:
            return
        try:
            delivery: Delivery = ray.get(self._in_flight)
        except ray.exceptions.RayError:
            return
        if delivery.error is None and delivery.blocks and delivery.blocks[0].number == self._received:
            self._in_flight = None
            self._take(delivery)
            self.ask_ahead()

    def _recover(self, delivery: Delivery) -> None:
        """An expelled consumer that is alive after all joins again, exactly where it stands."""
        assert delivery.error is not None
        if not delivery.expelled or not isinstance(delivery.error, ConsumerRemovedError):
            raise delivery.error
        self._enter(self._received, False)

    def _ask(self, lost: tuple[PartLost, ...] = ()) -> None:
        want = 1 if self._received % self.lane.blocks_per_epoch == 0 else self.want
        self._in_flight = self._coordinator.ask.remote(
            self._consumer, self.session, self._received, self.released(), self.done, want, self.poll_s, lost
        )

    def ask_ahead(self) -> None:
        """Have a call in flight, unless there is one, or blocks enough that it brought."""
        if len(self._queue) <= self._spare and self._in_flight is None and not self._expelled:
            self._ask()

    @property
    def _spare(self) -> int:
        """Blocks that are left when more are asked for: one where they come from other nodes, so that it is brought in
        time, but none across an epoch's end, which may be the consumer's last.
        """
        return int(self._is_far and self._received % self.lane.blocks_per_epoch != 0)

    def look_ahead(self) -> None:
        """Have the next block's parts brought from other nodes, if it is known; nothing to do where they lie here."""
        if self._is_far:
            self._take_what_came()
            if self._queue:
                self._bring(self._queue[0])

    def _bring(self, block: DeliveredBlock) -> None:
        """Have parts come from other nodes."""
        if self._brought is None or self._brought() is not block:
            bring([ref for part in self._far_parts(block) for ref in part.payload])
            self._brought = weakref.ref(block)

    def _far_parts(self, block: DeliveredBlock) -> list[DeliveredPart]:
        """The parts of a block that lie on other nodes."""
        return [part for part in block.parts if part.node != self.node]

    def skip_to(self, block: int) -> None:
        """Go on at ``block``, which lies ahead; what was received before it is let go."""
        while self._queue and self._queue[0].number < block:
            self._queue.popleft()
        if not self._queue and self._received < block:
            self._received = block
            self._in_flight = None
        self.cursor = max(self.cursor, block)

    def hand_back(self) -> None:
        """Give up blocks that were received ahead of their use, so that others can have their memory; they will be
        asked for again.
        """
        with self._lock:
            if not self._queue and self._in_flight is None:
                return
            self._queue.clear()
            self._in_flight, self._received = None, self.cursor
        self._coordinator.hand_back.remote(self._consumer, self.session, self.cursor, self.released())

    # ---- what is held ----

    def released(self) -> int:
        """All blocks below are let go: neither queued nor seen by any array that is alive."""
        with self._lock:
            while self._held and all(ref() is None for ref in self._held[0][1]):
                self._held.popleft()
            if self._held:
                return self._held[0][0]
            return self._queue[0].number if self._queue else self._received

    def held_blocks(self) -> int:
        """Blocks whose arrays are alive in this process."""
        self.released()
        return len(self._held)

    # ---- signs of life ----

    def heartbeat(self, report: ConsumerReport) -> None:
        """Tell the coordinator that this consumer lives and what it holds; called from a thread of its own."""
        self.hear_pulse(self.send_pulse(report))

    def send_pulse(self, report: ConsumerReport) -> Any:
        """The first half of a heartbeat; what it returns is for `hear_pulse`."""
        return self._coordinator.heartbeat.remote(self._consumer, self.session, self.released(), self.done, report)

    def hear_pulse(self, ref: Any) -> None:
        """The second half of a heartbeat: what the coordinator says to it."""
        self._expelled = not call(ref, CALL_TIMEOUT_S, f"heartbeat of consumer {self._consumer!r}")

    def leave(self, report: ConsumerReport | None) -> None:
        """Give the place back."""
        self._queue.clear()
        self._in_flight = None
        ref = self._coordinator.leave.remote(self._consumer, self.session, False, report)
        call(ref, CALL_TIMEOUT_S, f"consumer {self._consumer!r} leaves")
