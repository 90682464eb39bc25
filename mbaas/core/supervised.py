"""The prep workers, cache nodes and lanes of a feed as its supervisor sees them, and the phases of their lives.

A lane knows a worker from when it may get tasks (`mbaas.core.tasks`); the supervisor from when it is asked for until it
is ended or works for another feed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from mbaas.core.story import Story

RETRY_S = 2.0
"""Pause after a start, or a new placement, that failed."""

MACHINE_S = 900.0
"""How long a worker may wait for a machine with room for it before it is asked for anew."""

BEGIN_S = 45.0
"""How long its process may take after that: Ray's workers have a low priority on a busy machine."""

CACHE_START_S = 45.0
"""Longest time in which a cache node must answer; the shell, which starts it, gives up a little sooner."""


class WorkerPhase(enum.Enum):
    """Where a worker is on its way."""

    STARTING = "it was asked for, and does not answer yet"
    BRIEFING = "it is up, and must be told the placement before it can work"
    WORKING = "lanes give it tasks"
    LEAVING = "it gets nothing new, and finishes what it has in hand"
    HANDED_OVER = "it was offered to another feed, which has not answered yet"
    GONE = "it ended, works elsewhere, or was given up; one that comes back is a new one"


class CachePhase(enum.Enum):
    """Where a cache node is on its way."""

    STARTING = "it was asked for, and does not answer yet"
    UP = "it answers"
    DOUBTED = "a worker died on its machine, and it is asked whether it answers"
    VACATING = "no sample has its home there, and the other caches fetch what it keeps"
    GONE = "it ended or was given up; the next one of its machine is a new one"


class LanePhase(enum.Enum):
    """Where the coordinator of a further lane is on its way."""

    BRIEFING = "its process is new, or is being started, and must be told how the feed stands before it can serve"
    SERVING = "it answers"
    SILENT = "it should have answered, and has not"


WORKER_PHASE_CHANGES: Mapping[WorkerPhase, frozenset[WorkerPhase]] = {
    WorkerPhase.STARTING: frozenset({WorkerPhase.BRIEFING, WorkerPhase.GONE}),
    WorkerPhase.BRIEFING: frozenset({WorkerPhase.WORKING, WorkerPhase.LEAVING, WorkerPhase.GONE}),
    WorkerPhase.WORKING: frozenset({WorkerPhase.BRIEFING, WorkerPhase.LEAVING, WorkerPhase.GONE}),
    WorkerPhase.LEAVING: frozenset({WorkerPhase.HANDED_OVER, WorkerPhase.GONE}),
    WorkerPhase.HANDED_OVER: frozenset({WorkerPhase.GONE}),
    WorkerPhase.GONE: frozenset(),
}
"""Which phases may follow one another in a worker's life."""

CACHE_PHASE_CHANGES: Mapping[CachePhase, frozenset[CachePhase]] = {
    CachePhase.STARTING: frozenset({CachePhase.UP, CachePhase.GONE}),
    CachePhase.UP: frozenset({CachePhase.DOUBTED, CachePhase.VACATING, CachePhase.GONE}),
    CachePhase.DOUBTED: frozenset({CachePhase.UP, CachePhase.GONE}),
    CachePhase.VACATING: frozenset({CachePhase.UP, CachePhase.DOUBTED, CachePhase.GONE}),
    CachePhase.GONE: frozenset(),
}
"""The same for cache nodes."""

LANE_PHASE_CHANGES: Mapping[LanePhase, frozenset[LanePhase]] = {
    LanePhase.BRIEFING: frozenset({LanePhase.SERVING}),
    LanePhase.SERVING: frozenset({LanePhase.BRIEFING, LanePhase.SILENT}),
    LanePhase.SILENT: frozenset({LanePhase.BRIEFING, LanePhase.SERVING}),
}
"""The same for lanes, which live as long as the feed does."""


@dataclass
class SupervisedWorker:
    """A prep worker, from the moment it is asked for.

    Attributes:
        story: what happened to it.
        phase: see `WorkerPhase`; changed by `transition` only.
        owner: the feed that started it, if it is another's.
        node: where it runs; "" while it starts.
        version: of the placement that it knows; 0 for none.
        deadline: when the answer that is awaited from it, or about it, is overdue; None if none is awaited.
        failures: briefings that failed in a row.
        turns: how often it began to work.
        key: under which another feed offered it, if one did.
        target: the feed that it leaves for; None if it leaves to end.
        done_in: the lanes that are done with it, while it leaves.
    """

    name: str
    story: Story
    owner: str | None = None
    node: str = ""
    phase: WorkerPhase = WorkerPhase.STARTING
    version: int = 0
    deadline: float | None = None
    failures: int = 0
    turns: int = 0
    key: Hashable | None = None
    target: str | None = None
    done_in: set[int] = field(default_factory=set)

    def transition(self, to: WorkerPhase, *why: object) -> None:
        """Go on to another phase; nothing is awaited from the worker then.

        Raises:
            InvariantError: ``to`` may not follow, see `WORKER_PHASE_CHANGES`.
        """
        self.story.change("", self.phase, to, WORKER_PHASE_CHANGES, *why)
        self.phase, self.deadline = to, None

    @property
    def stays(self) -> bool:
        """Whether it is up and not about to go."""
        return self.phase in (WorkerPhase.BRIEFING, WorkerPhase.WORKING)


@dataclass
class SupervisedCache:
    """The cache node of a machine, from the moment it is asked for.

    Attributes:
        node: the machine.
        generation: tells it from earlier ones of the machine, whose names Ray may still hold.
        phase: see `CachePhase`; changed by `transition` only.
        since: when it was asked for.
        story: what happened to it.
        room_bytes: what the machine's object store has room for of staged blocks; infinite until somebody looked.
        deadline: as for `SupervisedWorker`.
    """

    node: str
    generation: int
    since: float
    story: Story
    phase: CachePhase = CachePhase.STARTING
    room_bytes: float = math.inf
    deadline: float | None = None

    def transition(self, to: CachePhase, *why: object) -> None:
        """Go on to another phase; see `SupervisedWorker.transition`."""
        self.story.change("", self.phase, to, CACHE_PHASE_CHANGES, *why)
        self.phase, self.deadline = to, None

    @property
    def answers(self) -> bool:
        """Whether samples may have their homes there."""
        return self.phase in (CachePhase.UP, CachePhase.DOUBTED)


@dataclass
class SupervisedLane:
    """The coordinator of a further lane.

    Attributes:
        number: which lane it is, from 1.
        story: what happened to it.
        deadline: when it should have answered; there is always one, because lanes are spoken to all the time.
        phase: see `LanePhase`; changed by `transition` only.
    """

    number: int
    story: Story
    deadline: float
    phase: LanePhase = LanePhase.BRIEFING

    def transition(self, to: LanePhase, deadline: float, *why: object) -> None:
        """Go on to another phase, in which it should answer by the deadline; see `SupervisedWorker.transition`."""
        self.story.change("", self.phase, to, LANE_PHASE_CHANGES, *why)
        self.phase, self.deadline = to, deadline
