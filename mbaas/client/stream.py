"""The blocks of a feed, in order, for one consumer: requests and reads them, and reports its use of them.

The coordinator keeps a cursor for each session and stages blocks for it. One call returns several blocks, because a
call costs more than a block, and one call is in flight ahead of need. A block's memory is freed once the consumer
reports that it holds the block no longer, so `Stream` tracks which arrays are still alive in this process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.base.units import seconds
from mbaas.calls import encoding
from mbaas.calls.client import (
    ANSWER_S,
    CALL_TIMEOUT_S,
    BlockCalls,
    NoAnswerYetError,
    PendingCall,
    await_restart,
    call,
    call_patiently,
)
from mbaas.client.batches import BlockView, RecycledMemory, private
from mbaas.client.join import PickledPipeline
from mbaas.client.part_fetch import FetchPlan, PartFetch, unreadable_parts
from mbaas.client.position import Position
from mbaas.client.sharding import RankSharding
from mbaas.client.stalls import Patience, StreamStats
from mbaas.errors import ConsumerRemovedError, FeedRestartingError, MbaasError, WaitTimeoutError
from mbaas.memory import slots
from mbaas.memory.part_memory import UnreadableError
from mbaas.samples.fields import Arrays, memory
from mbaas.samples.order import OwnEpoch, Shuffle
from mbaas.wire import consumers as wire
from mbaas.wire.blocks import DeliveredBlock, DeliveredPart, UnreadablePart
from mbaas.wire.consumers import POLL_S, ConsumerName, ConsumerReport, Delivery, Start
from mbaas.wire.samples import BadSample

_log = logging.getLogger(__name__)

# A coordinator makes about twice as many deliveries per second with four blocks a call as with one; eight add a tenth.
WANTED_BLOCKS = 4
"""Most blocks per call. It is one across an epoch's end, which may be the consumer's last."""

LEAVE_S = 15.0
"""Timeout for a leaving consumer to hand in the ledgers of its last epochs, in seconds."""

FIRST_WARNING_S = 10.0
"""Wait in seconds before a consumer logs a warning; it logs another each time the wait has doubled."""


LOCAL_READ_S = 5.0
"""Timeout to read a block on the reader's own node, in seconds. It normally takes milliseconds.

If several threads of a process read blocks, Ray 2.60 occasionally loses a part for one thread, and getting it never
ends. This happens once in 15,000 to 20,000 blocks of four threads. A second request succeeds.
"""

REMOTE_READ_S = 30.0
"""Timeout in seconds for a block with parts on other nodes, plus transfer time at `SLOWEST_LINK_BYTES_PER_S`."""

SLOWEST_LINK_BYTES_PER_S = 1e6
"""A slower link between nodes counts as broken."""

LOOK_S = 2.0
"""Period in seconds at which a waiting reader checks that the block still exists."""


class Block(Struct, frozen=True):
    """A block of a consumer's own epoch, read by it; ``bad`` lists the samples left out of ``samples``."""

    number: int
    shuffle: Shuffle
    own_epoch: OwnEpoch
    samples: BlockView
    bad: tuple[BadSample, ...]


@dataclass(eq=False)
class ReceivedBlock:
    """A delivered block that was not used yet, with its fetch if one has started.

    Dropping a block received ahead also drops its fetch. ``peer_idle_s`` is as in `Delivery` for the first block of a
    delivery, and 0 for the others; ``as_copy`` is as in `Delivery`.
    """

    block: DeliveredBlock
    fetch: PartFetch | None = None
    peer_idle_s: float = 0.0
    as_copy: bool = False

    @property
    def number(self) -> int:
        """The block's number."""
        return self.block.number

    @property
    def shuffle(self) -> Shuffle:
        """The shuffle of the block's epoch."""
        return self.block.shuffle


def _memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array that owns the memory of ``array``. NumPy views refer to it directly and keep it alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _parts_of(block: DeliveredBlock, parts: Iterable[DeliveredPart]) -> tuple[UnreadablePart, ...]:
    return tuple(UnreadablePart(block.number, part.number, part.task) for part in parts)


class Stream(Position[ReceivedBlock]):
    """The endless sequence of a feed's blocks for one consumer, from its cursor on.

    The `Position` decides what to request. A restarted coordinator has no sessions, and a consumer that was silent
    for too long is expelled even if it is alive. In both cases a new session begins exactly at the old position.

    Args:
        sharding: this object renumbers its blocks when it joins again. The caller does so after the first join.
        stats: counts waits and reads.
        pipeline: the consumer's own pipeline; None for the feed's.
        wait_timeout_s: longest wait without progress of the feed, in seconds.
        born: creation time of its loader, Unix time in nanoseconds.
    """

    def __init__(
        self,
        coordinator: Any,
        name: ConsumerName,
        sharding: RankSharding,
        stats: StreamStats,
        *,
        pipeline: PickledPipeline | None = None,
        start: Start,
        wait_timeout_s: float,
        born: int,
    ) -> None:
        super().__init__(WANTED_BLOCKS)
        self._coordinator, self._name, self._wait_timeout_s = coordinator, name, wait_timeout_s
        self._sharding, self._stats, self._pipeline = sharding, stats, pipeline
        self._born, self.consumer, self.moves = born, str(name), name.world_size == 1
        self.node: str = ray.get_runtime_context().get_node_id()
        self._calls = BlockCalls(coordinator, f"consumer {self.consumer!r} asks for blocks")
        self._in_flight: PendingCall | None = None  # the one pending call for blocks
        self._lock = threading.Lock()  # for ``received`` and held blocks, which the heartbeat's thread reads too
        # Half, because two answers must arrive before the deadline: only their difference shows progress of the feed.
        self._poll_s = min(POLL_S, wait_timeout_s / 2)
        self.are_remote = False  # the last delivery has parts on other nodes
        self._copies = RecycledMemory(free_pieces=1)  # a block is large
        self._expelled = False
        # Called with the offset when blocks are renumbered. Does nothing at first: the caller may repeat the first join
        # with the same sharding, which must not be renumbered twice.
        self._renumber: Callable[[int], None] = lambda _by: None
        self._join(start, wait_timeout_s)
        self._renumber = sharding.renumber

    def _join(self, start: Start, timeout_s: float) -> None:
        fingerprint = ""
        if self._pipeline is not None:  # again each time: a feed forgets pipelines that nobody has used for a while
            self._pipeline.register(self._coordinator, self._name, timeout_s)
            fingerprint = self._pipeline.fingerprint
        request = encoding.encode(wire.JoinRequest(self._name, start, self.node, self._born, fingerprint))
        admission: wire.Admission = self._call_patiently("join", request, timeout_s, "joins")
        self.number, self.info = admission.session, admission.info
        order = self.info.order
        with self._lock:
            epoch = admission.own_epoch, order.blocks_per_epoch, order.block_samples
            self.enter(admission.cursor, *epoch, requested=start.block)
        self._expelled = False
        if start.resumed is not None and start.resumed.taken:
            by = admission.cursor - start.resumed.start
            with self._lock:
                self.resume(start.resumed, by)
            if by:
                self._renumber(by)

    def _call_patiently(self, method: str, message: bytes, timeout_s: float, what: str) -> Any:
        return call_patiently(
            self._coordinator,
            lambda: getattr(self._coordinator, method).remote(message),
            timeout_s,
            f"consumer {self.consumer!r} {what}",
        )

    def rejoin(self, start: Start) -> None:
        """Open a new session; drop the blocks received ahead."""
        self._in_flight = None
        self._join(start, self._wait_timeout_s)

    # ---- blocks ----

    def next(self) -> Block:
        """Wait for the block at the cursor, return it, and move the cursor past it.

        Raises:
            BadSampleError: the block contains a bad sample and the feed's ``on_bad_sample`` is "raise".
            WaitTimeoutError: no block arrived, and the feed made no progress, within the timeout.
            FeedFailedError: the feed cannot continue.
        """
        began = time.perf_counter()
        arrays: list[Arrays] | None = None
        while arrays is None:
            received = self._wait()
            arrays = self._read(received)
        block, metas = received.block, [part.meta for part in received.block.parts]
        self._stats.block_came(
            began,
            time.perf_counter(),
            fetch_s=sum(meta.fetch_s for meta in metas),
            prep_s=sum(meta.prep_s for meta in metas),
            peer_idle_s=received.peer_idle_s,
        )
        self._stats.prepared += block.is_new * sum(meta.samples for meta in metas)
        self.move_on()  # also past a block that ended in an error: a trial that catches the error may continue
        self._ask_ahead()
        if block.error is not None:
            raise copy(block.error)  # this frame refers to the block: the error itself would make a cycle
        bad = tuple(bad for meta in metas for bad in meta.bad)
        samples = BlockView(arrays, are_private=received.as_copy)
        return Block(block.number, block.shuffle, self.own_epoch_of(block.number), samples, bad)

    def look_ahead(self) -> None:
        """Start copying remote parts of the next block, if it is known. Called after `next` and between minibatches."""
        if self.are_remote:
            self._take_in_early()
            if self.received:
                self._fetch(self.received[0])

    def skip_to(self, block: int) -> None:
        """Continue at the later block ``block``; drop blocks received before it."""
        if self.leap(block):
            self._in_flight = None
            self._tell_what_is_given_up()

    def skip_epoch(self) -> None:
        """Skip the rest of the current epoch, if the consumer has received any block in it."""
        own = self.own_epoch_of(self.cursor)
        if self.cursor > own.first:
            self.skip_to(own.end)

    def released(self) -> int:
        """See `Position.released`; thread-safe."""
        with self._lock:
            return super().released()

    def unheld(self) -> tuple[int, int] | None:
        """See `Position.unheld`."""
        with self._lock:
            return super().unheld()

    # ---- requesting blocks ----

    def _wait(self) -> ReceivedBlock:
        """Return the block at the cursor, waiting until it is available."""
        patience = Patience(self._wait_timeout_s, time.monotonic(), first_word_s=FIRST_WARNING_S)
        while not self.received:
            asked = self._in_flight or self._ask()
            self._in_flight = None  # first: a call that raised must not be awaited again
            try:
                delivery = self._answer(asked, patience)
            except FeedRestartingError as error:
                now = time.monotonic()
                if not patience.left_s(now):  # also ends a series of restarts
                    raise FeedRestartingError(f"{self._waited(patience.waited_s(now))}: {error}") from error
                await_restart(self._coordinator, now + patience.left_s(now))
                self._join_again(patience)
                continue
            if delivery.error is not None:
                if not delivery.expelled or not isinstance(delivery.error, ConsumerRemovedError):
                    raise delivery.error
                self._join_again(patience)
            elif delivery.blocks:
                self._receive(delivery)
            else:
                self._tell_what_is_given_up()
                now = time.monotonic()
                # time out only if the feed stalls, not if it is slow
                patience.saw(delivery.progress, now)
                if not patience.left_s(now):
                    raise WaitTimeoutError(
                        f"{self._waited(patience.timeout_s)} and the feed made no progress: {delivery.waits_for}"
                    )
                if patience.is_to_be_told(now):
                    _log.warning("%s: %s", self._waited(patience.waited_s(now)), delivery.waits_for)
        return self.received[0]

    def _join_again(self, patience: Patience) -> None:
        self._join(self.start_at(self.following), patience.left_s(time.monotonic()))

    def _answer(self, asked: PendingCall, patience: Patience) -> Delivery:
        """Return the coordinator's answer. Wait for a silent coordinator as for blocks, with warnings in the log."""
        now = time.monotonic()
        late, pause_s = now + self._poll_s + ANSWER_S, min(self._poll_s, patience.left_s(now)) + ANSWER_S
        while True:
            # Do not check first, which would be one more round trip through Ray per block.
            with contextlib.suppress(NoAnswerYetError):
                return asked.result(pause_s)
            now = time.monotonic()
            end_s, silent = patience.left_s(now - ANSWER_S), "the feed's coordinator does not answer"
            if not end_s:
                raise WaitTimeoutError(f"{self._waited(patience.waited_s(now))}: {silent}")
            if now >= late:
                asked.lose_socket()
            if now >= late and patience.is_to_be_told(now):
                _log.warning("%s: %s", self._waited(patience.waited_s(now)), silent)
            pause_s = min(end_s, max(patience.until_word_s(now), late - now))

    def _waited(self, waited_s: float) -> str:
        feed = self.info.settings.name
        return f"consumer {self.consumer!r} waited {seconds(waited_s)} for block {self.following} of feed {feed!r}"

    def _receive(self, delivery: Delivery) -> None:
        received = [ReceivedBlock(block, as_copy=delivery.as_copy) for block in delivery.blocks]
        received[0].peer_idle_s = delivery.peer_idle_s
        self.take_in(received)
        self.are_remote = any(map(self._remote_parts, delivery.blocks))

    def _take_in_early(self) -> None:
        """Process a pending answer with blocks if it has arrived, without waiting. Leave other answers to `_wait`."""
        if self.received or self._in_flight is None or not self._in_flight.is_answered():
            return
        try:
            delivery = self._in_flight.result(0.0)
        except (ray.exceptions.RayError, MbaasError, NoAnswerYetError):  # `_wait` meets the same error and handles it
            return
        if delivery.error is None and delivery.blocks and delivery.blocks[0].number == self.following:
            self._in_flight = None
            self._receive(delivery)
            self._ask_ahead()

    def _ask(self, unreadable: tuple[UnreadablePart, ...] = ()) -> PendingCall:
        asked = wire.Ask(
            self.consumer,
            self.number,
            self.following,
            self.released(),
            self.done,
            self.want,
            self.next_call(),
            self.began,
            self.unheld(),
        )
        self._in_flight = self._calls.make(wire.BlockCall(asked, self._poll_s, unreadable))
        return self._in_flight

    def _ask_ahead(self) -> None:
        """Start a call for blocks, unless one is pending or enough blocks are received."""
        if self.runs_short(are_remote=self.are_remote) and self._in_flight is None and not self._expelled:
            self._ask()

    def _tell_what_is_given_up(self) -> None:
        # The answer is not awaited: a lost call is repeated after the next wait without blocks.
        if self.given_up is not None:
            returned = wire.HandBack(self.consumer, self.number, self.given_up, self.released(), self.next_call())
            self._coordinator.hand_back.remote(encoding.encode(returned))

    # ---- reading blocks ----

    def _read(self, received: ReceivedBlock) -> list[Arrays] | None:
        """Return the arrays of a block's parts; one part without samples if the block could not be made.

        Unless they are copies, the block counts as held from here on, while any of them or a view of one is alive.
        Return None if they cannot be read because their node is gone; they are then requested again.
        """
        block = received.block
        parts: list[Arrays] | None = None
        end = time.monotonic() + _longest_read_s(self._remote_parts(block))
        while parts is None:
            try:
                parts, read_bytes = self._fetch(received).read(LOOK_S)
            except UnreadableError as error:
                # Ray takes long to give up an unreachable node; the coordinator detects it sooner.
                if error.for_good or time.monotonic() > end or self._is_given_up(block):
                    unreadable = unreadable_parts(block)
                    self.go_back(block.number)
                    self._ask(_parts_of(block, unreadable))
                    return None
        self._stats.read_bytes += read_bytes
        if received.as_copy:
            return [{name: private(column, self._copies) for name, column in part.items()} for part in parts]
        # Ray has no hook for the last view of an object in a process, but NumPy arrays can be watched.
        refs = [weakref.ref(_memory_of(each)) for part in parts for column in part.values() for each in memory(column)]
        with self._lock:
            self.hold(block.number, lambda: any(ref() is not None for ref in refs))
        return parts

    def _fetch(self, received: ReceivedBlock) -> PartFetch:
        """Start reading a block unless that has begun."""
        if received.fetch is None:
            received.fetch = self._begin_fetch(received.block)
        return received.fetch

    def _begin_fetch(self, block: DeliveredBlock) -> PartFetch:
        own = [part for part in block.parts if part.node == self.node]
        return PartFetch(FetchPlan(own, self._remote_parts(block)), self.info.spec)

    def _remote_parts(self, block: DeliveredBlock) -> list[DeliveredPart]:
        return [part for part in block.parts if part.node != self.node]

    def _is_given_up(self, block: DeliveredBlock) -> bool:
        """Return whether a part of the block is gone. The coordinator detects this sooner than Ray reports it."""
        asked = wire.PartsCall(self.consumer, self.number, _parts_of(block, block.parts))
        ref = self._coordinator.is_given_up.remote(encoding.encode(asked))
        try:
            what = f"consumer {self.consumer!r} asks after block {block.number}"
            return bool(call(ref, self._wait_timeout_s + ANSWER_S, what))
        except FeedRestartingError:  # a restarted coordinator has lost everything staged before
            return True

    # ---- reports ----

    def heartbeat(self, report: ConsumerReport) -> None:
        """Send a heartbeat with the released blocks and a report, and wait for the answer. For another thread."""
        sent = wire.Heartbeat(self.consumer, self.number, self.released(), self.done)
        ref = self._coordinator.heartbeat.remote(encoding.encode(sent), encoding.encode(report))
        # Only recorded, because this is the heartbeat's thread. The trial's thread joins again when it next requests a
        # block.
        self._expelled = not call(ref, CALL_TIMEOUT_S, f"heartbeat of consumer {self.consumer!r}")

    def leave(self, report: ConsumerReport) -> None:
        """End the session; drop the blocks received ahead."""
        self.received.clear()
        slots.forget_all()
        self._in_flight = None
        self._calls.close()
        what = f"consumer {self.consumer!r} leaves"

        def ask() -> Any:
            left = encoding.encode(wire.Leave(self.consumer, self.number))
            return self._coordinator.leave.remote(left, encoding.encode(report))

        if report.ledgers:  # a restarting coordinator accepts them when it is back
            call_patiently(self._coordinator, ask, LEAVE_S, what)
        else:
            call(ask(), CALL_TIMEOUT_S, what)


def _longest_read_s(remote: Sequence[DeliveredPart]) -> float:
    if not remote:
        return LOCAL_READ_S
    return REMOTE_READ_S + sum(part.meta.nbytes for part in remote) / SLOWEST_LINK_BYTES_PER_S
