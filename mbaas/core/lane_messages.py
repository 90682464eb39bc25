"""What the coordinator of the first lane and those of the others say to each other.

The first lane tells how things stand, not what happened: one that was restarted, on either side, learns all it needs
from the next message, and hearing it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from mbaas.core.cluster_events import WorkerBehind, WorkerDied
from mbaas.core.events import WorkerDown
from mbaas.core.layout import Layout
from mbaas.messages import BlockMeta, FeedInfo
from mbaas.placement import Placement

Version = tuple[int, int]
"""When the coordinator that composed an update began, in ns, and a count of its updates."""


class LaneConfig(Struct, frozen=True):
    """The part of a feed that never changes; a lane is told it once."""

    layout: Layout
    info: FeedInfo


@dataclass(frozen=True)
class LaneWorker:
    """A worker that gets tasks.

    Attributes:
        node: where it runs.
        turn: how often it began to work: one that was behind, and was told, begins again.
        process: tells it from one that had its name before the main coordinator was restarted.
        handle: by which the shell calls it; nothing is decided by it.
    """

    node: str
    turn: int
    process: Hashable
    handle: Any = field(default=None, compare=False)


class NodeLoss(Struct, frozen=True):
    """A node that is not there any more, and why; its number is one more than that of the loss before."""

    number: int
    node: str
    reason: str


class LaneUpdate(Struct, frozen=True):
    """How a feed stands, as far as its lanes must know.

    Attributes:
        version: grows with every change.
        workers: by name, those that get tasks.
        leaving: names of workers that get no more tasks.
        gone: name of a worker -> what the first lane heard of its end; only the last ones.
        lost: the nodes that were lost since the main coordinator began; only the last ones.
        placement: cuts the blocks that are begun from now on; every worker here knows it.
        detached: consumer -> how often any lane moved it out of step; all lanes then do so.
        reservations: (name, epoch) of consumers that are expected at the epoch's beginning.
        failed: why the feed has ended, or None.
        waits_for: which workers and cache nodes the feed waits for, without for how long.
    """

    version: Version
    workers: Mapping[str, LaneWorker]
    leaving: frozenset[str]
    gone: Mapping[str, WorkerDown]
    lost: tuple[NodeLoss, ...]
    placement: Placement | None
    detached: Mapping[str, int]
    reservations: frozenset[tuple[str, int]]
    failed: str | None
    waits_for: tuple[str, ...]


class GivenUp(Struct, frozen=True):
    """Why a lane counts on a worker no more, and in which of the worker's turns that was."""

    turn: int
    event: WorkerDied | WorkerBehind


class LaneReport(Struct, frozen=True):
    """What a lane tells of itself.

    Attributes:
        version: of the update that it follows; None if it knows none.
        serial: when the lane's process began, in ns, and a count of its reports: one may overtake another.
        made: (worker, what it made), since the last report.
        notes: lines for the feed's log, since the last report.
        internal_errors: bugs that it met and went on, since the last report.
        given_up: the workers on which the lane counts no more, as long as the update lists them.
        placements: all that the lane knows: blocks that it has in hand may have been cut by any of them.
        tasks: worker -> how many tasks it has in hand.
        staged_blocks, staged_bytes: what is staged or being made.
        held: consumer -> blocks it was given and has not let go of; only if that was asked for.
        detached: consumer -> how often this lane moved it out of step.
        cpu_s: CPU-seconds that the lane's process took, of all of its threads.
    """

    version: Version | None = None
    serial: tuple[int, int] = (0, 0)
    made: tuple[tuple[str, BlockMeta], ...] = ()
    notes: tuple[str, ...] = ()
    internal_errors: int = 0
    given_up: Mapping[str, GivenUp] = {}
    placements: tuple[Placement, ...] = ()
    tasks: Mapping[str, int] = {}
    staged_blocks: int = 0
    staged_bytes: int = 0
    held: Mapping[str, int] = {}
    detached: Mapping[str, int] = {}
    cpu_s: float = 0.0
