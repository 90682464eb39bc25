"""Events of a feed, and the instructions for its coordinator that follow from them.

Both are plain frozen values, so a schedule of a thousand events can be recorded, replayed and shrunk, and a story can
name the event behind each change. Late or repeated calls and reports are recognised by their session or task number,
and have no effect.

Block numbers count over all epochs, ``epoch * blocks_per_epoch + index``, and tell their stream
(`mbaas.core.staging.streams`). Times are seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from mbaas.core.staging.streams import FEED_STREAM, Stream
from mbaas.samples.order import OwnEpoch, Shuffle
from mbaas.samples.placement import BlockPart

# Calls of consumers are events as they arrive.
from mbaas.wire.blocks import UnreadablePart as UnreadablePart
from mbaas.wire.consumers import Ask as Ask
from mbaas.wire.consumers import HandBack as HandBack
from mbaas.wire.consumers import Heartbeat as Heartbeat
from mbaas.wire.consumers import Leave as Leave
from mbaas.wire.consumers import Resumption


class _Event(Struct, frozen=True):
    """Base of the events that do not arrive as calls of consumers."""


Event: TypeAlias = _Event | UnreadablePart | Ask | HandBack | Heartbeat | Leave


class WorkerUp(_Event, frozen=True):
    """A prep worker is ready on ``node`` and takes up to ``credit`` tasks at a time: one running, the rest queued."""

    worker: str
    credit: int
    node: str = ""


class WorkerDown(_Event, frozen=True):
    """A prep worker is gone, and its unfinished parts must be prepared again.

    With ``blame``, its death counts against the block in progress. A block that causes several deaths fails.
    """

    worker: str
    reason: str
    blame: bool = True


class WorkerLeaves(_Event, frozen=True):
    """A worker should leave: it finishes its tasks and gets no new ones."""

    worker: str


class NodeDown(_Event, frozen=True):
    """A node is gone, with its workers, its consumers and all parts stored on it."""

    node: str
    reason: str


class NodeLeaves(_Event, frozen=True):
    """A node will be gone soon: copy its parts to other nodes while there is time."""

    node: str


class NodeStays(_Event, frozen=True):
    """A node is no longer draining; copying from it stops."""

    node: str


class PartMoved(_Event, frozen=True):
    """The copy of a part is stored on its target node; ``move`` is the number of the `MovePart`."""

    move: int


class PartStays(_Event, frozen=True):
    """A part could not be copied; it will be prepared again when its node is gone."""

    move: int


class Announce(_Event, frozen=True):
    """A trial will join soon: hold a reservation for it, or for its ranks, until the reservation time ends.

    ``others`` is the number of trials that will be announced in a moment. Each gets a reservation next to this one,
    unless there are enough already.
    """

    consumer: str
    others: int = 0


class Join(_Event, frozen=True):
    """A consumer opens session ``session``.

    Attributes:
        start: first block that it needs; None for the start of the nearest epoch that it can share.
        flexible: whether it may also start a later epoch together with others. It may have seen parts of epochs before
            ``start``.
        now: whether it starts immediately where others are, possibly in the middle of their epoch. ``start`` is then
            the end of its last epoch: it starts there, or with others that are past that block.
        resumed: where it continues inside its epoch; ``start`` is then ignored.
        trial: trial of this rank, one of ``world_size``; None for a single consumer. Ranks start each epoch at the end
            of their last one. A rank that moved to share an epoch with others would leave the other ranks' epoch.
        node: id of its node.
        born: creation time of its loader. If two runs of a trial have different numbers of ranks, the younger one
            stays.
        stream: number of the stream of its pipeline.
    """

    consumer: str
    session: int
    start: int | None = None
    flexible: bool = False
    now: bool = False
    resumed: Resumption | None = None
    trial: str | None = None
    world_size: int = 1
    node: str = ""
    born: int = 0
    stream: int = FEED_STREAM

    @property
    def is_exact(self) -> bool:
        """True if it must start exactly at ``start``."""
        return self.start is not None and not self.flexible and not self.now


class OpenStream(_Event, frozen=True):
    """A consumer will join with a pipeline of its own: open this stream for it, unless it is open."""

    stream: Stream


class TrialPace(Struct, frozen=True):
    """Consumers of one trial (its ranks, or the trial itself), and its pace with data always ready."""

    consumers: tuple[str, ...]
    blocks_per_s: float


class PacesMeasured(_Event, frozen=True):
    """Pace of each trial with data always ready, and the maximum speed of prep in blocks/s.

    Both are measured over the last seconds; ``prep_per_s`` is 0 if unknown.
    """

    trials: tuple[TrialPace, ...]
    prep_per_s: float


class TaskEnded(_Event, frozen=True):
    """A task ended: its part is in memory on the worker's node, or the block's consumers must get ``error``.

    Attributes:
        lacks: whether the part was prepared without its bad samples.
        work_s: worker-seconds spent for consumers of this pipeline only, without reading, and without decoding samples
            that are then kept decoded for all; None if not measured.
    """

    task: int
    error: str | None = None
    lacks: bool = False
    work_s: float | None = None


class PutOff(_Event, frozen=True):
    """A task had no result, through no fault of its worker or its data: retry its part after a pause.

    ``reason`` is a clause that names the cause of the wait.
    """

    task: int
    reason: str


class TaskFailed(_Event, frozen=True):
    """A task failed because of a bug in its worker, which is alive, or in a cache node; ``reason`` is a clause."""

    task: int
    reason: str


class EpochsWritten(_Event, frozen=True):
    """Reply to `WriteEpochs`: the shuffles of these epochs are now persisted."""

    epochs: tuple[int, ...]


class Stop(_Event, frozen=True):
    """The feed ends: no block is prepared or delivered any more, and all callers get the reason.

    The reasons are listed in `mbaas.core.cluster.events.FeedEnd`.
    """

    reason: str


class Tick(_Event, frozen=True):
    """Time has passed: check leases, reservations, patience, deadlines and postponed parts."""


class _Instruction(Struct, frozen=True):
    """Base of the instructions that are Structs: all but `Deliver`."""


class Admitted(_Instruction, frozen=True):
    """Answer to a `Join`: the session's first block, and the consumer's epoch."""

    consumer: str
    session: int
    cursor: int
    own_epoch: OwnEpoch


@dataclass(frozen=True)
class Deliver:
    """Deliver these blocks, in this order, to the consumer's waiting call.

    Attributes:
        peer_idle_s: seconds since its last delivery during which other consumers kept prep idle.
        as_copy: whether it must copy the data, because there is not enough room to hold it.
        new: those blocks that no consumer has received before: they were prepared for this one.
    """

    consumer: str
    session: int
    blocks: tuple[int, ...]
    peer_idle_s: float = field(default=0.0, compare=False)
    as_copy: bool = False
    new: tuple[int, ...] = field(default=(), compare=False)


class Prepare(_Instruction, frozen=True):
    """Send a task to a worker: prepare this part of this block."""

    task: int
    worker: str
    block: int
    part: int
    block_part: BlockPart
    shuffle: Shuffle


class DropBlock(_Instruction, frozen=True):
    """Drop the references to a block, so that the object store frees its bytes. It can be prepared again.

    With ``anew``, its bad samples are then tried as if for the first time. ``for_room``: its bytes were needed for
    another block, so it may be prepared again.
    """

    block: int
    anew: bool = False
    for_room: bool = False


class CloseStream(_Instruction, frozen=True):
    """Forget this stream: it has had no consumers for a while."""

    stream: int


class WriteEpochs(_Instruction, frozen=True):
    """Persist the shuffles of a page of epochs where they outlive the coordinator; delete a page without shuffles.

    Until that is done, blocks of the page's new epochs are not delivered.
    """

    page: int
    shuffles: Mapping[int, Shuffle]


class MovePart(_Instruction, frozen=True):
    """Copy a part of a staged block to another node, and report the outcome."""

    move: int
    block: int
    part: int
    node: str


class UsePart(_Instruction, frozen=True):
    """Replace a part by the copy that a `MovePart` made; the copy counts as made by another ``task``."""

    move: int
    block: int
    part: int
    task: int


class ReplaceWorker(_Instruction, frozen=True):
    """Kill this worker and start another: it is past its deadline, or failed several times in a row.

    ``blame`` as in `WorkerDown`.
    """

    worker: str
    reason: str
    blame: bool = True


class ReleaseWorker(_Instruction, frozen=True):
    """Release this worker: it was leaving, and has no tasks left."""

    worker: str


class RemoveConsumer(_Instruction, frozen=True):
    """End this consumer's session; answer its calls with the reason."""

    consumer: str
    session: int
    reason: str


class Refuse(_Instruction, frozen=True):
    """Answer the call with the reason: its session is not open, or the call is not possible."""

    consumer: str
    session: int
    reason: str


class Note(_Instruction, frozen=True):
    """Write a line to the log, for example why a consumer was moved or a worker replaced."""

    text: str


Instruction: TypeAlias = _Instruction | Deliver
