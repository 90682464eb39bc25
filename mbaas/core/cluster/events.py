"""Events of a feed's workers, cache nodes and cluster nodes, and the resulting instructions for its coordinator.

They are the inputs and outputs of the supervisor (`mbaas.core.cluster.supervisor`), as plain frozen values. The shell
reports the outcome of every instruction that has one as an event. A report may be late, repeated or lost.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping

from msgspec import Struct

from mbaas.core.staging import events as staging

# ---- events: workers ----


class Event(Struct, frozen=True):
    """Base of the events."""


class WorkerStarted(Event, frozen=True):
    """A worker that was started or taken over answers from ``node``."""

    worker: str
    node: str


class StartFailed(Event, frozen=True):
    """A worker did not start: no CPU in time, its name is still taken, or its process does not answer."""

    worker: str
    reason: str


class WorkerBriefed(Event, frozen=True):
    """A worker has received the sample order and the placement of this version."""

    worker: str
    version: int


class BriefingFailed(Event, frozen=True):
    """A worker could not receive the placement."""

    worker: str
    reason: str


class WorkerBehind(Event, frozen=True):
    """A worker was given a part that was cut by a placement which it does not have."""

    worker: str


class WorkerDied(Event, frozen=True):
    """A worker's process is gone or unusable; ``blame`` as in `mbaas.core.staging.events.WorkerDown`."""

    worker: str
    reason: str
    blame: bool = True


class WorkerDone(Event, frozen=True):
    """A leaving worker has no tasks left."""

    worker: str


class WorkMeasured(Event, frozen=True):
    """Work of each worker so far: worker -> (samples prepared, seconds spent)."""

    work: Mapping[str, tuple[float, float]]


class CachesMeasured(Event, frozen=True):
    """Bytes cached and capacity of each cache: node -> (cached bytes, capacity in bytes)."""

    kept: Mapping[str, tuple[float, float]]


# ---- events: how many workers, and for whom ----


class Scale(Event, frozen=True):
    """Set the number of workers."""

    workers: int


class Lend(Event, frozen=True):
    """Give a worker to the feed ``target``: one that ``owner`` started, None for one of this feed's."""

    target: str
    owner: str | None = None


class HandedOver(Event, frozen=True):
    """Another feed accepted or rejected a worker."""

    worker: str
    taken: bool


class Offered(Event, frozen=True):
    """Another feed offers an idle worker, or returns one, by its ``key``; ``owner`` is None if this feed owns it."""

    key: Hashable
    owner: str | None = None


class LentGone(Event, frozen=True):
    """A worker lent by this feed is gone."""

    key: Hashable


class FeedGone(Event, frozen=True):
    """A feed that borrowed workers has ended."""

    feed: str


# ---- events: cache nodes and cluster nodes ----


class CacheStarted(Event, frozen=True):
    """A cache node that was started answers.

    Attributes:
        room_bytes: bytes of staged blocks that fit the node's object store in addition to other feeds.
    """

    node: str
    generation: int
    room_bytes: float = math.inf


class CacheFailed(Event, frozen=True):
    """A cache node failed to start."""

    node: str
    generation: int
    reason: str


class CacheProbed(Event, frozen=True):
    """Result of a probe: whether the cache node answers."""

    node: str
    generation: int
    answers: bool


class NodesDead(Event, frozen=True):
    """Ray reports these nodes as dead; dead nodes never come back."""

    nodes: frozenset[str]


class NodesDraining(Event, frozen=True):
    """Nodes that Ray will remove soon. The set is complete each time: a node that is missing is no longer draining.

    Ray starts no processes on them; running ones continue.
    """

    nodes: frozenset[str]


class PlacementMoved(Event, frozen=True):
    """The caches and the workers in ``told`` have the placement of this version."""

    version: int
    told: frozenset[str]


class PlacementFailed(Event, frozen=True):
    """A new placement could not be computed or distributed."""

    version: int
    reason: str


class NodeVacated(Event, frozen=True):
    """The other caches have copied samples from a node for a while.

    Attributes:
        samples: number of samples that arrived since `VacateNode`, not counting reads from storage.
        left: number of samples that they had no time for; 0 if they finished.
    """

    node: str
    samples: int = 0
    left: int = 0


# ---- events: beginning, end and time ----


class FoundWorker(Struct, frozen=True):
    """A worker that exists when the coordinator begins: started for it, or left by its predecessor.

    Attributes:
        node: its node; "" if it does not answer.
        owner: the feed that started it; None for this feed.
    """

    node: str
    owner: str | None = None


class Begin(Event, frozen=True):
    """The coordinator begins, or takes over from its predecessor.

    Attributes:
        workers: name -> worker. A worker that does not answer is ended: it might recover later, and would then be an
            extra worker without a supervisor.
        caches: (node, generation) -> whether it answers. If a node has several, the youngest is taken over.
        lent: feed -> keys of workers lent to it, answering or not: that feed supervises them.
        version: version of the last placement; later ones are higher.
        serial: first number that is free in the names of living workers.
        is_restart: whether there was a predecessor.
        rooms: node -> bytes of staged blocks that fit its object store; see `CacheStarted`.
    """

    workers: Mapping[str, FoundWorker] = {}
    caches: Mapping[tuple[str, int], bool] = {}
    lent: Mapping[str, tuple[Hashable, ...]] = {}
    version: int = 0
    serial: int = 0
    is_restart: bool = False
    rooms: Mapping[str, float] = {}


class FeedEnd(enum.Enum):
    """Reasons that end a feed, each with the sentence for its consumers; no other event ends a feed.

    A feed that is not detached also ends with its program. All of its actors end then, so no reason is reported.
    """

    STOPPED = "feed {feed!r} was stopped"
    NOT_KEPT = (
        "feed {feed!r} cannot continue: its coordinator died before the feed was open, or while it was being stopped, "
        "so its layout is lost; serve it again"
    )
    DATASET_LOST = (
        "feed {feed!r} cannot continue: its coordinator died with all of its cache nodes, and its dataset is too large "
        "for the cluster's key-value store, so it is lost; serve it again"
    )

    def of(self, feed: str) -> str:
        """Return the sentence for a feed."""
        return self.value.format(feed=feed)


class Stop(Event, frozen=True):
    """The feed ends, for a reason from `FeedEnd`."""

    reason: str


class Tick(Event, frozen=True):
    """Time has passed: check deadlines."""


# ---- instructions ----


class Instruction(Struct, frozen=True):
    """Base of the instructions."""


class StartWorker(Instruction, frozen=True):
    """Request a worker of this name from Ray; answered by `WorkerStarted` or `StartFailed`."""

    worker: str


class TakeIn(Instruction, frozen=True):
    """Take over a running idle worker, identified by ``key``, under this name; answered like `StartWorker`."""

    worker: str
    key: Hashable
    owner: str | None


class RefuseOffer(Instruction, frozen=True):
    """Reject the offered worker."""

    key: Hashable


class EndWorker(Instruction, frozen=True):
    """Kill a worker, even one that has not started yet; no answer."""

    worker: str


class BriefWorker(Instruction, frozen=True):
    """Send a worker the sample order and the placement; answered by `WorkerBriefed` or `BriefingFailed`."""

    worker: str
    version: int


class HandOver(Instruction, frozen=True):
    """Offer an idle worker to another feed; answered by `HandedOver`."""

    worker: str
    target: str


class ReportLentGone(Instruction, frozen=True):
    """Report to the feed that lent a worker that it is gone."""

    worker: str
    owner: str


class EndLent(Instruction, frozen=True):
    """Kill a worker of this feed that works for another feed."""

    key: Hashable


class StartCache(Instruction, frozen=True):
    """Start a cache node on a node; answered by `CacheStarted` or `CacheFailed`."""

    node: str
    generation: int


class ProbeCache(Instruction, frozen=True):
    """Check that a cache node is alive; answered by `CacheProbed`."""

    node: str
    generation: int


class EndCache(Instruction, frozen=True):
    """Kill a cache node; no answer."""

    node: str
    generation: int


class MovePlacement(Instruction, frozen=True):
    """Place samples on nodes in proportion to ``weights``, and send the placement to all caches and to ``workers``.

    Answered by `PlacementMoved` or `PlacementFailed`.
    """

    version: int
    weights: Mapping[str, float]
    workers: frozenset[str]


class UsePlacement(Instruction, frozen=True):
    """Cut blocks by the placement of this version from now on."""

    version: int


class VacateNode(Instruction, frozen=True):
    """Let the other caches copy samples from a node for a while; answered by `NodeVacated`."""

    node: str


class Forward(Instruction, frozen=True):
    """Pass this event to the staging core."""

    event: staging.Event


class Note(Instruction, frozen=True):
    """A decision for the log."""

    text: str
