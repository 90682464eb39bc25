"""The coordinator of a further lane of a feed.

It serves the blocks of its lane; the feed's main coordinator serves the first lane. Workers, placement and reservations
are decided by the main coordinator, which sends updates and collects reports.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from mbaas import runtime, units
from mbaas.coordinator.asking import answer_or_none, is_set_within, report_bugs_to
from mbaas.coordinator.background import BackgroundTasks, InternalErrors, reports_errors_of_calls
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.service import ConsumerApi, ConsumerService
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core import events as ev
from mbaas.core.lane_following import LaneFollower, WorkerEvent
from mbaas.core.lane_messages import LaneConfig, LaneReport, LaneUpdate
from mbaas.core.lanes import LANE_BEGIN_S
from mbaas.core.layout import credit
from mbaas.errors import FeedRestartingError, ResourceError
from mbaas.messages import START_TIMEOUT_S, TICK_S, BlockMeta, ConsumerReport
from mbaas.order import SampleOrder
from mbaas.placement import PlacementHistory
from mbaas.settings import FeedSettings

ANSWER_S = 2.0
"""Timeout for the main coordinator to find the relay of a node, in seconds."""

RETRY_S = 0.1
"""Pause between two attempts to get a lane's name, in seconds."""

KEPT_ENTRIES = 10_000
"""Entries kept for a main coordinator that is restarting. Its counters miss older entries."""


class _LaneCounters(Counters):
    def __init__(self) -> None:
        super().__init__()
        self.made: deque[tuple[str, BlockMeta]] = deque(maxlen=KEPT_ENTRIES)
        self.news: deque[str] = deque(maxlen=KEPT_ENTRIES)

    def note(self, text: str) -> None:
        self.news.append(text)

    def finished(self, worker: str, meta: BlockMeta, order: SampleOrder) -> None:
        super().finished(worker, meta, order)
        self.made.append((worker, meta))


@reports_errors_of_calls(but={"sync"})  # the main coordinator reports errors of its own `sync` calls
class LaneCoordinator(ConsumerApi):
    """Runs lane ``number`` (from 1) of a feed. It ends with ``main``, the actor id of the main coordinator."""

    def __init__(self, settings: FeedSettings, number: int, main: str) -> None:
        self._settings, self._number = settings, number
        self._counters = _LaneCounters()
        self._errors = InternalErrors(self._counters)
        report_bugs_to(self._errors)
        self._tasks = BackgroundTasks(self._errors)
        super().__init__(self._tasks.spawn)
        self._serving: tuple[ConsumerService, LaneFollower] | None = None
        self._began = time.time_ns()
        self._opened = asyncio.Event()
        runtime.end_with(main)

    # ---- life ----

    def _open(self, config: LaneConfig) -> tuple[ConsumerService, LaneFollower]:
        placements = PlacementHistory(config.layout.order)
        service = ConsumerService(
            config.info,
            config.layout,
            config.layout.lane(self._number, self._settings),
            placements=placements,
            worker_of=self._worker,
            report=self._report,
            waits_for=self._waits_for,
            counters=self._counters,
            errors=self._errors,
            spawn=self._tasks.spawn,
        )
        self._tasks.spawn(self._tick_forever(service))
        tasks = credit(self._settings.staging.lanes)
        return service, LaneFollower(service.core, placements, credit=tasks, began=self._began)

    async def _until_open(self) -> ConsumerService:
        if not await is_set_within(self._opened, START_TIMEOUT_S):
            who = f"lane {self._number} of feed {self._settings.name!r}"
            raise FeedRestartingError(f"{who} was not told to begin within {units.seconds(START_TIMEOUT_S)}")
        assert self._serving is not None
        return self._serving[0]

    async def _tick_forever(self, service: ConsumerService) -> None:
        while service.core.failed is None:
            await asyncio.sleep(TICK_S)
            with self._errors.reported():
                service.send(ev.Tick())

    # ---- called by the main coordinator ----

    async def sync(self, update: LaneUpdate | None, config: LaneConfig | None, *, in_full: bool) -> LaneReport:
        """Apply an update, and report the work since the last report.

        Args:
            update: the new state; None if it has not changed since the last update.
            config: for a lane that may not have started yet.
            in_full: True to include the blocks held by each consumer.
        """
        if config is not None and self._serving is None:
            self._serving = self._open(config)
        if self._serving is None:
            return LaneReport()
        service, follower = self._serving
        for event in follower.hear(update):
            with self._errors.reported():  # events are delivered only once, so continue after a bug
                service.send(event)
        if follower.update is None:
            return LaneReport()
        if follower.update.failed is not None:
            service.fail(follower.update.failed)
        self._opened.set()
        return self._lane_report(service, follower, in_full)

    def _lane_report(self, service: ConsumerService, follower: LaneFollower, in_full: bool) -> LaneReport:
        counters = self._counters
        lane_report = follower.report(
            made=counters.made,
            notes=counters.news,
            internal_errors=counters.internal_errors,
            detached=service.detached,
            in_full=in_full,
            cpu_s=time.process_time(),
        )
        counters.made.clear()
        counters.news.clear()
        counters.internal_errors = 0
        return lane_report

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """Do nothing: consumers report to the first lane."""

    async def _until_kept(self, report: ConsumerReport) -> None:
        """Return at once: ledgers are stored by the first lane."""

    async def relaying(self, node: str, may_start: bool) -> Any | None:
        """Return the relay from the main coordinator, which starts cache nodes and relays."""
        main = runtime.find_coordinator(self._settings.name)
        return None if main is None else await answer_or_none(main.relaying.remote(node, may_start), ANSWER_S)

    # ---- workers ----

    def _report(self, event: WorkerEvent) -> None:
        assert self._serving is not None
        service, follower = self._serving
        for meant in follower.give_up(event):
            service.send(meant)

    def _worker(self, name: str) -> WorkerHandle | None:
        update = self._newest()
        worker = update.workers.get(name) if update is not None else None
        return worker.handle if worker is not None else None

    def _waits_for(self) -> tuple[str, ...]:
        update = self._newest()
        return update.waits_for if update is not None else ()

    def _newest(self) -> LaneUpdate | None:
        return self._serving[1].update if self._serving is not None else None


LaneCoordinatorActor: Any = ray.remote(num_cpus=0)(LaneCoordinator)


async def start_lanes(settings: FeedSettings) -> tuple[Any, ...]:
    """Start the coordinators of lanes 1 and up, or find existing ones of an earlier main coordinator.

    Raises:
        ResourceError: a name is still taken by an actor that is gone.
    """
    # On the main coordinator's node, because messages are frequent, and then a node failure takes all lanes or none.
    # Ray restarts them without limit, like the main coordinator: a missing lane stops every consumer.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"get_if_exists": True, "max_concurrency": 10_000, "max_restarts": -1, "scheduling_strategy": here}
    return tuple([await _start_lane(settings, number, options) for number in range(1, settings.staging.lanes)])


async def _start_lane(settings: FeedSettings, number: int, options: dict[str, Any]) -> Any:
    named = runtime.child_options(settings.name, "lane", str(number))

    async def start() -> Any:
        own_id = ray.get_runtime_context().get_actor_id()
        return LaneCoordinatorActor.options(**named, **options).remote(settings, number, own_id)

    # Ray may hold the name of an actor that was just killed, and neither find it nor start a new one.
    is_held = ValueError, ray.exceptions.RayError
    retry = AsyncRetrying(
        retry=retry_if_exception_type(is_held),
        wait=wait_fixed(RETRY_S),
        stop=stop_after_delay(LANE_BEGIN_S),
        reraise=True,
    )
    try:
        return await retry(start)
    except is_held as error:
        raise ResourceError(f"lane {number} of feed {settings.name!r} cannot be started: {error}") from None
