"""What can happen to the workers, cache nodes, lanes and machines of a feed, and what its coordinator must then do.

The supervisor (`mbaas.core.supervisor`) is driven by these events and answers with these instructions. Both are plain
frozen values. The shell reports the outcome of every instruction that asks for something as an event; a
report may be late, come twice, or never come.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping
from typing import TypeAlias

from msgspec import Struct

from mbaas.core import events as staging

# ---- events: workers ----


class WorkerStarted(Struct, frozen=True):
    """A worker that was started, or taken in, answers from ``node``."""

    worker: str
    node: str


class StartFailed(Struct, frozen=True):
    """A worker did not start: no CPU in time, its name is still taken, its process does not answer."""

    worker: str
    reason: str


class WorkerBriefed(Struct, frozen=True):
    """A worker knows the order of samples and the placement of this version."""

    worker: str
    version: int


class BriefingFailed(Struct, frozen=True):
    """A worker could not be told the placement."""

    worker: str
    reason: str


class WorkerBehind(Struct, frozen=True):
    """A worker was given a part that was cut by a placement which it does not know."""

    worker: str


class WorkerDied(Struct, frozen=True):
    """A worker's process is gone, or of no use any more; ``blame`` as in `mbaas.core.events.WorkerDown`."""

    worker: str
    reason: str
    blame: bool = True


class WorkerDone(Struct, frozen=True):
    """A worker that is to leave has nothing in hand any more in one lane of the feed."""

    worker: str
    lane: int = 0


class WorkMeasured(Struct, frozen=True):
    """How much each worker has done so far: worker -> (samples that it prepared, seconds that it took)."""

    work: Mapping[str, tuple[float, float]]


class CachesMeasured(Struct, frozen=True):
    """How full caches are: machine -> (bytes that its cache keeps, bytes that it may keep)."""

    kept: Mapping[str, tuple[float, float]]


# ---- events: how many workers, and for whom ----


class Scale(Struct, frozen=True):
    """Have this number of workers from now on."""

    workers: int


class Lend(Struct, frozen=True):
    """Give a worker to the feed ``target``: one that ``owner`` started, None for one of our own."""

    target: str
    owner: str | None = None


class HandedOver(Struct, frozen=True):
    """Another feed answered whether it takes a worker."""

    worker: str
    taken: bool


class Offered(Struct, frozen=True):
    """Another feed offers an idle worker, or gives one back. ``key`` names it; ``owner`` is None if it is our own."""

    key: Hashable
    owner: str | None = None


class LentGone(Struct, frozen=True):
    """A worker of ours that was lent is gone."""

    key: Hashable


class FeedGone(Struct, frozen=True):
    """A feed to which workers were lent has ended."""

    feed: str


# ---- events: cache nodes and machines ----


class CacheStarted(Struct, frozen=True):
    """The cache node that was started on a machine answers.

    Attributes:
        room_bytes: what the machine's object store has room for of staged blocks, beside other feeds.
    """

    node: str
    generation: int
    room_bytes: float = math.inf


class CacheFailed(Struct, frozen=True):
    """The cache node that was to be started does not come up."""

    node: str
    generation: int
    reason: str


class CacheProbed(Struct, frozen=True):
    """A cache node was asked whether it lives."""

    node: str
    generation: int
    answers: bool


class NodesDead(Struct, frozen=True):
    """Ray says that these machines are dead; it takes none of them back."""

    nodes: frozenset[str]


class NodesDraining(Struct, frozen=True):
    """Ray will give up these machines soon: all of them, each time, so that one that is not named will stay after all.

    Ray starts no process there any more; those that run there go on.
    """

    nodes: frozenset[str]


class PlacementMoved(Struct, frozen=True):
    """Caches know the placement of this version, and the workers in ``told`` do."""

    version: int
    told: frozenset[str]


class PlacementFailed(Struct, frozen=True):
    """A new placement could not be found or told."""

    version: int
    reason: str


class NodeVacated(Struct, frozen=True):
    """The other caches have fetched for a while what a node kept.

    Attributes:
        samples: that came since `VacateNode`, and not from storage.
        left: that they had no time for; 0 if they got through.
    """

    node: str
    samples: int = 0
    left: int = 0


# ---- events: lanes ----


class LaneAnswered(Struct, frozen=True):
    """The coordinator of a further lane answered, and knows how the feed stands, or stood a moment ago."""

    lane: int


class LaneLost(Struct, frozen=True):
    """The process of a further lane's coordinator is gone; Ray starts it again."""

    lane: int


# ---- events: beginning, end and time ----


class FoundWorker(Struct, frozen=True):
    """A worker that is there when the coordinator begins: started for it, or left by its predecessor.

    Attributes:
        node: where it runs; "" if it does not answer.
        owner: the feed that started it, if it is another's.
        answers: whether it told where it runs, and for whom.
    """

    node: str
    owner: str | None = None
    answers: bool = True


class Begin(Struct, frozen=True):
    """The coordinator begins, or takes over what its predecessor left.

    Attributes:
        workers: name -> worker. One that does not answer is ended: it may come to again later, and would then be a
            worker too many that nobody knows.
        caches: (node, generation) -> whether it answers. Of several on a machine the youngest is taken over.
        lent: feed -> keys of our workers that work for it, also of those that do not answer us: it watches over them.
        version: of placements; every later one is above it.
        serial: the first number that the name of no worker has that lives.
        is_restart: whether there was a predecessor.
        rooms: node -> what its object store has room for of staged blocks; see `CacheStarted`.
    """

    workers: Mapping[str, FoundWorker] = {}
    caches: Mapping[tuple[str, int], bool] = {}
    lent: Mapping[str, tuple[Hashable, ...]] = {}
    version: int = 0
    serial: int = 0
    is_restart: bool = False
    rooms: Mapping[str, float] = {}


class FeedEnd(enum.Enum):
    """Why a feed ends, each with the sentence that its consumers get; no other event ends it.

    A feed also ends with the program that serves it, unless it is detached. All of its actors end then, so nobody is
    left to give a reason.
    """

    STOPPED = "feed {feed!r} was stopped"
    NOT_KEPT = (
        "feed {feed!r} cannot go on: its coordinator died before the feed was open, or while it was being stopped, "
        "so nobody knows how it is laid out; serve it again"
    )
    DATASET_LOST = (
        "feed {feed!r} cannot go on: its coordinator died with all of its cache nodes, and its dataset is too large "
        "for the cluster's key-value store, so nobody knows it any more; serve it again"
    )

    def of(self, feed: str) -> str:
        """Return the sentence about a feed."""
        return self.value.format(feed=feed)


class Stop(Struct, frozen=True):
    """The feed ends, for a reason from `FeedEnd`."""

    reason: str


class Tick(Struct, frozen=True):
    """Time has passed: deadlines are looked at."""


Event: TypeAlias = (
    WorkerStarted
    | StartFailed
    | WorkerBriefed
    | BriefingFailed
    | WorkerBehind
    | WorkerDied
    | WorkerDone
    | WorkMeasured
    | CachesMeasured
    | Scale
    | Lend
    | HandedOver
    | Offered
    | LentGone
    | FeedGone
    | CacheStarted
    | CacheFailed
    | CacheProbed
    | NodesDead
    | NodesDraining
    | PlacementMoved
    | PlacementFailed
    | NodeVacated
    | LaneAnswered
    | LaneLost
    | Begin
    | Stop
    | Tick
)


# ---- instructions ----


class StartWorker(Struct, frozen=True):
    """Ask Ray for a worker of this name; answered by `WorkerStarted` or `StartFailed`."""

    worker: str


class TakeIn(Struct, frozen=True):
    """Have an idle worker that is up, known by ``key``, work for this feed under this name; answered likewise."""

    worker: str
    key: Hashable
    owner: str | None


class RefuseOffer(Struct, frozen=True):
    """Do not take the worker that was offered."""

    key: Hashable


class EndWorker(Struct, frozen=True):
    """Kill a worker, also one that has not started yet; nothing is answered."""

    worker: str


class BriefWorker(Struct, frozen=True):
    """Tell a worker the order and the placement; answered by `WorkerBriefed` or `BriefingFailed`."""

    worker: str
    version: int


class HandOver(Struct, frozen=True):
    """Offer an idle worker to another feed; answered by `HandedOver`."""

    worker: str
    target: str


class ReportLentGone(Struct, frozen=True):
    """Tell the feed that lent us a worker that it is gone."""

    worker: str
    owner: str


class EndLent(Struct, frozen=True):
    """Kill a worker of ours that works for another feed."""

    key: Hashable


class StartCache(Struct, frozen=True):
    """Start a cache node on a machine; answered by `CacheStarted` or `CacheFailed`."""

    node: str
    generation: int


class ProbeCache(Struct, frozen=True):
    """Ask a cache node whether it lives; answered by `CacheProbed`."""

    node: str
    generation: int


class EndCache(Struct, frozen=True):
    """Kill a cache node; nothing is answered."""

    node: str
    generation: int


class MovePlacement(Struct, frozen=True):
    """Give samples homes on these nodes, in proportion to their weights, and tell all caches and these workers.

    Answered by `PlacementMoved` or `PlacementFailed`.
    """

    version: int
    weights: Mapping[str, float]
    workers: frozenset[str]


class UsePlacement(Struct, frozen=True):
    """Cut blocks by the placement of this version from now on."""

    version: int


class VacateNode(Struct, frozen=True):
    """Have the other caches fetch for a while what a node keeps; answered by `NodeVacated`."""

    node: str


class RestartLane(Struct, frozen=True):
    """Kill the process of a further lane's coordinator, which Ray starts again; answered by `LaneAnswered`, when it was
    told how the feed stands.
    """

    lane: int


class EndLane(Struct, frozen=True):
    """Kill the coordinator of a further lane for good; nothing is answered."""

    lane: int


ForLanes: TypeAlias = (
    staging.WorkerUp
    | staging.WorkerDown
    | staging.WorkerLeaves
    | staging.NodeDown
    | staging.NodeLeaves
    | staging.NodeStays
)
"""What lanes hear of workers and machines."""


class TellLanes(Struct, frozen=True):
    """Give this event to the staging state of every lane.

    Only the first lane copies what it has staged from a node that leaves; the others have it made again.
    """

    event: ForLanes


class Note(Struct, frozen=True):
    """A decision worth a line in the log."""

    text: str


Instruction: TypeAlias = (
    StartWorker
    | TakeIn
    | RefuseOffer
    | EndWorker
    | BriefWorker
    | HandOver
    | ReportLentGone
    | EndLent
    | StartCache
    | ProbeCache
    | EndCache
    | MovePlacement
    | UsePlacement
    | VacateNode
    | RestartLane
    | EndLane
    | TellLanes
    | Note
)
