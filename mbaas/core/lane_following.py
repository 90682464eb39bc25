"""What the main coordinator of a feed and its further lanes make of what they tell each other.

`LaneLeader` is the main one's side: it says how the feed stands (`LaneUpdate`), and what follows from what a lane
reports (`LaneReport`). `LaneFollower` is the side of a further lane: it says what an update means for the staging core
of the lane. Messages tell how things stand, not what happened. So each may come late, twice, after a later one, or
never, and each side may be started anew at any time: the next exchange makes good for it.
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
"""Workers and nodes that are gone, of which lanes are told why."""

KEPT_NAMES = 1000
"""Consumers that were moved out of step, of whom lanes are told how often; the last ones."""

KEPT_SERIALS = 100
"""The last reports of a lane that are recognised when they come again."""

WorkerEvent: TypeAlias = cluster.WorkerDied | cluster.WorkerBehind | cluster.WorkerDone
"""What a lane has to say of a worker."""


class LaneFollower:
    """The side of a further lane.

    Args:
        core: the lane's.
        placements: by which the lane cuts blocks.
        credit: tasks that a worker is given at a time.
        began: when the lane's process began, in ns.

    Attributes:
        update: the newest that was heard; None before the first.
        given_up: the workers that the update lists, and on which the lane does not count.
    """

    def __init__(self, core: StagingState, placements: PlacementHistory, *, credit: int, began: int) -> None:
        self._core, self._placements, self._credit = core, placements, credit
        self._began, self._reports = began, 0
        self._processes: dict[str, Hashable] = {}  # of the workers that the core was told of
        self.update: LaneUpdate | None = None
        self.given_up: dict[str, GivenUp] = {}

    # ---- what the main coordinator tells ----

    def hear(self, update: LaneUpdate | None) -> list[ev.Event]:
        """Take in an update, and return what it means for the staging core, in order.

        Args:
            update: None if the newest that was told still holds: what it says is compared with the core once more.
        """
        before = self.update
        if update is not None and (before is None or update.version > before.version):
            if before is not None and before.version[0] != update.version[0]:
                self.given_up.clear()  # another main coordinator counts turns anew, and may give names anew
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
        """What happened since the last update, because an update lists it as long as it is remembered.

        A lane that has none was just started: it has nothing on a node that is lost, and nobody out of step.
        """
        if before is None:
            return []
        is_same = before.version[0] == update.version[0]
        heard = max((loss.number for loss in before.lost), default=0) if is_same else 0
        lost: list[ev.Event] = [ev.NodeDown(loss.node, loss.reason) for loss in update.lost if loss.number > heard]
        moved = [name for name, times in update.detached.items() if times != before.detached.get(name)]
        return lost + [ev.DetachedElsewhere(name) for name in moved]

    def _workers(self, update: LaneUpdate) -> list[ev.Event]:
        """Compare the workers that the core counts on with those that it is to count on."""
        self.given_up = {name: given for name, given in self.given_up.items() if _is_same_turn(given, name, update)}
        known, processes = self._core.tasks.workers, self._processes
        events: list[ev.Event] = []
        for name, worker in known.items():
            if name in update.leaving:
                events += [] if worker.leaving else [ev.WorkerLeaves(name)]
            elif name not in update.workers:
                # A main coordinator that was restarted counts on nobody at first, and that is no block's fault: with
                # three workers over one block the block would be bad.
                gone = ev.WorkerDown(name, "the main coordinator does not count on it", blame=False)
                events.append(update.gone.get(name, gone))
            elif update.workers[name].process != processes.get(name):
                # Its predecessor died while there was no main coordinator, which then gave the name a second time.
                events.append(ev.WorkerDown(name, "its process is gone, and another one has its name"))
        new = {
            name: worker
            for name, worker in update.workers.items()
            if name not in self.given_up and (name not in known or worker.process != processes.get(name))
        }
        self._processes = {name: process for name, process in processes.items() if name in known}
        self._processes |= {name: worker.process for name, worker in new.items()}
        return events + [ev.WorkerUp(name, self._credit, worker.node) for name, worker in new.items()]

    # ---- what it tells ----

    def give_up(self, event: WorkerEvent) -> list[ev.Event]:
        """Do without a worker that is gone, or behind, until the main coordinator has heard of it.

        Returns:
            what that means for the staging core.
        """
        match event:
            case cluster.WorkerDied():
                down = ev.WorkerDown(event.worker, event.reason, event.blame)
            case cluster.WorkerBehind():
                down = ev.WorkerDown(event.worker, "it does not know the newest placement", blame=False)
            case cluster.WorkerDone():
                return []  # the next report shows that it has nothing in hand
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
        """Tell how the lane stands; the arguments are as for `LaneReport`, ``in_full`` asks for what consumers hold."""
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
    """Whether a worker that was given up is listed, and has not been put to work anew since."""
    if name in update.leaving:
        return True
    return name in update.workers and update.workers[name].turn == given.turn


class Heard(Struct, frozen=True):
    """What a lane's report means.

    Attributes:
        is_new: whether it tells anything that happened since its last one; false for a report that came a second time.
        for_supervisor: events, in order.
        for_first_lane: events for the staging core of the first lane.
    """

    is_new: bool
    for_supervisor: tuple[cluster.Event, ...] = ()
    for_first_lane: tuple[ev.Event, ...] = ()


class LaneLeader:
    """The side of the main coordinator.

    Args:
        lanes: how many the feed has, the first one included.
        supervisor: knows the workers.
        core: that of the first lane.
        placements: by which the first lane cuts blocks.
        process_of: tells the process of a worker that is up, and its handle; None if it is gone.
        began: when this coordinator began, in ns.

    Attributes:
        update: how the feed stands.
        reports: the newest report of each further lane; an empty one of a lane that may know nothing.
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
        self._told_detached: dict[int, tuple[int, Mapping[str, int]]] = {}  # lane -> when its process began, and what
        self._detached: Counter[str] = Counter()
        self.reports = {number: LaneReport() for number in range(1, lanes)}
        self.update = self._compose({})

    # ---- what lanes are told ----

    def note(self, event: ev.Event) -> None:
        """Note an event of the first lane: the next update tells the others what follows from it."""
        match event:
            case ev.WorkerDown():
                self._gone.append(event)
            case ev.NodeDown():
                self._losses += 1
                self._lost.append(NodeLoss(self._losses, event.node, event.reason))

    def look(self, detached: Mapping[str, int]) -> bool:
        """Describe how the feed stands; return whether that is news.

        Args:
            detached: consumer -> how often the first lane moved it out of step.
        """
        new = self._compose(detached)
        if _content(new) == _content(self.update):
            return False
        self._updates += 1
        self.update = replace(new, version=(self._began, self._updates))
        return True

    def _compose(self, detached: Mapping[str, int]) -> LaneUpdate:
        """The whole state, so that a lane that missed updates needs only the newest."""
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
        """Add what a lane moved out of step since it told so last; return whom."""
        process, before = self._told_detached.get(lane, (began, {}))
        if process != began:
            before = {}  # it was started anew, and counts anew
        moved = [name for name, times in detached.items() if times > before.get(name, 0)]
        for name in moved:
            self._detached[name] = self._detached.pop(name, 0) + detached[name] - before.get(name, 0)
        while len(self._detached) > KEPT_NAMES:
            del self._detached[next(iter(self._detached))]
        self._told_detached[lane] = began, dict(detached)
        return moved

    def knows(self, lane: int) -> bool:
        """Whether a lane follows the newest update, as far as it told."""
        return self.reports[lane].version == self.update.version

    def message(self, lane: int) -> tuple[LaneUpdate | None, bool]:
        """What a lane is to be told: the update, None if it knows it; and whether it may know nothing at all yet."""
        return None if self.knows(lane) else self.update, self.reports[lane].version is None

    # ---- what lanes tell ----

    def hear(self, lane: int, report: LaneReport) -> Heard:
        """Take in what a lane reports, and return what it means."""
        before = self.reports[lane]
        if report.version is None:  # it was just started
            self.reports[lane] = replace(report, serial=before.serial)
            return Heard(is_new=True)
        is_new = (lane, report.serial) not in self._serials
        self._serials.append((lane, report.serial))
        self._placements.add_older(report.placements)
        if report.serial <= before.serial:
            return Heard(is_new)  # what it says of how the lane stands is out of date
        self.reports[lane] = report
        if report.version[0] > self._began:
            # The clock was put back before this coordinator began. Lanes would take all that it says for old.
            self._began = report.version[0] + 1
            self.update = replace(self.update, version=(self._began, self._updates))
        events: list[cluster.Event] = [cluster.LaneAnswered(lane)]
        if report.version[0] == self._began:  # else it speaks of the workers of another main coordinator
            events += self._said_of_workers(lane, report)
        moved = self._count_detached(lane, report.serial[0], report.detached)
        return Heard(is_new, tuple(events), tuple(map(ev.DetachedElsewhere, moved)))

    def _said_of_workers(self, lane: int, report: LaneReport) -> list[WorkerEvent]:
        # Said again until the supervisor has dealt with it, and the lane has heard so: no report is missed for good.
        given_up = [given.event for name, given in report.given_up.items() if self._is_news(name, given)]
        # Only of a lane that knows the newest update: one that has not heard of a new worker yet has nothing of it in
        # hand either, and would be taken for done with it.
        done = sorted(self.update.leaving - report.tasks.keys()) if self.knows(lane) else []
        return [*given_up, *(cluster.WorkerDone(name, lane) for name in done)]

    def _is_news(self, name: str, given: GivenUp) -> bool:
        worker = self._supervisor.workers.get(name)
        if worker is None:
            return False
        # One that was behind may have been told meanwhile, and works again.
        return isinstance(given.event, cluster.WorkerDied) or worker.turns == given.turn

    def lose(self, lane: int) -> None:
        """Note that a call to a lane failed: its process may be gone, so the next one is told all.

        A late report of the dead one may count as the newest then. Its successor says that it knows nothing, and is
        told all the same. Serials are not kept, because the clock by which they begin may have been put back.
        """
        self.reports[lane] = LaneReport()


def _content(update: LaneUpdate) -> tuple[Any, ...]:
    """Return what makes two updates different; versions differ always."""
    placement = update.placement.version if update.placement is not None else None
    told = update.workers, update.leaving, update.gone, update.lost, update.detached, update.reservations
    return placement, told, update.failed, update.waits_for
