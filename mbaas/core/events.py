"""What can happen to a feed (events), and what its coordinator must then do (instructions).

Both are plain frozen values, so a schedule of a thousand events can be written down, replayed and shrunk, and a story
can say which event a change followed from. Calls and reports that come late, or twice, are known by their session or
task number, and change nothing. Block numbers count over all epochs: ``epoch * blocks_per_epoch + index``. Times are
seconds on any clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from mbaas.messages import Resumption
from mbaas.messages import UnreadablePart as UnreadablePart
from mbaas.order import OwnEpoch, Shuffle
from mbaas.placement import BlockPart


class WorkerUp(Struct, frozen=True):
    """A prep worker is ready on ``node`` and takes up to ``credit`` tasks at a time: one running, the rest queued."""

    worker: str
    credit: int
    node: str = ""


class WorkerDown(Struct, frozen=True):
    """A prep worker is gone; whatever it was making must be made again.

    With ``blame`` the block that it was making is charged with its death: one over which several die is bad itself.
    """

    worker: str
    reason: str
    blame: bool = True


class WorkerLeaves(Struct, frozen=True):
    """A worker is to go: it finishes what it has in hand and gets nothing new."""

    worker: str


class NodeDown(Struct, frozen=True):
    """A node is gone: its workers, its consumers, and all parts of blocks that lay there."""

    node: str
    reason: str


class NodeLeaves(Struct, frozen=True):
    """A node will be gone soon: what lies there is copied to others, as far as there is time."""

    node: str


class NodeStays(Struct, frozen=True):
    """A node that was to leave stays after all: nothing more is copied from it."""

    node: str


class PartMoved(Struct, frozen=True):
    """A copy of a part lies on the node where it was to go; ``move`` is the number of the `MovePart`."""

    move: int


class PartStays(Struct, frozen=True):
    """A part could not be copied; it is made again when its node is gone."""

    move: int


class Announce(Struct, frozen=True):
    """A trial will join soon: hold a reservation for it, or its ranks, at most until the reservation time is over.

    ``others`` tells how many more will be announced in a moment: a place beside it is held for each of them, unless
    places are held for all.
    """

    consumer: str
    others: int = 0


class Join(Struct, frozen=True):
    """A consumer opens session ``session``.

    ``start`` is the block it needs first. None means "an epoch's beginning": the nearest one that is shared. With
    ``flexible`` it begins there, or where others begin a later epoch; of those before it may have had something. With
    ``now`` it begins at once wherever others are, in the middle of their epoch if need be; a ``start`` is then where
    its last epoch ended: it begins there, or where others are who have that behind them. ``resumed`` says where it goes
    on in the middle of its own epoch; then nothing else of the start matters.

    ``trial`` says whose rank it is, one of ``world_size``; None if it is a trial by itself. Ranks begin each epoch
    where their last one ended: one that began elsewhere, to share it with others, would be in another epoch than the
    other ranks. ``node`` is where it runs, and ``born`` when its loader was made: of two runs of a trial with different
    numbers of ranks the younger one stays.
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

    @property
    def is_exact(self) -> bool:
        """Whether it begins at ``start`` and nowhere else."""
        return self.start is not None and not self.flexible and not self.now


class Ask(Struct, frozen=True):
    """A consumer wants up to ``want`` blocks from ``cursor`` on.

    It has used up all blocks below ``done``, and let go of the memory of all below ``released``. ``number`` counts what
    a session says of its cursor, so that a call which was overtaken by a later one changes nothing; 0 for no number.
    ``began`` is the first block of its own epoch in which it is then; None if it has no own view of that. ``unheld``
    is a range, first and end, of blocks between ``released`` and ``cursor`` that it has read and holds nothing of.
    """

    consumer: str
    session: int
    cursor: int
    released: int
    done: int
    want: int = 1
    number: int = 0
    began: int | None = None
    unheld: tuple[int, int] | None = None


class HandBack(Struct, frozen=True):
    """A consumer gives up what it was given from ``cursor`` on and did not use; it will ask again when it needs it.

    ``number`` as in `Ask`.
    """

    consumer: str
    session: int
    cursor: int
    released: int
    number: int = 0


class HoldReservations(Struct, frozen=True):
    """The first lane holds these reservations, (name, block), and no others: hold the same ones here."""

    reservations: frozenset[tuple[str, int]]


class Heartbeat(Struct, frozen=True):
    """A consumer is alive (it may be busy with a long step); ``released`` and ``done`` as in `Ask`."""

    consumer: str
    session: int
    released: int
    done: int


class DetachedElsewhere(Struct, frozen=True):
    """Another lane moved a consumer to a cohort of its own, because it kept others waiting there: do so here, too."""

    consumer: str


class TrialPace(Struct, frozen=True):
    """The consumers that are one trial's (its ranks, or the trial itself), and how fast it goes with data ready."""

    consumers: tuple[str, ...]
    blocks_per_s: float


class PacesMeasured(Struct, frozen=True):
    """How fast trials would go if their data were always ready, and how many blocks/s prep makes at most.

    Both as measured over the last seconds; ``prep_per_s`` is 0 while that is not known.
    """

    trials: tuple[TrialPace, ...]
    prep_per_s: float


class Leave(Struct, frozen=True):
    """A consumer is done. ``session`` None ends whatever session it has, and if it is a trial, those of its ranks.

    ``successors`` tells how many trials are still to come: a place is held for one of them, unless places are held for
    all. It is at the beginning of the next epoch; where this one ended, if trials begin at once.
    """

    consumer: str
    session: int | None = None
    successors: int = 0


class TaskEnded(Struct, frozen=True):
    """A task ended: its part lies in the memory of the worker's node, or consumers of the block must see ``error``.

    With ``lacks`` bad samples were left out of the part.
    """

    task: int
    error: str | None = None
    lacks: bool = False


class PutOff(Struct, frozen=True):
    """A task came to nothing, through no fault of its worker or its data: its part is to be tried again a little later.

    ``reason`` is a clause that says what it waits for.
    """

    task: int
    reason: str


class TaskFailed(Struct, frozen=True):
    """A task ended in a bug, of its worker, which lives, or of a cache node; ``reason`` is a clause that says which."""

    task: int
    reason: str


class EpochsWritten(Struct, frozen=True):
    """How these epochs are shuffled is written down: see `WriteEpochs`."""

    epochs: tuple[int, ...]


class Stop(Struct, frozen=True):
    """The feed ends: nothing is made or handed out any more, and whoever waits, or comes later, gets the reason.

    The reasons are listed in `mbaas.core.cluster_events.FeedEnd`.
    """

    reason: str


class Tick(Struct, frozen=True):
    """Time has passed: leases, reservation times, patience, deadlines and parts that were put off are looked at."""


Event: TypeAlias = (
    WorkerUp
    | WorkerDown
    | WorkerLeaves
    | NodeDown
    | NodeLeaves
    | NodeStays
    | PartMoved
    | PartStays
    | UnreadablePart
    | Announce
    | HoldReservations
    | Join
    | Ask
    | HandBack
    | Heartbeat
    | DetachedElsewhere
    | PacesMeasured
    | Leave
    | TaskEnded
    | PutOff
    | TaskFailed
    | EpochsWritten
    | Stop
    | Tick
)


class Admitted(Struct, frozen=True):
    """Answer to a `Join`: the session's first block, and where the consumer's own epoch lies."""

    consumer: str
    session: int
    cursor: int
    own_epoch: OwnEpoch


@dataclass(frozen=True)
class Deliver:
    """Hand these blocks, in this order, to the consumer's waiting call.

    Attributes:
        peer_idle_s: seconds since it was given blocks last in which prep was idle because of other consumers.
        as_copy: whether it must copy what it reads, and hold nothing of it: there is no memory for that.
        new: those of the blocks that nobody was given before: they were prepared for this consumer.
    """

    consumer: str
    session: int
    blocks: tuple[int, ...]
    peer_idle_s: float = field(default=0.0, compare=False)
    as_copy: bool = False
    new: tuple[int, ...] = field(default=(), compare=False)


class Prepare(Struct, frozen=True):
    """Send a task to a worker: make this part of this block."""

    task: int
    worker: str
    block: int
    part: int
    block_part: BlockPart
    shuffle: Shuffle


class DropBlock(Struct, frozen=True):
    """Let go of the block's references, so that the object store has its bytes back. It can be made again.

    With ``anew`` samples that were left out of it are then tried as if for the first time.
    """

    block: int
    anew: bool = False


class WriteEpochs(Struct, frozen=True):
    """Write down how the epochs of a page are shuffled, where it outlives the coordinator; delete a page without any.

    Until that is done, no block of the epochs that are new on it is given to anybody.
    """

    page: int
    shuffles: Mapping[int, Shuffle]


class MovePart(Struct, frozen=True):
    """Copy a part of a staged block to another node, and say how that ended."""

    move: int
    block: int
    part: int
    node: str


class UsePart(Struct, frozen=True):
    """Hand out the copy that a `MovePart` made in the place of the part; it counts as made by another ``task``."""

    move: int
    block: int
    part: int
    task: int


class ReplaceWorker(Struct, frozen=True):
    """Kill this worker and start another: it is past its deadline, or meets one error after the other.

    ``blame`` as in `WorkerDown`, for the lanes that are to hear of it.
    """

    worker: str
    reason: str
    blame: bool = True


class ReleaseWorker(Struct, frozen=True):
    """Let this worker go: it was to leave, and has nothing in hand any more."""

    worker: str


class RemoveConsumer(Struct, frozen=True):
    """End this consumer's session against its will; answer its calls with the reason."""

    consumer: str
    session: int
    reason: str


class Detached(Struct, frozen=True):
    """Tell the other lanes: this consumer kept others waiting and goes on in a cohort of its own."""

    consumer: str


class Refuse(Struct, frozen=True):
    """Answer the call with the reason: it came from a session that is not open, or not any more."""

    consumer: str
    session: int
    reason: str


class Note(Struct, frozen=True):
    """Write a line to the log: who was moved, removed or replaced, and why."""

    text: str


Instruction: TypeAlias = (
    Admitted
    | Deliver
    | Prepare
    | DropBlock
    | WriteEpochs
    | MovePart
    | UsePart
    | ReplaceWorker
    | ReleaseWorker
    | RemoveConsumer
    | Detached
    | Refuse
    | Note
)
