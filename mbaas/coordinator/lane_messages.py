"""What the coordinator of the first lane and those of the others say to each other.

The first lane tells how things stand, not what happened: whoever was restarted, on either side, learns all he needs
from the next message, and to hear it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core.cluster_events import WorkerBehind, WorkerDied, WorkerDone
from mbaas.core.layout import Layout
from mbaas.messages import BlockMeta, FeedInfo
from mbaas.placement import Placement

Version = tuple[int, int]
"""Of a standing: when its coordinator began, and a count."""


@dataclass(frozen=True)
class LaneConfig:
    """What a lane is told once: what does not change as long as the feed lives."""

    layout: Layout
    info: FeedInfo


@dataclass(frozen=True)
class LaneUpdate:
    """How a feed stands, as far as its lanes must know.

    Attributes:
        version: grows with every change.
        workers: that are up and stay.
        turns: worker -> how often it began to work: one that was behind, and was told, begins again.
        leaving: names of workers that get no more tasks.
        gone, dead: name of a worker, id of a node -> why it is not there any more; of the last ones.
        homes: by which blocks are cut; every worker here knows them.
        detached: consumer -> how often it was moved out of step, in any lane: so it is in all of them.
        reservations: (name, epoch) of consumers that are expected at the epoch's beginning.
        failed: why the feed cannot go on, or None.
    """

    version: Version
    workers: tuple[WorkerHandle, ...]
    turns: Mapping[str, int]
    leaving: frozenset[str]
    gone: Mapping[str, str]
    dead: Mapping[str, str]
    placement: Placement | None
    detached: Mapping[str, int]
    reservations: frozenset[tuple[str, int]]
    failed: str | None


@dataclass(frozen=True)
class LaneReport:
    """What a lane tells of itself.

    Attributes:
        version: of the standing by which it goes; None if it knows none.
        made: (worker, what it made), since the last filing.
        notes: since the last filing.
        given_up: worker -> why the lane counts on it no more, as long as the update lists it.
        placements: all that the lane knows: blocks that it has in hand may have been cut by any of them.
        tasks: worker -> tasks in hand.
        staged_blocks, staged_bytes: that are staged or being made.
        held: consumer -> blocks it was given and has not let go of; only if that was asked for.
        detached: consumer -> how often this lane moved it out of step.
    """

    version: Version | None = None
    made: tuple[tuple[str, BlockMeta], ...] = ()
    notes: tuple[str, ...] = ()
    given_up: Mapping[str, WorkerDied | WorkerBehind | WorkerDone] = field(default_factory=dict)
    placements: tuple[Placement, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)
    staged_blocks: int = 0
    staged_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    detached: Mapping[str, int] = field(default_factory=dict)
