"""A consumer's session in one lane: what it was given, what it holds, and what the coordinator hears of that.

The coordinator keeps a cursor for each session and stages blocks for it. Blocks come several at a call, because a call
costs more than a block; one call is in flight ahead of need. The memory of a block is free again when the consumer says
that it holds it no more, so `LaneSession` knows which arrays are still alive in this process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from msgspec import Struct
from numpy.typing import NDArray

from mbaas import slots
from mbaas.client.block_calls import BlockCalls, NoAnswerYetError, PendingCall
from mbaas.client.lane_position import LanePosition
from mbaas.client.part_fetch import BlockFetch
from mbaas.client.patience import Patience
from mbaas.client.rpc import ANSWER_S, CALL_TIMEOUT_S, await_restart, call, call_patiently
from mbaas.errors import ConsumerRemovedError, FeedRestartingError, MbaasError, WaitTimeoutError
from mbaas.fields import Arrays, memory
from mbaas.messages import (
    POLL_S,
    Admission,
    BlockCall,
    ConsumerName,
    ConsumerReport,
    DeliveredBlock,
    DeliveredPart,
    Delivery,
    JoinRequest,
    Start,
    UnreadablePart,
)
from mbaas.order import Shuffle
from mbaas.units import seconds

_log = logging.getLogger(__name__)

# A coordinator makes about twice as many deliveries a second with four blocks a call as with one; eight add a tenth.
WANTED_BLOCKS = 4
"""Most blocks that one call brings; across an epoch's end, which may be the consumer's last, it is one."""

LEAVE_S = 15.0
"""A consumer that leaves hands in the ledgers of its last epochs, and gives up after this time, in seconds."""

FIRST_WARNING_S = 10.0
"""Wait after which a consumer writes a warning to its log, and again whenever the wait has doubled."""


class Polling(Struct, frozen=True):
    """How a session asks for blocks.

    Attributes:
        wait_timeout_s: the longest wait in which the feed makes no progress.
        blocks: how many one call may bring, except across an epoch's end.
        poll_s: seconds after which a call that brings nothing returns, or half of ``wait_timeout_s`` if that is less.
    """

    wait_timeout_s: float
    blocks: int = WANTED_BLOCKS
    poll_s: float = POLL_S


@dataclass(eq=False)
class ReceivedBlock:
    """A block that was delivered and not used yet, and what was begun to read it, if anything was.

    Both go together: a consumer that lets go of a block received ahead of need lets go of what was fetched of it.

    Attributes:
        peer_idle_s: as in `Delivery`, for the first block of one; 0 for those that came with it.
        as_copy: as in `Delivery`.
    """

    block: DeliveredBlock
    fetch: BlockFetch | None = None
    peer_idle_s: float = 0.0
    as_copy: bool = False

    @property
    def number(self) -> int:
        """The block's, among the lane's own."""
        return self.block.number

    @property
    def shuffle(self) -> Shuffle:
        """How the block's epoch is shuffled."""
        return self.block.shuffle


def _memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array whose memory ``array`` shows; every view keeps it alive, for NumPy skips the views between."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class LaneSession(LanePosition[ReceivedBlock]):
    """Asks one lane's coordinator for blocks, tells it what is used and held, and joins again where that is needed.

    The `LanePosition` says what to ask for.

    A coordinator that was restarted knows no sessions, and a consumer that was silent for too long is expelled while it
    may be alive after all: either way a new session begins exactly where the old one stood.

    Args:
        coordinator: the lane's actor.
        name: who it is; unique among the feed's consumers.
        start: where it begins, in the lane's own blocks.
        polling: how it asks for blocks.
        born: when its loader was made, Unix time in nanoseconds.

    Attributes:
        consumer: its name.
        number: the number of the session, as the coordinator counts.
        info: what the coordinator says of the feed.
        lane: the lane; its own blocks are counted here and below.
        node: id of the consumer's node.
        are_remote: whether the blocks that came last have parts on other nodes.
    """

    def __init__(self, coordinator: Any, name: ConsumerName, *, start: Start, polling: Polling, born: int) -> None:
        super().__init__(polling.blocks)
        self._coordinator, self._name, self._polling = coordinator, name, polling
        self._born, self.consumer, self.moves = born, str(name), name.world_size == 1
        self.node: str = ray.get_runtime_context().get_node_id()
        self._calls = BlockCalls(coordinator, f"consumer {str(name)!r} asks for blocks")
        self._in_flight: PendingCall | None = None  # the one call that asks for blocks
        self._lock = threading.Lock()  # for ``received`` and what is held: the heartbeat's thread looks at them, too
        # half, because two answers must come before the deadline: only their difference shows whether the feed moves on
        self._poll_s = min(polling.poll_s, polling.wait_timeout_s / 2)
        self.are_remote = False
        self._expelled = False
        self.on_renumbered: Callable[[int], None] = lambda _by: None  # told by how much, when blocks are counted anew
        self._join(start, polling.wait_timeout_s)

    def _join(self, start: Start, timeout_s: float) -> None:
        request = JoinRequest(self._name, start, self.node, self._born)
        admission: Admission = call_patiently(
            self._coordinator,
            lambda: self._coordinator.join.remote(request),
            timeout_s,
            f"consumer {self.consumer!r} joins",
        )
        self.number, self.info = admission.session, admission.info
        with self._lock:
            self.enter(admission.cursor, admission.own_epoch, admission.lane, self.info.order.block_samples)
        self._expelled = False
        if start.resumed is not None and start.resumed.taken:
            by = admission.cursor - start.resumed.start
            with self._lock:
                self.resume(start.resumed, by)
            if by:
                self.on_renumbered(by)

    def rejoin(self, start: Start) -> None:
        """Open a new session; what was received ahead is let go."""
        self._in_flight = None
        self._join(start, self._polling.wait_timeout_s)

    # ---- asking for blocks ----

    def wait(self, while_waiting: Callable[[], None] | None = None) -> ReceivedBlock:
        """Return the block at the cursor, as soon as it is there.

        Args:
            while_waiting: called whenever a call brought nothing.

        Raises:
            WaitTimeoutError: no block came, and the feed made no progress, for ``wait_timeout_s``.
            FeedFailedError: the feed cannot go on.
        """
        patience = Patience(self._polling.wait_timeout_s, time.monotonic(), first_word_s=FIRST_WARNING_S)
        while not self.received:
            asked = self._in_flight or self._ask()
            self._in_flight = None  # first: a call that raised must not be waited for again
            try:
                delivery = self._answer(asked, patience)
            except FeedRestartingError as error:
                self._await_return(error, patience)
                continue
            if delivery.error is not None:
                self._recover(delivery, patience)
            elif delivery.blocks:
                self._receive(delivery)
            else:
                self._tell_what_is_given_up()
                if while_waiting is not None:
                    while_waiting()
                now = time.monotonic()
                # only a feed that stands still is given up, not one that is slow
                patience.saw(delivery.progress, now)
                if not patience.left_s(now):
                    raise WaitTimeoutError(
                        f"{self._waited(patience.timeout_s)} and the feed made no progress: {delivery.waits_for}"
                    )
                if patience.is_to_be_told(now):
                    _log.warning("%s: %s", self._waited(patience.waited_s(now)), delivery.waits_for)
        return self.received[0]

    def _answer(self, asked: PendingCall, patience: Patience) -> Delivery:
        """Return what the coordinator answers; a silent one is waited for, and told to the log, as long as any is."""
        now = time.monotonic()
        late, pause_s = now + self._poll_s + ANSWER_S, min(self._poll_s, patience.left_s(now)) + ANSWER_S
        while True:
            # Without a look before it, which would be one more round through Ray for each block.
            with contextlib.suppress(NoAnswerYetError):
                return asked.result(pause_s)
            now = time.monotonic()
            end_s = patience.left_s(now - ANSWER_S)
            if not end_s:
                raise WaitTimeoutError(
                    f"{self._waited(patience.waited_s(now))}: the feed's coordinator does not answer"
                )
            if now >= late:
                asked.lose_socket()
            if now >= late and patience.is_to_be_told(now):
                _log.warning("%s: the feed's coordinator does not answer", self._waited(patience.waited_s(now)))
            pause_s = min(end_s, max(patience.until_word_s(now), late - now))

    def _await_return(self, error: FeedRestartingError, patience: Patience) -> None:
        """Join again as soon as a coordinator that starts, or is being restarted, is there."""
        now = time.monotonic()
        if not patience.left_s(now):  # also of one that comes back and is gone again, however often
            raise FeedRestartingError(f"{self._waited(patience.waited_s(now))}: {error}") from error
        await_restart(self._coordinator, now + patience.left_s(now))
        self._join(self.start_at(self.following), patience.left_s(time.monotonic()))

    def _waited(self, waited_s: float) -> str:
        feed, block = self.info.settings.name, self.lane.feed_block(self.following)
        return f"consumer {self.consumer!r} waited {seconds(waited_s)} for block {block} of feed {feed!r}"

    def _recover(self, delivery: Delivery, patience: Patience) -> None:
        """Join again if this consumer was expelled; raise any other error."""
        assert delivery.error is not None
        if not delivery.expelled or not isinstance(delivery.error, ConsumerRemovedError):
            raise delivery.error
        self._join(self.start_at(self.following), patience.left_s(time.monotonic()))

    def _receive(self, delivery: Delivery) -> None:
        received = [ReceivedBlock(block, as_copy=delivery.as_copy) for block in delivery.blocks]
        received[0].peer_idle_s = delivery.peer_idle_s
        self.take_in(received)
        self.are_remote = any(map(self.remote_parts, delivery.blocks))

    def take_in_early(self) -> None:
        """Take in an answer that is here already, without waiting; one that brings no blocks is left to `wait`."""
        if self.received or self._in_flight is None or not self._in_flight.is_answered():
            return
        try:
            delivery = self._in_flight.result(0.0)
        except (ray.exceptions.RayError, MbaasError, NoAnswerYetError):  # `wait` meets it again, and knows what to do
            return
        if delivery.error is None and delivery.blocks and delivery.blocks[0].number == self.following:
            self._in_flight = None
            self._receive(delivery)
            self.ask_ahead()

    def _ask(self, unreadable: tuple[UnreadablePart, ...] = ()) -> PendingCall:
        asked = BlockCall(
            self.consumer,
            self.number,
            self.following,
            self.released(),
            self.done,
            self.want,
            self._poll_s,
            unreadable,
            self.next_call(),
            self.began,
            self.unheld(),
        )
        self._in_flight = self._calls.make(asked)
        return self._in_flight

    def ask_ahead(self) -> None:
        """Have a call in flight, unless there is one, or blocks enough that it brought."""
        if self.runs_short(are_remote=self.are_remote) and self._in_flight is None and not self._expelled:
            self._ask()

    def remote_parts(self, block: DeliveredBlock) -> list[DeliveredPart]:
        """Return the parts of a block that lie on other nodes."""
        return [part for part in block.parts if part.node != self.node]

    # ---- blocks that cannot be read ----

    def is_given_up(self, block: DeliveredBlock) -> bool:
        """Ask the coordinator whether a part of the block is gone: it knows sooner than Ray tells readers."""
        parts = [(part.number, part.task) for part in block.parts]
        ref = self._coordinator.is_given_up.remote(block.number, parts)
        try:
            what = f"consumer {self.consumer!r} asks after block {block.number}"
            return bool(call(ref, self._polling.wait_timeout_s + ANSWER_S, what))
        except FeedRestartingError:  # nothing that it staged before is known to it now
            return True

    def ask_again(self, block: DeliveredBlock, unreadable: Iterable[DeliveredPart]) -> None:
        """Go back to a block that was received: have its unreadable parts made again."""
        self.go_back(block.number)
        self._ask(tuple(UnreadablePart(block.number, part.number, part.task) for part in unreadable))

    # ---- using blocks, and letting go of them ----

    def hold_arrays(self, block: int, parts: list[Arrays]) -> None:
        """Count a block as held from here on, as long as any array of its parts is alive, or a view of one."""
        # No hook of Ray says when a process drops its last view of an object, but NumPy's arrays can be watched.
        refs = [weakref.ref(_memory_of(each)) for part in parts for column in part.values() for each in memory(column)]
        with self._lock:
            self.hold(block, lambda: any(ref() is not None for ref in refs))

    def advance(self) -> None:
        """Move the cursor past the block that stands there, which was read."""
        self.move_on()
        self.ask_ahead()

    def skip_to(self, block: int) -> None:
        """Go on at ``block``, which lies ahead; what was received before it is let go."""
        if self.leap(block):
            self._in_flight = None
            self._tell_what_is_given_up()

    def hand_back(self) -> None:
        """Give up blocks that were received ahead of their use, so that others can have their memory; they will be
        asked for again.
        """
        with self._lock:
            if not self.received and self._in_flight is None:
                return
            self._in_flight = None
            self.give_up_received()
        self._tell_what_is_given_up()

    def _tell_what_is_given_up(self) -> None:
        # nobody waits for the answer: a call that is lost is made again when a wait has brought nothing
        if self.given_up is not None:
            number = self.next_call()
            self._coordinator.hand_back.remote(self.consumer, self.number, self.given_up, self.released(), number)

    def released(self) -> int:
        """See `LanePosition.released`; any thread may ask."""
        with self._lock:
            return super().released()

    def unheld(self) -> tuple[int, int] | None:
        """See `LanePosition.unheld`."""
        with self._lock:
            return super().unheld()

    # ---- signs of life ----

    def send_heartbeat(self, report: ConsumerReport) -> Any:
        """Tell the coordinator that this consumer lives and what it holds; the result is for `hear_heartbeat`.

        Two halves, so that a consumer of several lanes sends to all of them before it waits for the first answer.
        """
        return self._coordinator.heartbeat.remote(self.consumer, self.number, self.released(), self.done, report)

    def hear_heartbeat(self, ref: Any) -> None:
        """Take in what the coordinator answered: whether this session is still open."""
        # Only noted: this is the heartbeat's thread. The trial's own thread joins again when it asks for a block.
        self._expelled = not call(ref, CALL_TIMEOUT_S, f"heartbeat of consumer {self.consumer!r}")

    def leave(self, report: ConsumerReport | None) -> None:
        """End the session; what was received ahead is let go."""
        self.received.clear()
        slots.forget_all()
        self._in_flight = None
        self._calls.close()
        what = f"consumer {self.consumer!r} leaves"

        def ask() -> Any:
            return self._coordinator.leave.remote(self.consumer, self.number, 0, report)

        if report is not None and report.ledgers:  # a coordinator that is restarting takes them when it is back
            call_patiently(self._coordinator, ask, LEAVE_S, what)
        else:
            call(ask(), CALL_TIMEOUT_S, what)
