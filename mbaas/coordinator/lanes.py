"""What the main coordinator and the further lanes of a feed say to each other; in most feeds there are none.

Which of them serve, and which must be started anew, the supervisor decides: it hears who answers (`mbaas.core.lanes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from mbaas.coordinator.background import InternalErrors
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lane_messages import LaneConfig, LaneReport, LaneUpdate
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.supervision import Supervision
from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.lanes import LANE_BEGIN_S
from mbaas.core.supervised import WorkerPhase
from mbaas.core.transitions import ConsumerState
from mbaas.errors import ResourceError
from mbaas.messages import TICK_S

TOLD_S = 2.0
"""Longest time that a call waits until all lanes know what it changed. A lane that is being restarted takes longer, and
is told everything when it is back.
"""

RETRY_S = 0.1
"""Pause before a lane's coordinator that is being restarted is called again."""

KEPT_REASONS = 100
"""Workers and nodes that are gone, of which lanes are told why."""


class _Lane:
    """One further lane.

    Attributes:
        lane_report: the last one that it gave.
        news: set when there is an update that it may not know.
    """

    def __init__(self, number: int, actor: Any) -> None:
        self.number, self.actor = number, actor
        self.lane_report = LaneReport()
        self.news = asyncio.Event()


class LaneSync:
    """Keeps the further lanes of a feed in step with the first one.

    Args:
        actors: coordinators of the lanes from 1 on.
        config: what they are told once.
        service: serves the first lane.
        supervision: knows the workers.
        counters: where what lanes report is entered.
        errors: where bugs that a lane meets while it is told something are reported.
    """

    def __init__(
        self,
        actors: tuple[Any, ...],
        config: LaneConfig,
        service: ConsumerService,
        *,
        supervision: Supervision,
        counters: Counters,
        errors: InternalErrors,
    ) -> None:
        self._config, self._service, self._supervision = config, service, supervision
        self._counters, self._errors = counters, errors
        self._lanes = [_Lane(number, actor) for number, actor in enumerate(actors, 1)]
        self._gone: deque[ev.WorkerDown] = deque(maxlen=KEPT_REASONS)
        self._dead: deque[tuple[str, str]] = deque(maxlen=KEPT_REASONS)
        self._began, self._count = time.time_ns(), itertools.count()
        self._update = self._compose()

    # ---- beginning and end ----

    def open(self, spawn: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        """Have all lanes serve, and keep them informed from now on."""
        for lane in self._lanes:
            spawn(self._sync_forever(lane))

    async def until_begun(self) -> None:
        """Wait until all lanes of a new feed serve.

        Raises:
            ResourceError: one does not begin.
        """
        if not await self.told(LANE_BEGIN_S):
            late = [str(lane.number) for lane in self._lanes if not self._knows(lane)]
            feed = self._config.info.settings.name
            raise ResourceError(f"lane {', '.join(late)} of feed {feed!r} did not begin within {LANE_BEGIN_S:g} s")

    async def end(self) -> None:
        """Say no more to lanes after the feed failed or was stopped; they have told their callers why when this
        returns.
        """
        await self.told()
        self._lanes.clear()

    # ---- how things stand ----

    def tell(self) -> None:
        """Tell the lanes how things stand, if that differs from what they were told last."""
        if not self._lanes:
            return
        new = self._compose()
        if _content(new) != _content(self._update):
            self._update = new
            for lane in self._lanes:
                lane.news.set()

    def _compose(self) -> LaneUpdate:
        """Describe how things stand: the whole state, so that a lane that missed updates needs only the newest."""
        state, handles = self._supervision.state, self._supervision.workers.workers
        blocks = self._service.core.blocks_per_epoch
        return LaneUpdate(
            version=(self._began, next(self._count)),  # the time first: a restarted coordinator counts from 0 again
            workers=tuple(handles[name] for name in state.in_phase(WorkerPhase.WORKING) if name in handles),
            turns={name: worker.turns for name, worker in state.in_phase(WorkerPhase.WORKING).items()},
            leaving=frozenset(state.in_phase(WorkerPhase.LEAVING)),
            gone={event.worker: event for event in self._gone},
            dead=dict(self._dead),
            detached=self._detached(),
            placement=self._supervision.caches.placements.newest,
            reservations=frozenset(
                (member.name, member.cursor // blocks)
                for member in self._service.core.consumers.by_name.values()
                if (member.state is ConsumerState.RESERVED or not member.asked) and member.cursor % blocks == 0
            ),
            failed=self._service.core.failed,
            waits_for=state.waits_for,
        )

    def _detached(self) -> Counter[str]:
        """Consumer -> how often it was moved out of step, in all lanes together."""
        lanes = (self._service.detached, *(lane.lane_report.detached for lane in self._lanes))
        return sum(map(Counter, lanes), Counter[str]())

    async def told(self, within_s: float = TOLD_S) -> bool:
        """Wait until all lanes know how things stand; whether they do."""
        end = time.monotonic() + within_s
        # Polled, because a report comes with every exchange of notes anyway: no waiter has to be known to anybody.
        while not (known := all(self._knows(lane) for lane in self._lanes)) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return known

    def _knows(self, lane: _Lane) -> bool:
        return lane.lane_report.version == self._update.version

    async def _sync_forever(self, lane: _Lane) -> None:
        while lane in self._lanes:
            if await self._sync(lane) is None:
                await asyncio.sleep(RETRY_S)
            elif self._knows(lane):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(lane.news.wait(), TICK_S)
            lane.news.clear()

    async def _sync(self, lane: _Lane, *, in_full: bool = False) -> LaneReport | None:
        """Exchange messages with a lane, and return its report; None if it does not answer."""
        # A lane without a version is new, or was restarted, and knows nothing: it gets all that it must know once, too.
        news = None if self._knows(lane) else self._update
        config = self._config if lane.lane_report.version is None else None
        try:
            lane_report: LaneReport = await lane.actor.sync.remote(news, config, in_full=in_full)
        except ray.exceptions.RayTaskError as error:
            self._errors.report(error, f"in lane {lane.number}, which is told again")
            await asyncio.sleep(TICK_S)
            return None
        except ray.exceptions.RayError:
            # Its actor is gone. What it told is void: the empty report has no version, so its successor is told all.
            lane.lane_report = LaneReport()
            self._supervision.handle(cluster.LaneLost(lane.number))
            return None
        if lane_report.version is not None:
            self._supervision.handle(cluster.LaneAnswered(lane.number))
        self._take_in(lane, lane_report)
        return lane_report

    def _take_in(self, lane: _Lane, lane_report: LaneReport) -> None:
        before, lane.lane_report = lane.lane_report, lane_report
        for worker, meta in lane_report.made:
            self._counters.finished(worker, meta, self._config.info.order)
        for text in lane_report.notes:
            self._counters.note(text)
        self._counters.internal_errors += lane_report.internal_errors
        self._supervision.caches.placements.add_older(lane_report.placements)
        for name, event in lane_report.given_up.items():
            # The lane says so until an update does not list the worker any more; only the first time is news.
            if name not in before.given_up:
                self._supervision.handle(event)
        # Only of a lane that knows the newest update: one that has not heard of a new worker yet has nothing of it in
        # hand either, and would be taken for done with it.
        if self._knows(lane):
            for name in self._supervision.state.in_phase(WorkerPhase.LEAVING).keys() - lane_report.tasks.keys():
                self._supervision.handle(cluster.WorkerDone(name, lane.number))
        for consumer, times in lane_report.detached.items():
            if times > before.detached.get(consumer, 0):
                self._service.send(ev.DetachedElsewhere(consumer))
                self.tell()

    async def lane_reports(self) -> list[LaneReport]:
        """Ask each lane for a full report; lanes that do not answer in time are left out."""
        if not self._lanes:
            return []
        asked = [asyncio.ensure_future(self._sync(lane, in_full=True)) for lane in self._lanes]
        done, _ = await asyncio.wait(asked, timeout=TOLD_S)
        return [lane_report for task in done if (lane_report := task.result()) is not None]

    @property
    def staged_bytes(self) -> int:
        """Bytes that the further lanes have staged, or have made, as far as they told."""
        return sum(lane.lane_report.staged_bytes for lane in self._lanes)

    async def leave(self, consumer: str) -> None:
        """End a consumer's session in the further lanes, too."""
        await self.told()  # reservations that are held for its successor come first
        for lane in self._lanes:
            lane.actor.leave.remote(consumer, None)

    def heard(self, event: ev.Event) -> None:
        """Note an event of the first lane; the next update tells the others what follows from it."""
        match event:
            case ev.WorkerDown():
                self._gone.append(event)
            case ev.NodeDown():
                self._dead.append((event.node, event.reason))
        self.tell()


def _content(update: LaneUpdate) -> tuple[Any, ...]:
    """Return what makes two updates different; versions differ always."""
    placement = update.placement.version if update.placement is not None else None
    names = tuple(worker.name for worker in update.workers)
    told = update.turns, update.leaving, update.gone, update.dead, update.detached, update.reservations
    return names, placement, told, update.failed, update.waits_for
