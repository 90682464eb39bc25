"""Exchanges messages between the main coordinator and the further lanes of a feed. Most feeds have only one lane.

`mbaas.core.lane_following` decides the contents and meaning of messages. The supervisor decides which lanes serve or
restart (`mbaas.core.lanes`), depending on their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from mbaas import units
from mbaas.calls import wire
from mbaas.coordinator.background import InternalErrors
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.lane_following import LaneLeader
from mbaas.core.lane_messages import LaneConfig, LaneReport
from mbaas.core.lanes import LANE_BEGIN_S
from mbaas.errors import ResourceError
from mbaas.messages import TICK_S

TOLD_S = 2.0
"""Longest wait of a call until all lanes have applied its change, in seconds.

A lane that is being restarted takes longer, and receives the full state when it is back.
"""

RETRY_S = 0.1
"""Pause before the next call to a lane coordinator that is being restarted, in seconds."""


class _Lane:
    def __init__(self, number: int, actor: Any) -> None:
        self.number, self.actor = number, actor
        self.news = asyncio.Event()


class LaneSync:
    """Keeps the further lanes of a feed in step with the first one."""

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
        self._leader = LaneLeader(
            len(actors) + 1,
            supervisor=supervision.state,
            core=service.core,
            placements=supervision.caches.placements,
            process_of=self._process_of,
            began=time.time_ns(),
        )

    # ---- start and end ----

    def open(self, spawn: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        """Start all lanes, and send them updates from now on."""
        for lane in self._lanes:
            spawn(self._sync_forever(lane))

    async def until_begun(self) -> None:
        """Wait until all lanes of a new feed serve.

        Raises:
            ResourceError: a lane does not start.
        """
        if not await self.told(LANE_BEGIN_S):
            late = [str(lane.number) for lane in self._lanes if not self._leader.knows(lane.number)]
            feed = self._config.info.settings.name
            within = units.seconds(LANE_BEGIN_S)
            raise ResourceError(f"lane {', '.join(late)} of feed {feed!r} did not begin within {within}")

    async def end(self) -> None:
        """Stop exchanging messages after the feed failed or was stopped. Lanes have answered their callers by then."""
        await self.told()
        self._lanes.clear()

    # ---- updates ----

    def tell(self) -> None:
        """Send the current state to the lanes if it has changed since the last update."""
        if self._lanes and self._leader.look(self._service.detached):
            for lane in self._lanes:
                lane.news.set()

    def _process_of(self, name: str) -> tuple[int, WorkerHandle] | None:
        worker = self._supervision.worker(name)
        return None if worker is None else (worker.pid, worker)

    async def told(self, within_s: float = TOLD_S) -> bool:
        """Wait until all lanes have applied the current state. Return whether they have."""
        end = time.monotonic() + within_s
        # Polled, because a report arrives with every exchange anyway; this needs no registry of waiters.
        while not (known := all(self._leader.knows(lane.number) for lane in self._lanes)) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return known

    async def _sync_forever(self, lane: _Lane) -> None:
        while lane in self._lanes:
            if await self._sync(lane) is None:
                await asyncio.sleep(RETRY_S)
            elif self._leader.knows(lane.number):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(lane.news.wait(), TICK_S)
            lane.news.clear()

    async def _sync(self, lane: _Lane, *, in_full: bool = False) -> LaneReport | None:
        try:
            return await self._exchange(lane, in_full)
        except Exception as error:  # a bug of ours; a lane without messages would be killed as silent
            self._errors.report(error)
            return None

    async def _exchange(self, lane: _Lane, in_full: bool) -> LaneReport | None:
        update, knows_nothing = self._leader.message(lane.number)
        config = self._config if knows_nothing else None
        try:
            lane_report: LaneReport = await lane.actor.sync.remote(update, config, in_full=in_full)
        except ray.exceptions.RayTaskError as error:
            self._errors.report(error, f"in lane {lane.number}, which will be updated again")
            await asyncio.sleep(TICK_S)
            return None
        except ray.exceptions.RayError:
            self._leader.lose(lane.number)
            self._supervision.handle(cluster.LaneLost(lane.number))
            return None
        self._take_in(lane, lane_report)
        return lane_report

    def _take_in(self, lane: _Lane, lane_report: LaneReport) -> None:
        heard = self._leader.hear(lane.number, lane_report)
        if heard.is_new:
            for worker, meta in lane_report.made:
                self._counters.finished(worker, meta, self._config.info.order)
            for text in lane_report.notes:
                self._counters.note(text)
            self._counters.internal_errors += lane_report.internal_errors
            self._counters.coordinators_cpu_s.enter((lane.number, lane_report.serial[0]), lane_report.cpu_s)
        for event in heard.for_supervisor:
            self._supervision.handle(event)
        for moved in heard.for_first_lane:
            self._service.send(moved)
            self.tell()

    async def lane_reports(self) -> list[LaneReport]:
        """Collect a full report from each lane; lanes that do not answer in time are left out."""
        if not self._lanes:
            return []
        asked = [asyncio.ensure_future(self._sync(lane, in_full=True)) for lane in self._lanes]
        done, _ = await asyncio.wait(asked, timeout=TOLD_S)
        return [lane_report for task in done if (lane_report := task.result()) is not None]

    @property
    def staged_bytes(self) -> int:
        """Bytes staged or in preparation in the further lanes, as last reported."""
        return sum(self._leader.reports[lane.number].staged_bytes for lane in self._lanes)

    async def leave(self, consumer: str) -> None:
        """End a consumer's session in the further lanes too."""
        await self.told()  # reservations for its successor must arrive first
        for lane in self._lanes:
            lane.actor.leave.remote(wire.encode(ev.Leave(consumer)))

    def heard(self, event: ev.Event) -> None:
        """Record an event of the first lane, and send its consequences to the other lanes."""
        self._leader.note(event)
        self.tell()
