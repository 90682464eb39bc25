"""Messages between the coordinators of lane 0 and of the other lanes.

Messages describe the current state, not changes. After a restart, either side recovers with the next message, and
repeated messages have no effect.
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
"""(start time in ns of the coordinator that composed an update, count of its updates)."""


class LaneConfig(Struct, frozen=True):
    """The constant part of a feed's state, sent to a lane once."""

    layout: Layout
    info: FeedInfo


@dataclass(frozen=True)
class LaneWorker:
    """A worker that gets tasks.

    Attributes:
        node: id of its node.
        turn: number of times that it started to work; it starts again after each briefing.
        process: distinguishes it from a worker of the same name before a restart of the main coordinator.
        handle: the shell's handle for calls; no decision depends on it.
    """

    node: str
    turn: int
    process: Hashable
    handle: Any = field(default=None, compare=False)


class NodeLoss(Struct, frozen=True):
    """A lost node and the reason; ``number`` counts the losses."""

    number: int
    node: str
    reason: str


class LaneUpdate(Struct, frozen=True):
    """The feed's state as needed by its lanes.

    Attributes:
        version: increases with every change.
        workers: workers that get tasks, by name.
        leaving: names of workers that get no more tasks.
        gone: worker name -> the event of its end as received by lane 0; only the latest ones.
        lost: nodes lost since the main coordinator began; only the latest ones.
        placement: placement for new blocks; all ``workers`` have it.
        detached: consumer -> number of times that any lane detached it from its cohort; all lanes follow.
        reservations: (name, epoch) of trials and consumers that are expected at the start of the epoch.
        failed: reason why the feed has ended, or None.
        waits_for: workers and cache nodes that the feed waits for, without durations.
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
    """Why a lane stopped using a worker, and the worker's ``turn`` at that time."""

    turn: int
    event: WorkerDied | WorkerBehind


class LaneReport(Struct, frozen=True):
    """The state of a lane, and its results since the last report.

    Attributes:
        version: version of the update that it follows; None if it has none.
        serial: (start time of the lane's process in ns, count of its reports); reports may overtake each other.
        made: (worker, metadata of the part) since the last report.
        notes: log lines since the last report.
        internal_errors: number of bugs caught since the last report.
        given_up: workers that the lane stopped using, as long as the update lists them.
        placements: all placements in use: unfinished blocks may have been cut by any of them.
        tasks: worker -> number of its tasks.
        staged_blocks, staged_bytes: number and bytes of blocks staged or in preparation.
        held: consumer -> number of delivered blocks that it has not released; only on request.
        detached: consumer -> number of times that this lane detached it from its cohort.
        cpu_s: CPU seconds used by all threads of the lane's process.
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
