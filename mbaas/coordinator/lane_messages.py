"""What the coordinator of the first lane and those of the others say to each other.

The first lane tells how things stand, not what happened: one that was restarted, on either side, learns all it needs
from the next message, and hearing it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core.cluster_events import WorkerBehind, WorkerDied, WorkerDone
from mbaas.core.events import WorkerDown
from mbaas.core.layout import Layout
from mbaas.messages import BlockMeta, FeedInfo
from mbaas.placement import Placement

Version = tuple[int, int]
"""When the coordinator that composed an update began, in ns, and a count of its updates."""


@dataclass(frozen=True)
class LaneConfig:
    """The part of a feed that never changes; a lane is told it once."""

    layout: Layout
    info: FeedInfo


@dataclass(frozen=True)
class LaneUpdate:
    """How a feed stands, as far as its lanes must know.

    Attributes:
        version: grows with every change.
        workers: those that get tasks.
        turns: worker -> how often it began to work: one that was behind, and was told, begins again.
        leaving: names of workers that get no more tasks.
        gone: name of a worker -> what the first lane heard of its end; only the last ones.
        dead: id of a node -> why it is not there any more; only the last ones.
        placement: cuts the blocks that are begun from now on; every worker here knows it.
        detached: consumer -> how often any lane moved it out of step; all lanes then do so.
        reservations: (name, epoch) of consumers that are expected at the epoch's beginning.
        failed: why the feed has ended, or None.
        waits_for: which workers and cache nodes the feed waits for, without for how long.
    """

    version: Version
    workers: tuple[WorkerHandle, ...]
    turns: Mapping[str, int]
    leaving: frozenset[str]
    gone: Mapping[str, WorkerDown]
    dead: Mapping[str, str]
    placement: Placement | None
    detached: Mapping[str, int]
    reservations: frozenset[tuple[str, int]]
    failed: str | None
    waits_for: tuple[str, ...]


@dataclass(frozen=True)
class LaneReport:
    """What a lane tells of itself.

    Attributes:
        version: of the update that it follows; None if it knows none.
        made: (worker, what it made), since the last report.
        notes: lines for the feed's log, since the last report.
        internal_errors: bugs that it met and went on, since the last report.
        given_up: worker -> why the lane counts on it no more, as long as the update lists it.
        placements: all that the lane knows: blocks that it has in hand may have been cut by any of them.
        tasks: worker -> how many tasks it has in hand.
        staged_blocks, staged_bytes: what is staged or being made.
        held: consumer -> blocks it was given and has not let go of; only if that was asked for.
        detached: consumer -> how often this lane moved it out of step.
    """

    version: Version | None = None
    made: tuple[tuple[str, BlockMeta], ...] = ()
    notes: tuple[str, ...] = ()
    internal_errors: int = 0
    given_up: Mapping[str, WorkerDied | WorkerBehind | WorkerDone] = field(default_factory=dict)
    placements: tuple[Placement, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)
    staged_blocks: int = 0
    staged_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    detached: Mapping[str, int] = field(default_factory=dict)
