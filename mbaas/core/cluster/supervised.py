"""Prep workers and cache nodes as seen by a feed's supervisor, with their phases.

The staging core tracks a worker while it can have tasks (`mbaas.core.staging.tasks`). The supervisor tracks it from the
request until it ends or works for another feed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from mbaas.core.story import Story

RETRY_S = 2.0
"""Pause after a failed start or a failed placement."""

MACHINE_S = 900.0
"""Longest time that a worker may wait for a node with free resources before it is requested again."""

BEGIN_S = 45.0
"""Time that its process may take after that; Ray's workers have a low priority on a busy node."""

CACHE_START_S = 45.0
"""Longest time for a cache node's first answer; the shell that starts it gives up a little earlier."""


class WorkerPhase(enum.Enum):
    """Phase of a worker."""

    STARTING = "it was requested, and does not answer yet"
    BRIEFING = "it is up, and needs the placement before it can work"
    WORKING = "it gets tasks"
    LEAVING = "it gets no new tasks, and finishes those that it has"
    HANDED_OVER = "it was offered to another feed, which has not answered yet"
    GONE = "it ended, works elsewhere, or was given up; one that comes back is a new one"


class CachePhase(enum.Enum):
    """Phase of a cache node."""

    STARTING = "it was requested, and does not answer yet"
    UP = "it answers"
    DOUBTED = "a worker died on its node, and it is being probed"
    VACATING = "no sample has its home there, and the other caches fetch its samples"
    GONE = "it ended or was given up; the next one of its machine is a new one"


WORKER_PHASE_CHANGES: Mapping[WorkerPhase, frozenset[WorkerPhase]] = {
    WorkerPhase.STARTING: frozenset({WorkerPhase.BRIEFING, WorkerPhase.GONE}),
    WorkerPhase.BRIEFING: frozenset({WorkerPhase.WORKING, WorkerPhase.LEAVING, WorkerPhase.GONE}),
    WorkerPhase.WORKING: frozenset({WorkerPhase.BRIEFING, WorkerPhase.LEAVING, WorkerPhase.GONE}),
    WorkerPhase.LEAVING: frozenset({WorkerPhase.HANDED_OVER, WorkerPhase.GONE}),
    WorkerPhase.HANDED_OVER: frozenset({WorkerPhase.GONE}),
    WorkerPhase.GONE: frozenset(),
}
"""Allowed phase changes of workers."""

CACHE_PHASE_CHANGES: Mapping[CachePhase, frozenset[CachePhase]] = {
    CachePhase.STARTING: frozenset({CachePhase.UP, CachePhase.GONE}),
    CachePhase.UP: frozenset({CachePhase.DOUBTED, CachePhase.VACATING, CachePhase.GONE}),
    CachePhase.DOUBTED: frozenset({CachePhase.UP, CachePhase.GONE}),
    CachePhase.VACATING: frozenset({CachePhase.UP, CachePhase.DOUBTED, CachePhase.GONE}),
    CachePhase.GONE: frozenset(),
}
"""Allowed phase changes of cache nodes."""


@dataclass
class SupervisedWorker:
    """A prep worker, from its request on.

    Attributes:
        owner: the feed that started it; None for this feed.
        node: its node; "" while it starts.
        version: version of its placement; 0 for none.
        deadline: time when the awaited answer is overdue; None if no answer is awaited.
        failures: consecutive failed briefings.
        key: key under which another feed offered it; None if none did.
        target: the feed that it moves to; None if it ends.
        left_s: time of the decision to let it go; None if it stays.
    """

    name: str
    story: Story
    owner: str | None = None
    node: str = ""
    phase: WorkerPhase = WorkerPhase.STARTING
    version: int = 0
    deadline: float | None = None
    failures: int = 0
    key: Hashable | None = None
    target: str | None = None
    left_s: float | None = None

    def transition(self, to: WorkerPhase, *why: object) -> None:
        """Change the phase and clear the deadline; raise InvariantError if that is not in `WORKER_PHASE_CHANGES`."""
        self.story.change("", self.phase, to, WORKER_PHASE_CHANGES, *why)
        self.phase, self.deadline = to, None

    @property
    def stays(self) -> bool:
        """True if it is up and not about to leave."""
        return self.phase in (WorkerPhase.BRIEFING, WorkerPhase.WORKING)


@dataclass
class SupervisedCache:
    """The cache node of a cluster node, from its request on.

    Attributes:
        generation: distinguishes it from earlier ones on the node, whose names Ray may still hold.
        since: time of its request.
        room_bytes: bytes of staged blocks that fit the node's object store; infinite until measured.
        deadline: see `SupervisedWorker`.
    """

    node: str
    generation: int
    since: float
    story: Story
    phase: CachePhase = CachePhase.STARTING
    room_bytes: float = math.inf
    deadline: float | None = None

    def transition(self, to: CachePhase, *why: object) -> None:
        """Change the phase; see `SupervisedWorker.transition`."""
        self.story.change("", self.phase, to, CACHE_PHASE_CHANGES, *why)
        self.phase, self.deadline = to, None

    @property
    def answers(self) -> bool:
        """True if samples may have their homes there."""
        return self.phase in (CachePhase.UP, CachePhase.DOUBTED)
