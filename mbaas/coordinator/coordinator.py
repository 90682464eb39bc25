"""The coordinator: the actor that runs a feed.

It serves the first lane, in most feeds the only one, through a `ConsumerService`. For all lanes it starts and tunes the
workers, lends and scales them, knows who is where, and tells people how the feed is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import ray

from mbaas.allocation.lending import DemandReport
from mbaas.allocation.scaling import Observation, Scaler
from mbaas.allocation.throughput import MOST_COUNT
from mbaas.coordinator.api import ConsumerApi
from mbaas.coordinator.background import Jobs
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lane_messages import LaneConfig
from mbaas.coordinator.lanes import LaneSync
from mbaas.coordinator.lending import LendingClient
from mbaas.coordinator.peer_feeds import Offer
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.status_report import snapshot
from mbaas.coordinator.stories import told_by_all
from mbaas.coordinator.supervisor import Production
from mbaas.coordinator.thread_tuning import Tuning
from mbaas.core import events as ev
from mbaas.core.demand import DemandEstimator, Look
from mbaas.core.ranks import RankTable
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError, MbaasError
from mbaas.messages import START_TIMEOUT_S, TICK_S, Admission, ConsumerReport, FeedInfo, RankOrders, RankPlace
from mbaas.metrics import FeedMetrics
from mbaas.placement import PlacementUpdate
from mbaas.prep.engines import resolve_engine
from mbaas.settings import FeedSettings
from mbaas.status import FeedStatus

TICKS_A_REPORT = 8
"""Metrics are brought up to date every so many ticks."""

TICKS_A_LOOK = 4
"""Whether more or fewer workers would be right is looked at every so many ticks."""


@ray.remote(num_cpus=0)
class Coordinator(ConsumerApi):
    """Runs one feed; made by `mbaas.serve`.

    Args:
        settings: the feed's options.
        pipeline: what to do to samples.
        gpus: GPUs in the cluster, for ``engine="auto"``.
    """

    def __init__(self, settings: FeedSettings, pipeline: Any, gpus: int) -> None:
        self._settings, self._pipeline = settings, pipeline
        self._engine = resolve_engine(settings.engine, pipeline, gpus=gpus)
        self._jobs = Jobs(self._fail)
        self._closing = False
        self._unopened: MbaasError | None = None
        self._opened = asyncio.Event()
        self._enlisted = asyncio.Condition()
        self._counters = Counters()
        self._metrics = FeedMetrics(settings.name)
        self._supervisor = Production(
            settings, pipeline, self._engine, counters=self._counters, send=self._send, spawn=self._jobs.spawn
        )
        self._lanes = LaneSync(
            settings, supervisor=self._supervisor, counters=self._counters, spawn=self._jobs.spawn, fail=self._fail
        )
        self._goes_on = False
        self._gauge, self._scaler = DemandEstimator(), Scaler(settings.scaling)
        self._exchange = LendingClient(
            settings, engine=self._engine, supervisor=self._supervisor, counters=self._counters
        )
        self._tuning = Tuning(settings, supervisor=self._supervisor, counters=self._counters)
        self._has_predecessor = ray.get_runtime_context().was_current_actor_reconstructed

    # ---- life ----

    async def start(self, dataset: Dataset) -> FeedInfo:
        """Hire the workers, learn what a prepared sample is, and open.

        Args:
            dataset: the samples; not the constructor's, because its creator may be gone when it is restarted.

        Raises:
            ResourceError: workers did not get their CPUs.
            BadSampleError: no sample can be prepared.
            ConfigError: the staging budget is too small.
            FeedFailedError: a lane does not begin.
        """
        self._lanes.begin()
        await self._supervisor.open(dataset)
        return await self._open()

    async def _go_on(self) -> None:
        """After a restart: take over what the predecessor left. Consumers tell their cursors themselves."""
        try:
            self._lanes.begin()
            await self._supervisor.adopt()
            await self._open()
        except MbaasError as error:
            self._unopened = error
            self._opened.set()

    async def _until_open(self) -> None:
        """Consumers may come while the feed starts; they wait as long as `start` may take."""
        if self._has_predecessor and not self._goes_on:
            self._goes_on = True
            self._jobs.spawn(self._go_on())
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FeedFailedError(
                f"feed {self._settings.name!r} is still starting after {START_TIMEOUT_S:g} s"
            ) from None
        if self._unopened is not None:
            raise self._unopened

    async def _open(self) -> FeedInfo:
        layout, dataset = self._supervisor.layout, self._supervisor.dataset
        self._info = FeedInfo(
            settings=self._settings,
            order=layout.order,
            spec=layout.spec,
            fingerprint=f"{dataset.fingerprint}-{self._pipeline.fingerprint}-{self._settings.seed}",
            normalize=self._pipeline.normalize,
            class_names=dataset.class_names,
            lanes=self._lanes.actors,
        )
        self._service = ConsumerService(
            self._info,
            layout,
            layout.lane(0, self._settings),
            placements=self._supervisor.cache_pool.placements,
            makers=self._lanes,
            counters=self._counters,
            spawn=self._jobs.spawn,
            fail=self._fail,
        )
        self._ranks = RankTable(self._service.lane.blocks_per_epoch, self._cursor_of)
        self._supervisor.begin()
        await self._lanes.open(LaneConfig(layout, self._info), self._service)
        self._jobs.spawn(self._tick_forever())
        self._opened.set()
        return self._info

    async def _tick_forever(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            if self._closing:
                return
            self._send(ev.Tick())
            if tick % TICKS_A_LOOK == 0:
                self._look()
            if tick % TICKS_A_REPORT == 0:
                staged_bytes = self._service.core.window.used_bytes + self._lanes.staged_bytes
                self._metrics.update(self._counters, staged_bytes, len(self._supervisor.worker_pool.workers))

    def _look(self) -> None:
        """Have as many workers as trials need, if they would help: other feeds' first, then more from the cluster."""
        counters, supervisor, settings, now = self._counters, self._supervisor, self._settings, time.monotonic()
        look = Look(now, dict(counters.reports), counters.samples, counters.prep_s)
        seen = self._gauge.observe(
            look,
            self._service.core.consumers,
            workers=supervisor.staying,
            pending=supervisor.awaited,
            reserved=min(settings.prep_workers, supervisor.wanted),  # what is lent is not hired a second time
            most=settings.scaling.max_prep_workers or MOST_COUNT,
        )
        self._jobs.spawn(supervisor.weigh())
        self._jobs.spawn(self._tuning.look(seen.demand_per_s if seen is not None else 0.0))
        if seen is None:
            return
        if settings.lending.enabled:
            self._jobs.spawn(self._exchange.look(seen))
        if settings.scaling.max_prep_workers is not None:
            self._scale(seen, now)

    def _scale(self, seen: Observation, now: float) -> None:
        self._scaler.moved(self._supervisor.wanted)
        decision = self._scaler.observe(seen, now)
        if decision.change:
            self._counters.note(
                f"{decision.workers} prep workers instead of {self._supervisor.wanted}: {decision.reason}"
            )
            self._supervisor.scale(decision.workers)

    async def stop(self) -> None:
        """End the feed: calls that wait are answered, workers and cache are gone when this returns."""
        self._closing = True
        self._fail(f"feed {self._settings.name!r} was stopped")
        await self._lanes.end()
        await self._supervisor.end()

    # ---- what consumers call ----

    async def info(self) -> FeedInfo:
        """The feed's description."""
        await self._until_open()
        return self._info

    async def claims(self) -> int:
        """Bytes of the object store that this feed may use."""
        return self._settings.cache_bytes + self._settings.staging_bytes

    async def announce(self, consumers: list[str]) -> None:
        """Hold reservations for consumers that will join soon."""
        await self._until_open()
        for consumer in consumers:
            self._send(ev.Announce(consumer))
        await self._lanes.told()

    async def join(self, consumer: str, start: int | None, flexible: bool) -> Admission:
        """Open a session; in a feed with lanes in its first one.

        Raises:
            FeedFailedError: the feed cannot go on.
        """
        admission = await super().join(consumer, start, flexible)
        self._lanes.tell()
        return admission

    async def leave(
        self,
        consumer: str,
        session: int | None,
        reserve: bool = False,
        report: ConsumerReport | None = None,
    ) -> None:
        """A consumer is done, or without a ``session`` somebody says so; with ``reserve`` its place is held for a
        successor.
        """
        await super().leave(consumer, session, reserve, report)
        self._lanes.tell()
        if session is None:
            await self._lanes.leave(consumer)

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        self._counters.report(consumer, report)

    async def enlist_rank(self, place: RankPlace) -> None:
        """A rank of a data-parallel trial opened a session: where it runs."""
        await self._until_open()
        self._ranks.enlist(place)
        async with self._enlisted:
            self._enlisted.notify_all()

    async def rank_orders(self, place: RankPlace, epoch: int, poll_s: float) -> RankOrders:
        """By what the minibatches of an epoch are shared out; waits for missing ranks, at most ``poll_s``."""
        await self._until_open()

        def orders() -> RankOrders:
            cache_pool = self._supervisor.cache_pool
            return self._ranks.orders(place, epoch, cache_pool.placements.newest, cache_pool.caches)

        async with self._enlisted:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enlisted.wait_for(lambda: orders().plan is not None), poll_s)
        return orders()

    def _cursor_of(self, consumer: str, session: int) -> int | None:
        member = self._service.core.consumers.session(consumer, session)
        return member.cursor if member is not None else None

    async def status(self) -> FeedStatus:
        """A snapshot.

        Raises:
            FeedFailedError: the feed is not open yet.
        """
        if not self._opened.is_set() and not self._has_predecessor:
            raise FeedFailedError(f"feed {self._settings.name!r} is still starting")
        await self._until_open()
        caches = {} if self._closing else await self._supervisor.cache_pool.stats()
        lane_reports = [] if self._closing else await self._lanes.lane_reports()
        return snapshot(
            self._counters,
            self._info,
            self._engine,
            self._service,
            self._supervisor.worker_pool,
            caches=caches,
            lane_reports=lane_reports,
        )

    async def story(self, thing: str) -> list[str]:
        """What happened to a thing, in all lanes; see `mbaas.Feed.story`.

        Raises:
            ConfigError: nothing is known of it; the message lists what there is.
        """
        return await told_by_all(await self.lane_story(thing), self._lanes.actors, thing)

    async def expect(self, epoch_s: float) -> None:
        """Compare the next epoch with a prediction of its seconds."""
        self._counters.expect(epoch_s)

    async def placement_update(self) -> PlacementUpdate | None:
        """What a cache node that was restarted must know."""
        await self._until_open()
        return self._supervisor.cache_pool.placement_update

    # ---- what the coordinators of other feeds call ----

    async def outlook(self) -> DemandReport | None:
        """How many workers the feed has, and needs; None if it does not lend, or does not know."""
        return self._exchange.outlook() if self._settings.lending.enabled else None

    async def take_on(self, offer: Offer) -> bool:
        """Have a worker of another feed, or one that comes back, work here."""
        return self._opened.is_set() and self._unopened is None and await self._supervisor.loans.take_on(offer)

    async def lost_worker(self, actor: Any) -> None:
        """A worker that was lent is gone."""
        self._supervisor.loans.lost(actor)

    # ---- for the parts of this actor ----

    def _send(self, event: ev.Event) -> None:
        """Give an event to the first lane, and to the others what follows from it for them."""
        self._service.send(event)
        self._lanes.heard(event)

    def _fail(self, reason: str) -> None:
        self._supervisor.ended = True
        if hasattr(self, "_service"):
            self._service.fail(reason)
        self._counters.note(f"the feed failed: {reason}")
        self._lanes.tell()
