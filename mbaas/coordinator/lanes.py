"""The further lanes of a feed, as its main coordinator sees them; in most feeds there are none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas import runtime
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lane import LaneCoordinator
from mbaas.coordinator.lane_messages import LaneConfig, LaneReport, LaneUpdate
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.supervisor import Production
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core import events as ev
from mbaas.core.transitions import ConsumerState
from mbaas.errors import FeedFailedError
from mbaas.messages import TICK_S
from mbaas.settings import FeedSettings

BEGIN_S = 60.0
"""A lane's coordinator begins within so long."""

TOLD_S = 2.0
"""How long a call may wait until all lanes know what it changed."""

RETRY_S = 0.1
"""Pause before a lane's coordinator that is being restarted is called again."""

KEPT_REASONS = 100
"""Workers and nodes that are gone, of which lanes are told why."""


class _Lane:
    """One further lane.

    Attributes:
        filing: its last one.
        news: set when the standing has changed.
    """

    def __init__(self, number: int, actor: Any) -> None:
        self.number, self.actor = number, actor
        self.lane_report = LaneReport()
        self.news = asyncio.Event()


class LaneSync:
    """Further lanes, and whatever the first lane's desk must do with them in mind.

    Args:
        settings: of the feed.
        production: its workers.
        books: where what lanes file is entered.
        spawn: runs a coroutine in the background.
        fail: ends the feed, for a reason.

    Attributes:
        actors: coordinators of the lanes from 1 on; none before `begin`.
    """

    def __init__(
        self,
        settings: FeedSettings,
        *,
        supervisor: Production,
        counters: Counters,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        fail: Callable[[str], None],
    ) -> None:
        self._settings, self._supervisor, self._counters = settings, supervisor, counters
        self._spawn, self._fail = spawn, fail
        self._lanes: list[_Lane] = []
        self._gone: deque[tuple[str, str]] = deque(maxlen=KEPT_REASONS)
        self._dead: deque[tuple[str, str]] = deque(maxlen=KEPT_REASONS)
        self._free: set[str] = set()  # workers that leave, with which the first lane is done
        self._began, self._count = time.time_ns(), itertools.count()
        self._update: LaneUpdate | None = None

    @property
    def actors(self) -> tuple[Any, ...]:
        """Coordinators of the lanes from 1 on."""
        return tuple(lane_state.actor for lane_state in self._lanes)

    # ---- beginning and end ----

    def begin(self) -> None:
        """Start the coordinators, or find those that an earlier main coordinator left."""
        for number in range(1, self._settings.staging.lanes):
            options = {
                **runtime.child_options(self._settings.name, "lane", str(number)),
                "get_if_exists": True,
                "max_concurrency": 10_000,
                "max_restarts": -1,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                ),
            }
            actor = LaneCoordinator.options(**options).remote(self._settings, number)  # type: ignore[attr-defined]
            self._lanes.append(_Lane(number, actor))

    async def open(self, lane_config: LaneConfig, service: ConsumerService) -> None:
        """Have all lanes serve, and keep them informed from now on.

        Raises:
            FeedFailedError: one does not begin.
        """
        self._lane_config, self._service = lane_config, service
        self.tell()
        for lane_state in self._lanes:
            self._spawn(self._sync_forever(lane_state))
        if not await self.told(BEGIN_S):
            late = [str(lane_state.number) for lane_state in self._lanes if not self._knows(lane_state)]
            raise FeedFailedError(
                f"lane {', '.join(late)} of feed {self._settings.name!r} did not begin within {BEGIN_S:g} s"
            )

    async def end(self) -> None:
        """After the feed failed or was stopped: lanes have told their callers why, and are gone when this returns."""
        if self._update is not None:
            await self.told()
        for lane_state in self._lanes:
            ray.kill(lane_state.actor)
        self._lanes.clear()

    # ---- how things stand ----

    def tell(self) -> None:
        """Things may have changed: tell the lanes."""
        if not self._lanes or not hasattr(self, "_service"):
            return
        old, new = self._update, self._compose()
        if old is None or _content(new) != _content(old):
            self._update = new
            for lane_state in self._lanes:
                lane_state.news.set()

    def _compose(self) -> LaneUpdate:
        tasks, leaving = self._service.core.tasks.workers, self._supervisor.leaving
        worker_pool = self._supervisor.worker_pool.workers
        blocks = self._service.core.blocks_per_epoch
        return LaneUpdate(
            version=(self._began, next(self._count)),
            workers=tuple(worker for name, worker in worker_pool.items() if name in tasks and name not in leaving),
            leaving=frozenset(leaving),
            gone=dict(self._gone),
            dead=dict(self._dead),
            detached=self._detached(),
            placement=self._supervisor.cache_pool.placements.newest,
            reservations=frozenset(
                (member.name, member.cursor // blocks)
                for member in self._service.core.consumers.by_name.values()
                if (member.state is ConsumerState.RESERVED or not member.asked) and member.cursor % blocks == 0
            ),
            failed=self._service.core.failed,
        )

    def _detached(self) -> Counter[str]:
        """Consumer -> how often it was moved out of step, in all lanes together."""
        lanes = (self._service.detached, *(lane_state.lane_report.detached for lane_state in self._lanes))
        return sum(map(Counter, lanes), Counter[str]())

    async def told(self, within_s: float = TOLD_S) -> bool:
        """Wait until all lanes know how things stand; whether they do."""
        end = time.monotonic() + within_s
        while not (known := all(self._knows(lane_state) for lane_state in self._lanes)) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return known

    def _knows(self, lane_state: _Lane) -> bool:
        return self._update is not None and lane_state.lane_report.version == self._update.version

    async def _sync_forever(self, lane_state: _Lane) -> None:
        while lane_state in self._lanes:
            if await self._sync(lane_state) is None:
                await asyncio.sleep(RETRY_S)
            elif self._knows(lane_state):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(lane_state.news.wait(), TICK_S)
            lane_state.news.clear()

    async def _sync(self, lane_state: _Lane, *, in_full: bool = False) -> LaneReport | None:
        """Compare notes with a lane; None if it does not answer."""
        news = None if self._knows(lane_state) else self._update
        lane_config = self._lane_config if lane_state.lane_report.version is None else None
        try:
            lane_report: LaneReport = await lane_state.actor.sync.remote(news, lane_config, in_full=in_full)
        except ray.exceptions.RayTaskError as error:
            self._give_up(f"an internal error in lane {lane_state.number}: {error.cause}")
            return None
        except ray.exceptions.RayError:
            lane_state.lane_report = LaneReport()
            return None
        self._take_in(lane_state, lane_report)
        return lane_report

    def _take_in(self, lane_state: _Lane, lane_report: LaneReport) -> None:
        before, lane_state.lane_report = lane_state.lane_report, lane_report
        for worker, meta in lane_report.made:
            self._counters.finished(worker, meta, self._lane_config.info.order)
        for text in lane_report.notes:
            self._counters.note(text)
        for worker, reason in lane_report.given_up.items():
            self._spawn(self.lost(worker, reason))
        if lane_report.failed is not None:
            self._give_up(lane_report.failed)
        self._dismiss_free()
        for consumer, times in lane_report.detached.items():
            if times > before.detached.get(consumer, 0):
                self._service.send(ev.DetachedElsewhere(consumer))
                self.tell()

    def _give_up(self, reason: str) -> None:
        if self._service.core.failed is None:
            self._fail(reason)

    async def lane_reports(self) -> list[LaneReport]:
        """What each lane tells of itself now, in full; without those that do not answer in time."""
        if not self._lanes:
            return []
        asked = [asyncio.ensure_future(self._sync(lane_state, in_full=True)) for lane_state in self._lanes]
        done, _ = await asyncio.wait(asked, timeout=TOLD_S)
        return [lane_report for task in done if (lane_report := task.result()) is not None]

    @property
    def staged_bytes(self) -> int:
        """Bytes that the further lanes have staged, or have made, as far as they told."""
        return sum(lane_state.lane_report.staged_bytes for lane_state in self._lanes)

    async def leave(self, consumer: str) -> None:
        """Somebody says that a consumer is done: end its session in the further lanes, too."""
        await self.told()  # reservations that are held for its successor come first
        for lane_state in self._lanes:
            lane_state.actor.leave.remote(consumer, None)

    # ---- workers, for the first lane's desk ----

    def worker(self, name: str) -> WorkerHandle | None:
        """A worker that is up, or None."""
        return self._supervisor.worker(name)

    async def lost(self, name: str, reason: str) -> None:
        """A worker is gone, or is to be replaced."""
        await self._supervisor.lost(name, reason)

    def retire(self, name: str, reason: str) -> None:
        """A worker is stuck: end it, and hire another."""
        self._gone.append((name, reason))
        self._supervisor.retire(name)
        self.tell()

    def dismiss(self, name: str) -> None:
        """The first lane is done with a worker that leaves; it goes when all lanes are."""
        self._free.add(name)
        self._dismiss_free()

    def _dismiss_free(self) -> None:
        for name in list(self._free):
            if name not in self._supervisor.leaving:
                self._free.remove(name)
            elif all(
                self._knows(lane_state) and name not in lane_state.lane_report.tasks for lane_state in self._lanes
            ):
                self._free.remove(name)
                self._supervisor.dismiss(name)

    def heard(self, event: ev.Event) -> None:
        """The first lane's core was told something about workers or nodes."""
        match event:
            case ev.WorkerDown():
                self._gone.append((event.worker, event.reason))
            case ev.NodeDown():
                self._dead.append((event.node, event.reason))
        self.tell()


def _content(update: LaneUpdate) -> tuple[Any, ...]:
    """What makes two standings different."""
    placement = update.placement.version if update.placement is not None else None
    names = tuple(worker.name for worker in update.workers)
    told = update.leaving, update.gone, update.dead, update.detached, update.reservations, update.failed
    return names, placement, told
