"""The coordinator: the actor that runs a feed.

It serves the first lane, in most feeds the only one, through a `ConsumerService`. For all lanes it starts and tunes the
workers, lends and scales them, knows who is where, and tells people how the feed is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass
from typing import Any

import ray

from mbaas.allocation.lending import DemandReport
from mbaas.allocation.scaling import Observation, Scaler
from mbaas.allocation.throughput import MOST_COUNT
from mbaas.coordinator import recovery
from mbaas.coordinator.background import BackgroundTasks
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lane_messages import LaneConfig
from mbaas.coordinator.lanes import LaneSync, start_lanes
from mbaas.coordinator.lending import LendingClient
from mbaas.coordinator.peer_feeds import Offer
from mbaas.coordinator.service import ConsumerApi, ConsumerService
from mbaas.coordinator.status_report import snapshot
from mbaas.coordinator.stories import told_by_all, with_supervisor
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.thread_tuning import ThreadTuning
from mbaas.core import calls
from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.demand import DemandEstimator, Look
from mbaas.core.ranks import RankTable
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError, ResourceError
from mbaas.messages import START_TIMEOUT_S, TICK_S, Admission, Claims, ConsumerReport, FeedInfo, RankOrders, RankPlace
from mbaas.metrics import FeedMetrics
from mbaas.placement import PlacementUpdate
from mbaas.prep.engines import resolve_engine
from mbaas.settings import FeedSettings
from mbaas.status import FeedStatus

RETRY_S = 1.0
"""Pause before a coordinator that was restarted looks again for what its predecessor left."""

TICKS_A_REPORT = 8
"""Ticks between two updates of the metrics: two seconds."""

TICKS_A_LOOK = 4
"""Ticks between two looks at how many workers are needed: a second."""


@dataclass(frozen=True)
class _Running:
    """What there is once a feed is open."""

    info: FeedInfo
    service: ConsumerService
    lanes: LaneSync
    ranks: RankTable

    def send(self, event: ev.Event) -> None:
        """Give an event to the first lane, and to the others what follows from it for them."""
        self.service.send(event)
        self.lanes.heard(event)


@ray.remote(num_cpus=0)
class Coordinator(ConsumerApi):
    """Runs one feed; made by `mbaas.serve`.

    Args:
        settings: the feed's options.
        pipeline: what to do to samples.
        gpus: GPUs in the cluster when the feed was served, for ``engine="auto"``.
    """

    def __init__(self, settings: FeedSettings, pipeline: Any, gpus: int) -> None:
        self._settings, self._pipeline = settings, pipeline
        # From an argument of the constructor, not from the cluster as it is now: Ray passes the same one to a restarted
        # coordinator, and the engine, whose pixels differ from the other's, stays what it was.
        self._engine = resolve_engine(settings.engine, pipeline, gpus=gpus)
        self._counters = Counters()
        self._tasks = BackgroundTasks(self._counters)
        self._metrics = FeedMetrics(settings.name)
        self._supervision = Supervision(
            settings, pipeline, self._engine, counters=self._counters, spawn=self._tasks.spawn
        )
        self._demand, self._scaler = DemandEstimator(), Scaler(settings.scaling)
        self._lending = LendingClient(
            settings, engine=self._engine, supervision=self._supervision, counters=self._counters
        )
        self._tuning = ThreadTuning(settings, supervision=self._supervision, counters=self._counters)
        # After a crash Ray calls the constructor again, with the same arguments, but not `start`.
        self._has_predecessor = ray.get_runtime_context().was_current_actor_reconstructed
        self._goes_on = False
        self._kept_epoch = 0  # where a successor begins, as it was kept last
        self._running: _Running | None = None
        self._opened = asyncio.Event()
        self._ended: FeedFailedError | None = None
        self._enlisted = asyncio.Condition()

    # ---- life ----

    async def start(self, dataset: Dataset) -> FeedInfo:
        """Start the workers, learn what a prepared sample is, and open.

        Args:
            dataset: the samples; not the constructor's, because its creator may be gone when it is restarted.

        Raises:
            ResourceError: workers did not get their CPUs, or workers or lanes could not begin.
            BadSampleError: no sample can be prepared.
            ConfigError: the staging budget is too small.
        """
        lanes = await start_lanes(self._settings)
        await self._supervision.prepare(dataset)
        running = self._open(lanes)
        await running.lanes.until_begun()
        await self._supervision.until_at_work()
        return running.info

    async def _go_on(self) -> None:
        """Take over what the predecessor left, after a restart. Consumers tell their cursors themselves."""
        while True:
            with self._tasks.reported():
                try:
                    lanes = await start_lanes(self._settings)
                    await self._supervision.adopt()
                    self._open(lanes)
                    self._counters.restarts += 1
                    return
                except FeedFailedError as error:
                    self._ended = error
                    self._opened.set()
                    return
                except (ResourceError, ray.exceptions.RayError) as error:
                    # What there is to take over may be dying at this very moment.
                    self._counters.note(f"what is left of the feed cannot be taken over yet: {error}")
            await asyncio.sleep(RETRY_S)

    def _open(self, lanes: tuple[Any, ...]) -> _Running:
        layout, dataset = self._supervision.layout, self._supervision.dataset
        info = FeedInfo(
            settings=self._settings,
            order=layout.order,
            spec=layout.spec,
            fingerprint=f"{dataset.fingerprint}-{self._pipeline.fingerprint}-{self._settings.seed}",
            normalize=self._pipeline.normalize,
            class_names=dataset.class_names,
            lanes=lanes,
        )
        service = ConsumerService(
            info,
            layout,
            layout.lane(0, self._settings),
            placements=self._supervision.caches.placements,
            worker_of=self._supervision.worker,
            report=self._supervision.handle,
            counters=self._counters,
            spawn=self._tasks.spawn,
        )
        sync = LaneSync(
            lanes, LaneConfig(layout, info), service, supervision=self._supervision, counters=self._counters
        )
        # Epochs that were begun may have been seen in part, by consumers of this coordinator's predecessor, or of a
        # program that served the feed before and died: whoever begins anew begins the next one.
        service.core.next_epoch = recovery.recall_epoch(self._settings.name, info.fingerprint)
        self._kept_epoch = service.core.successor_epoch  # nothing to keep before an epoch begins
        ranks = RankTable(service.lane.blocks_per_epoch, lambda name, session: _cursor_of(service, name, session))
        running = self._running = _Running(info, service, sync, ranks)
        self._supervision.begin(running.send)
        sync.open(self._tasks.spawn)
        self._tasks.spawn(self._tick_forever(running))
        self._opened.set()
        return running

    async def _until_open(self) -> ConsumerService:
        """Wait until the feed is open, as long as `start` may take: consumers may come before that."""
        return (await self._until_running()).service

    async def _until_running(self) -> _Running:
        # A constructor cannot await, so whoever calls first sets the recovery going: consumers ask again and again.
        if self._has_predecessor and not self._goes_on:
            self._goes_on = True
            self._tasks.spawn(self._go_on())
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FeedFailedError(
                f"feed {self._settings.name!r} is still starting after {START_TIMEOUT_S:g} s"
            ) from None
        if self._running is None:
            assert self._ended is not None
            raise self._ended
        return self._running

    async def _tick_forever(self, running: _Running) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            if running.service.core.failed is not None:
                return
            with self._tasks.reported():
                self._tick(running, tick)

    def _tick(self, running: _Running, tick: int) -> None:
        running.send(ev.Tick())
        self._keep_epoch(running)
        if tick % TICKS_A_LOOK == 0:
            self._supervision.handle(cluster.Tick())
            self._look(running)
        if tick % TICKS_A_REPORT == 0:
            staged_bytes = running.service.core.window.used_bytes + running.lanes.staged_bytes
            self._metrics.update(self._counters, staged_bytes, len(self._supervision.workers.workers))

    def _keep_epoch(self, running: _Running) -> None:
        """Keep the epoch with which a successor begins in the cluster's key-value store, which outlives this actor."""
        epoch = running.service.core.successor_epoch
        if epoch > self._kept_epoch:
            self._kept_epoch = epoch
            # In a thread: the call to the cluster's head blocks, and would hold up every consumer.
            name, fingerprint = self._settings.name, running.info.fingerprint
            self._tasks.spawn(asyncio.to_thread(recovery.keep_epoch, name, fingerprint, epoch))

    def _look(self, running: _Running) -> None:
        """Adapt the number of workers to what trials need: by lending between feeds, and by scaling.

        Nothing is awaited here: `_tick_forever` runs it, and the next tick must not wait for other feeds or for nodes.
        """
        counters, state, settings, now = self._counters, self._supervision.state, self._settings, time.monotonic()
        look = Look(now, dict(counters.reports), counters.samples, counters.prep_s)
        seen = self._demand.observe(
            look,
            running.service.core.consumers,
            workers=state.staying,
            pending=state.starting,
            reserved=min(settings.prep_workers, state.wanted),  # what is lent is not started a second time
            most=settings.scaling.max_prep_workers or MOST_COUNT,
            trial_of=running.ranks.trials(),
        )
        work = {
            name: (float(counters.worker_samples[name]), float(counters.worker_prep_s[name])) for name in state.workers
        }
        self._supervision.handle(cluster.WorkMeasured(work))
        self._tasks.spawn(self._tuning.look(seen.demand_per_s if seen is not None else 0.0))
        if seen is None:
            return
        if settings.lending.enabled:
            self._tasks.spawn(self._lending.look(seen))
        if settings.scaling.max_prep_workers is not None:
            self._scale(seen, now)

    def _scale(self, seen: Observation, now: float) -> None:
        wanted = self._supervision.state.wanted
        self._scaler.moved(wanted)
        decision = self._scaler.observe(seen, now)
        if decision.change:
            self._counters.note(f"{decision.workers} prep workers instead of {wanted}: {decision.reason}")
            self._supervision.handle(cluster.Scale(decision.workers))

    async def stop(self) -> None:
        """End the feed: calls that wait are answered, workers and cache are gone when this returns."""
        reason = f"feed {self._settings.name!r} was stopped"
        if self._running is not None:
            # In this order: callers are answered while the actors that they call still live.
            self._running.service.fail(reason)
            self._running.lanes.tell()
            await self._running.lanes.end()
        await self._supervision.end(reason)

    # ---- what consumers call ----

    async def info(self) -> FeedInfo:
        """Return the feed's description."""
        return (await self._until_running()).info

    async def claims(self) -> Claims:
        """Return what this feed keeps for itself; also while it starts, so that the next feed leaves it that."""
        return self._supervision.claims()

    async def announce(self, consumers: list[str]) -> None:
        """Hold reservations for consumers that will join soon."""
        announced = calls.announce(consumers)
        running = await self._until_running()
        for event in announced:
            running.send(event)
        await running.lanes.told()

    async def join(self, consumer: str, start: int | None, flexible: bool) -> Admission:
        """Open a session; in a feed with lanes in its first one.

        Raises:
            FeedFailedError: the feed cannot go on.
        """
        admission = await super().join(consumer, start, flexible)
        (await self._until_running()).lanes.tell()
        return admission

    async def leave(
        self,
        consumer: str,
        session: int | None,
        reserve: bool = False,
        report: ConsumerReport | None = None,
    ) -> None:
        """End a consumer's session; with ``reserve`` its place is held for a successor.

        Without a ``session`` somebody else says that the consumer is done: Tune, or a user.
        """
        await super().leave(consumer, session, reserve, report)
        lanes = (await self._until_running()).lanes
        lanes.tell()
        if session is None:
            await lanes.leave(consumer)

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        self._counters.report(consumer, report)

    async def enlist_rank(self, place: RankPlace) -> None:
        """Note where a rank of a data-parallel trial runs, which opened a session."""
        place = calls.place(place)
        (await self._until_running()).ranks.enlist(place)
        async with self._enlisted:
            self._enlisted.notify_all()

    async def rank_orders(self, place: RankPlace, epoch: int, poll_s: float) -> RankOrders:
        """Tell how the minibatches of an epoch are shared out; wait for missing ranks, at most ``poll_s``."""
        place, epoch, poll_s = calls.place(place), calls.whole("epoch", epoch), calls.poll_s(poll_s)
        running = await self._until_running()

        def orders() -> RankOrders:
            caches = self._supervision.caches
            return running.ranks.orders(place, epoch, caches.placements.newest, caches.actors)

        async with self._enlisted:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enlisted.wait_for(lambda: orders().plan is not None), poll_s)
        return orders()

    async def status(self) -> FeedStatus:
        """Return a snapshot of the feed.

        Raises:
            FeedFailedError: the feed is not open yet.
        """
        if not self._opened.is_set() and not self._has_predecessor:
            raise FeedFailedError(f"feed {self._settings.name!r} is still starting")
        running = await self._until_running()
        has_ended = running.service.core.failed is not None  # caches and lanes are gone: asking them would take long
        return snapshot(
            self._counters,
            running.info,
            self._engine,
            running.service,
            self._supervision.workers,
            claims=self._supervision.claims(),
            caches={} if has_ended else await self._supervision.caches.stats(),
            cache_budgets=self._supervision.caches.budgets,
            lane_reports=[] if has_ended else await running.lanes.lane_reports(),
        )

    async def story(self, thing: str) -> list[str]:
        """Return what happened to a thing, in all lanes; see `mbaas.Feed.story`.

        Raises:
            ConfigError: nothing is known of it; the message lists what there is.
        """
        running = await self._until_running()
        own = with_supervisor(await self.lane_story(thing), self._supervision.state.stories, thing)
        return await told_by_all(own, running.info.lanes, thing)

    async def expect(self, epoch_s: float) -> None:
        """Compare the next epoch with a prediction of its seconds."""
        self._counters.expect(calls.number("epoch_s", epoch_s))

    async def placement_update(self) -> PlacementUpdate | None:
        """Return what a cache node that was restarted must know."""
        await self._until_running()
        return self._supervision.caches.update

    # ---- what the coordinators of other feeds call ----

    async def demand_report(self) -> DemandReport | None:
        """Return how many workers the feed has and needs; None if it does not lend, or does not know yet."""
        return self._lending.demand_report() if self._settings.lending.enabled else None

    async def take_on(self, offer: Offer) -> bool:
        """Have a worker of another feed, or one that comes back, work here; return whether it will."""
        return self._running is not None and await self._supervision.take_on(offer)

    async def lost_worker(self, actor: Any) -> None:
        """Take note that a worker which was lent is gone."""
        self._supervision.lost_lent(actor)


def _cursor_of(service: ConsumerService, consumer: str, session: int) -> int | None:
    """Return a consumer's cursor; None if that is not its open session."""
    member = service.core.consumers.session(consumer, session)
    return member.cursor if member is not None else None
