"""Synchronisation of the main coordinator and the lanes other than lane 0.

`LaneLeader` is the main coordinator's side: it composes the feed's state (`LaneUpdate`) and interprets the lanes'
reports (`LaneReport`). `LaneFollower` is a lane's side: it turns an update into events for the lane's staging core.

Messages describe the current state, not changes. A message may be late, repeated, reordered or lost, and either side
may restart at any time: the next exchange repairs the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.lane_messages import GivenUp, LaneReport, LaneUpdate, LaneWorker, NodeLoss
from mbaas.core.state import StagingState
from mbaas.core.supervised import WorkerPhase
from mbaas.core.supervisor import Supervisor
from mbaas.core.transitions import ConsumerState
from mbaas.messages import BlockMeta
from mbaas.placement import PlacementHistory

KEPT_REASONS = 100
"""Lost workers and nodes whose reasons are kept for lanes."""

KEPT_NAMES = 1000
"""Detached consumers whose counts are kept for lanes; the latest ones."""

KEPT_SERIALS = 100
"""Latest reports of a lane that are recognised when repeated."""

WorkerEvent: TypeAlias = cluster.WorkerDied | cluster.WorkerBehind | cluster.WorkerDone
"""Reports of a lane about a worker."""


class LaneFollower:
    """A lane's side of the exchange.

    Args:
        core: staging core of the lane.
        placements: placements by which the lane cuts blocks.
        credit: tasks assigned to a worker at a time.
        began: start time of the lane's process in ns.

    Attributes:
        update: newest update received; None before the first.
        given_up: workers listed in the update that the lane does not use.
    """

    def __init__(self, core: StagingState, placements: PlacementHistory, *, credit: int, began: int) -> None:
        self._core, self._placements, self._credit = core, placements, credit
        self._began, self._reports = began, 0
        self._processes: dict[str, Hashable] = {}  # workers registered in the core -> their processes
        self.update: LaneUpdate | None = None
        self.given_up: dict[str, GivenUp] = {}

    # ---- updates from the main coordinator ----

    def hear(self, update: LaneUpdate | None) -> list[ev.Event]:
        """Process an update, and return the resulting events for the staging core, in order.

        With None, the current update is compared with the core again.
        """
        before = self.update
        if update is not None and (before is None or update.version > before.version):
            if before is not None and before.version[0] != update.version[0]:
                self.given_up.clear()  # another main coordinator restarts the turn counts, and may reuse names
            self.update = update
        if self.update is None or self.update.failed is not None:
            return []
        if self.update.placement is not None:
            self._take_placement(self.update)
        events = self._losses(self.update, before) + self._workers(self.update)
        if before is None or self.update.reservations != before.reservations:
            blocks = self._core.blocks_per_epoch
            held = frozenset((name, epoch * blocks) for name, epoch in self.update.reservations)
            events.append(ev.HoldReservations(held))
        return events

    def _take_placement(self, update: LaneUpdate) -> None:
        newest = self._placements.newest
        if update.placement is not None and (newest is None or newest.version < update.placement.version):
            self._placements.add(update.placement)

    def _losses(self, update: LaneUpdate, before: LaneUpdate | None) -> list[ev.Event]:
        # An update lists losses and detachments for some time; return the new ones. The first update causes no events:
        # a new lane has neither parts on lost nodes nor detached consumers.
        if before is None:
            return []
        is_same = before.version[0] == update.version[0]
        heard = max((loss.number for loss in before.lost), default=0) if is_same else 0
        lost: list[ev.Event] = [ev.NodeDown(loss.node, loss.reason) for loss in update.lost if loss.number > heard]
        moved = [name for name, times in update.detached.items() if times != before.detached.get(name)]
        return lost + [ev.DetachedElsewhere(name) for name in moved]

    def _workers(self, update: LaneUpdate) -> list[ev.Event]:
        self.given_up = {name: given for name, given in self.given_up.items() if _is_same_turn(given, name, update)}
        known, processes = self._core.tasks.workers, self._processes
        events: list[ev.Event] = []
        for name, worker in known.items():
            if name in update.leaving:
                events += [] if worker.leaving else [ev.WorkerLeaves(name)]
            elif name not in update.workers:
                # A restarted main coordinator lists no workers at first. Do not blame blocks for that: after three
                # blamed workers a block fails.
                gone = ev.WorkerDown(name, "the main coordinator does not count on it", blame=False)
                events.append(update.gone.get(name, gone))
            elif update.workers[name].process != processes.get(name):
                # The previous worker died without a main coordinator, and the new one reused its name.
                events.append(ev.WorkerDown(name, "its process is gone, and another one has its name"))
        new = {
            name: worker
            for name, worker in update.workers.items()
            if name not in self.given_up and (name not in known or worker.process != processes.get(name))
        }
        self._processes = {name: process for name, process in processes.items() if name in known}
        self._processes |= {name: worker.process for name, worker in new.items()}
        return events + [ev.WorkerUp(name, self._credit, worker.node) for name, worker in new.items()]

    # ---- reports to the main coordinator ----

    def give_up(self, event: WorkerEvent) -> list[ev.Event]:
        """Stop using a worker until the main coordinator has processed the event; return events for the core."""
        match event:
            case cluster.WorkerDied():
                down = ev.WorkerDown(event.worker, event.reason, event.blame)
            case cluster.WorkerBehind():
                down = ev.WorkerDown(event.worker, "it does not know the newest placement", blame=False)
            case cluster.WorkerDone():
                return []  # the next report shows that it has no tasks
        listed = self.update.workers.get(event.worker) if self.update is not None else None
        self.given_up[event.worker] = GivenUp(listed.turn if listed is not None else 0, event)
        return [down] if event.worker in self._core.tasks.workers else []

    def report(
        self,
        *,
        made: Sequence[tuple[str, BlockMeta]] = (),
        notes: Sequence[str] = (),
        internal_errors: int = 0,
        detached: Mapping[str, int],
        in_full: bool = False,
        cpu_s: float = 0.0,
    ) -> LaneReport:
        """Return a report of the lane's state; ``in_full`` adds the blocks that consumers hold. See `LaneReport`."""
        if self.update is None:
            return LaneReport()
        core = self._core
        self._reports += 1
        return LaneReport(
            version=self.update.version,
            serial=(self._began, self._reports),
            made=tuple(made),
            notes=tuple(notes),
            internal_errors=internal_errors,
            given_up=dict(self.given_up),
            tasks={worker.name: len(worker.tasks) for worker in core.tasks.workers.values()},
            staged_blocks=len(core.window.blocks),
            staged_bytes=core.window.used_bytes,
            held={m.name: m.cursor - m.released for m in core.consumers.by_name.values()} if in_full else {},
            detached=dict(detached),
            placements=self._placements.all,
            cpu_s=cpu_s,
        )


def _is_same_turn(given: GivenUp, name: str, update: LaneUpdate) -> bool:
    if name in update.leaving:
        return True
    return name in update.workers and update.workers[name].turn == given.turn


class Heard(Struct, frozen=True):
    """Consequences of a lane's report; ``is_new`` is False for a repeated report."""

    is_new: bool
    for_supervisor: tuple[cluster.Event, ...] = ()
    for_first_lane: tuple[ev.Event, ...] = ()


class LaneLeader:
    """The main coordinator's side of the exchange.

    Args:
        lanes: number of the feed's lanes, including lane 0.
        supervisor: supervises the workers.
        core: staging core of lane 0.
        placements: placements by which lane 0 cuts blocks.
        process_of: worker name -> (process, handle) if it is up; None if it is gone.
        began: start time of this coordinator in ns.

    Attributes:
        update: the feed's current state.
        reports: lane number -> its newest report; empty if the lane may have no state.
    """

    def __init__(
        self,
        lanes: int,
        *,
        supervisor: Supervisor,
        core: StagingState,
        placements: PlacementHistory,
        process_of: Callable[[str], tuple[Hashable, Any] | None],
        began: int,
    ) -> None:
        self._supervisor, self._core, self._placements, self._process_of = supervisor, core, placements, process_of
        self._began, self._updates, self._losses = began, 0, 0
        self._gone: deque[ev.WorkerDown] = deque(maxlen=KEPT_REASONS)
        self._lost: deque[NodeLoss] = deque(maxlen=KEPT_REASONS)
        self._serials: deque[tuple[int, tuple[int, int]]] = deque(maxlen=KEPT_SERIALS * (lanes - 1))
        self._told_detached: dict[int, tuple[int, Mapping[str, int]]] = {}  # lane -> (start of its process, its counts)
        self._detached: Counter[str] = Counter()
        self.reports = {number: LaneReport() for number in range(1, lanes)}
        self.update = self._compose({})

    # ---- updates for the lanes ----

    def note(self, event: ev.Event) -> None:
        """Record an event of lane 0 whose effect the next update must contain."""
        match event:
            case ev.WorkerDown():
                self._gone.append(event)
            case ev.NodeDown():
                self._losses += 1
                self._lost.append(NodeLoss(self._losses, event.node, event.reason))

    def look(self, detached: Mapping[str, int]) -> bool:
        """Compose the feed's state, and return whether it changed; ``detached`` are the counts of lane 0."""
        new = self._compose(detached)
        if _content(new) == _content(self.update):
            return False
        self._updates += 1
        self.update = replace(new, version=(self._began, self._updates))
        return True

    def _compose(self, detached: Mapping[str, int]) -> LaneUpdate:
        # The complete state, so that a lane that missed updates needs only the newest.
        supervisor, blocks = self._supervisor, self._core.blocks_per_epoch
        self._count_detached(0, 0, detached)
        return LaneUpdate(
            version=(self._began, self._updates),
            workers={
                name: LaneWorker(worker.node, worker.turns, *process)
                for name, worker in supervisor.in_phase(WorkerPhase.WORKING).items()
                if (process := self._process_of(name)) is not None
            },
            leaving=frozenset(supervisor.in_phase(WorkerPhase.LEAVING)),
            gone={event.worker: event for event in self._gone},
            lost=tuple(self._lost),
            detached=dict(self._detached),
            placement=self._placements.newest,
            reservations=frozenset(
                (member.name, member.cursor // blocks)
                for member in self._core.consumers.by_name.values()
                if (member.state is ConsumerState.RESERVED or not member.asked) and member.cursor % blocks == 0
            ),
            failed=self._core.failed,
            waits_for=supervisor.waits_for,
        )

    def _count_detached(self, lane: int, began: int, detached: Mapping[str, int]) -> list[str]:
        process, before = self._told_detached.get(lane, (began, {}))
        if process != began:
            before = {}  # a restarted lane counts from 0
        moved = [name for name, times in detached.items() if times > before.get(name, 0)]
        for name in moved:
            self._detached[name] = self._detached.pop(name, 0) + detached[name] - before.get(name, 0)
        while len(self._detached) > KEPT_NAMES:
            del self._detached[next(iter(self._detached))]
        self._told_detached[lane] = began, dict(detached)
        return moved

    def knows(self, lane: int) -> bool:
        """Return whether a lane follows the newest update, according to its last report."""
        return self.reports[lane].version == self.update.version

    def message(self, lane: int) -> tuple[LaneUpdate | None, bool]:
        """Return the update to send to a lane, None if it has it; and whether the lane may have no state at all."""
        return None if self.knows(lane) else self.update, self.reports[lane].version is None

    # ---- reports from the lanes ----

    def hear(self, lane: int, report: LaneReport) -> Heard:
        """Process a lane's report, and return its consequences."""
        before = self.reports[lane]
        if report.version is None:  # it has just started
            self.reports[lane] = replace(report, serial=before.serial)
            return Heard(is_new=True)
        is_new = (lane, report.serial) not in self._serials
        self._serials.append((lane, report.serial))
        self._placements.add_older(report.placements)
        if report.serial <= before.serial:
            return Heard(is_new)  # an older state than the last one
        self.reports[lane] = report
        if report.version[0] > self._began:
            # The clock was set back before this coordinator began. Lanes would regard all of its updates as old.
            self._began = report.version[0] + 1
            self.update = replace(self.update, version=(self._began, self._updates))
        events: list[cluster.Event] = [cluster.LaneAnswered(lane)]
        if report.version[0] == self._began:  # else the report is about another main coordinator's workers
            events += self._said_of_workers(lane, report)
        moved = self._count_detached(lane, report.serial[0], report.detached)
        return Heard(is_new, tuple(events), tuple(map(ev.DetachedElsewhere, moved)))

    def _said_of_workers(self, lane: int, report: LaneReport) -> list[WorkerEvent]:
        # Repeated until the supervisor has processed it and the lane has the result, so no report is lost for good.
        given_up = [given.event for name, given in report.given_up.items() if self._is_news(name, given)]
        # Only if the lane has the newest update: before that, a new worker would seem to be finished, because it has no
        # tasks there.
        done = sorted(self.update.leaving - report.tasks.keys()) if self.knows(lane) else []
        return [*given_up, *(cluster.WorkerDone(name, lane) for name in done)]

    def _is_news(self, name: str, given: GivenUp) -> bool:
        worker = self._supervisor.workers.get(name)
        if worker is None:
            return False
        # A worker that lacked a placement may have received it meanwhile, and work again.
        return isinstance(given.event, cluster.WorkerDied) or worker.turns == given.turn

    def lose(self, lane: int) -> None:
        """Record that a call to a lane failed: its process may be gone, so the next message is complete.

        A late report of the dead process may then count as the newest. This is harmless: its successor reports that it
        has no state, and receives a complete update. Serials are dropped, because the clock that they start with may
        have been set back.
        """
        self.reports[lane] = LaneReport()


def _content(update: LaneUpdate) -> tuple[Any, ...]:
    placement = update.placement.version if update.placement is not None else None
    told = update.workers, update.leaving, update.gone, update.lost, update.detached, update.reservations
    return placement, told, update.failed, update.waits_for
