"""The coordinator: the Ray actor that runs a feed.

It serves blocks through a `ConsumerService`, manages the workers, tracks consumers and ranks, and reports status and
metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import ray
from msgspec import Struct

from mbaas.base import units
from mbaas.calls import encoding
from mbaas.calls.relay import relay_node
from mbaas.coordinator import recovery, registry
from mbaas.coordinator.background import BackgroundTasks, InternalErrors, reports_errors_of_calls
from mbaas.coordinator.cache_monitor import CacheMonitor
from mbaas.coordinator.consumer_api import ConsumerApi
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lending import LendingClient, Offer, Shared, worker_kind
from mbaas.coordinator.opening import Opening, adopt, prepare
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.status_report import metric_values, snapshot, story_of
from mbaas.coordinator.supervision import Supervision
from mbaas.coordinator.worker_pool import WorkerPool, claims
from mbaas.core.cluster import events as cluster
from mbaas.core.cluster.waits import WaitTable
from mbaas.core.demand import DemandEstimator, Look
from mbaas.core.kept_form import KeptForm
from mbaas.core.ranks import RankTable
from mbaas.core.staging import calls, explain
from mbaas.core.staging import events as ev
from mbaas.core.staging.streams import FEED_STREAM, block_number, stream_number
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError, FeedRestartingError, ResourceError
from mbaas.model.curves import MOST_COUNT
from mbaas.model.engine_choice import EngineChoice
from mbaas.model.gains import GainLog, WorkerCounts
from mbaas.model.lending import DemandReport
from mbaas.model.scaling import Observation, Scaler
from mbaas.model.sharing import LoadingCosts
from mbaas.model.waits import WAIT_BOUNDS_S
from mbaas.ray_cluster import actor_names, resources
from mbaas.ray_cluster.metrics import FeedMetrics
from mbaas.samples.placement import PlacementUpdate
from mbaas.settings import FeedSettings
from mbaas.status import FeedStatus
from mbaas.transforms import Pipeline
from mbaas.wire.consumers import START_TIMEOUT_S, TICK_S, Claims, ConsumerReport, FeedInfo, fingerprint_of
from mbaas.wire.ranks import RankCall, RankOrders, RankReport
from mbaas.wire.samples import LedgerEntry

RETRY_S = 1.0
"""Pause before a restarted coordinator tries again to take over its predecessor's feed."""

KEPT_S = 2.0
"""Longest time that a call with ledgers waits for their write to the key-value store, in seconds."""

STATUS_S = 15.0
"""Longest time a status request waits for a restarted feed to open. After that, its error lists the missing parts."""

TICKS_A_REPORT = 8
"""Ticks between two metrics updates (2 s)."""

TICKS_A_LOOK = 4
"""Ticks between two decisions about the number of workers (1 s)."""

LOOKS_A_ROOM = 5
"""Decisions between two requests to the cluster's head for the free CPUs of the machines in use, if workers scale."""


class _Running(Struct, frozen=True):
    """The parts of an open feed."""

    info: FeedInfo
    supervision: Supervision
    service: ConsumerService
    ranks: RankTable
    lending: LendingClient
    cache_monitor: CacheMonitor
    kept_form: KeptForm | None


@reports_errors_of_calls
class FeedCoordinator(ConsumerApi):
    """Runs one feed; created by `mbaas.serve`.

    Args:
        settings: the feed's options.
        pipeline: transforms applied to each sample.
        choice: the engine, chosen when the feed was served.
    """

    def __init__(self, settings: FeedSettings, pipeline: Any, choice: EngineChoice) -> None:
        self._settings, self._pipeline = settings, pipeline
        # The choice is a constructor argument because Ray passes the same arguments to a restarted coordinator. Another
        # choice could be another engine, and engines produce different pixels.
        self._choice, self._engine = choice, choice.engine
        self._counters = Counters()
        self._errors = InternalErrors(self._counters)
        InternalErrors.of_process = self._errors
        self._tasks = BackgroundTasks(self._errors)
        super().__init__(self._tasks.spawn)
        self._metrics = FeedMetrics(settings.name, WAIT_BOUNDS_S)
        self._workers = WorkerPool(settings, pipeline, self._engine)
        self._demand, self._scaler = DemandEstimator(), Scaler(settings.scaling)
        self._gains = GainLog(self._counters.began)
        self._has_room, self._room_looks = True, itertools.count()  # see `Observation.has_room`
        # After a crash Ray calls the constructor again with the same arguments, but not `start`.
        self._has_predecessor = actor_names.was_restarted()
        self._goes_on = False
        self._keeping = asyncio.Lock()
        self._kept_claims: Claims | None = None  # as last published to coordinators of other feeds
        self._claiming = asyncio.Lock()
        self._writing_plans = asyncio.Lock()
        self._running: _Running | None = None
        self._opened = asyncio.Event()
        self._ended: FeedFailedError | None = None
        self._adoption = WaitTable()  # problems that delay taking over from the predecessor
        self._enlisted = asyncio.Condition()

    # ---- life ----

    async def start(self, dataset: Dataset, workers: dict[str, Any]) -> FeedInfo:
        """Start the workers, measure a prepared sample, and open the feed.

        Args:
            dataset: the samples. Not a constructor argument, because its creator may be gone when the actor restarts.
            workers: actors of the starting prep workers, by name.

        Raises:
            ResourceError: workers did not get their CPUs, or could not start.
            BadSampleError: no sample can be prepared.
            ConfigError: the staging budget is too small.
        """
        running = self._open(await prepare(self._settings, self._workers, dataset, self._pipeline, workers))
        await running.supervision.until_at_work()
        await asyncio.to_thread(recovery.keep_engine, self._settings.name, running.info.fingerprint, self._choice)
        if self._settings.engine == "auto" and self._choice.gpus:
            self._counters.note(self._choice.sentence)
        await self._keep_claims(running)  # the next feed can use the memory that this one leaves free
        self._counters.start_s = time.monotonic() - self._counters.began
        return running.info

    async def _go_on(self) -> None:
        while True:
            with self._errors.reported():
                try:
                    self._open(await adopt(self._settings, self._workers))
                    self._counters.restarts += 1
                    return
                except FeedFailedError as error:
                    self._ended = error
                    self._opened.set()
                    return
                except (ResourceError, ray.exceptions.RayError) as error:
                    # The predecessor's actors may be dying right now, or hang for a while.
                    what = f"the feed's workers and caches cannot be adopted yet: {error}"
                    for wait in self._adoption.look({"adoption": what}, time.monotonic()):
                        self._counters.note(wait)
            await asyncio.sleep(RETRY_S)

    def _open(self, opening: Opening) -> _Running:
        self._settings = opening.settings
        layout, dataset, counters = opening.layout, opening.dataset, self._counters
        supervision = Supervision(opening, counters=counters, errors=self._errors, spawn=self._tasks.spawn)
        info = FeedInfo(
            settings=self._settings,
            order=layout.order,
            spec=layout.spec,
            fingerprint=fingerprint_of(
                dataset.fingerprint,
                self._pipeline.fingerprint,
                seed=self._settings.seed,
                shuffle=self._settings.shuffle,
            ),
            normalize=self._pipeline.normalize,
            has_images=self._pipeline.has_images,
            class_names=dataset.class_names,
            categories={field.name: field.categories for field in dataset.fields if field.categories},
            engine=self._engine,
            pipeline=self._pipeline.fingerprint,
            engine_reason=self._choice.reason,
        )
        # Consumers of a predecessor, or of an earlier program that served this feed, may have seen part of each epoch
        # that was begun. New consumers therefore start in the epoch after those.
        written = recovery.recall_epochs(self._settings.name, info.fingerprint)
        service = ConsumerService(
            info,
            supervision,
            counters=self._counters,
            errors=self._errors,
            spawn=self._tasks.spawn,
            written=written,
        )
        if written:
            counters.ledgers.go_on(recovery.recall_ledgers(self._settings.name))
        else:  # ledgers of another dataset, or of a feed that was not stopped before its first epoch
            recovery.forget_ledgers(self._settings.name)
        ranks = RankTable(
            layout.order.blocks_per_epoch,
            service.core.consumers.session,
            recovery.recall_trials(self._settings.name, info.fingerprint),
        )
        context = ray.get_runtime_context()
        kind = worker_kind(
            self._settings,
            engine=self._engine,
            pipeline=self._pipeline,
            dataset=dataset,
            job=context.get_job_id(),
            runtime_env=context.get_runtime_env_string(),
        )
        lending = LendingClient(
            self._settings, kind=kind, supervisor=supervision.state, handle=supervision.handle, counters=counters
        )
        cache_monitor = CacheMonitor(supervision=supervision, counters=counters)
        if shortage := layout.shortage(self._settings):
            counters.note(shortage)
        decoded = layout.decoded
        kept_form = None if decoded is None else KeptForm(decoded, is_new=not self._has_predecessor)
        running = self._running = _Running(info, supervision, service, ranks, lending, cache_monitor, kept_form)
        supervision.begin(service.send, lambda: service.core.consumers.nodes)
        self._tasks.spawn(self._tick_forever(running))
        self._opened.set()
        return running

    async def _until_open(self) -> ConsumerService:
        """Wait until the feed is open, at most as long as `start` may take. Consumers may call before that."""
        return (await self._until_running()).service

    async def _until_running(self, within_s: float = START_TIMEOUT_S) -> _Running:
        # A constructor cannot await, so the first call starts the recovery. Consumers call repeatedly.
        if self._has_predecessor and not self._goes_on:
            self._goes_on = True
            self._tasks.spawn(self._go_on())
        if not self._opened.is_set():  # a set event costs no task
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._opened.wait(), within_s)
        if not self._opened.is_set():
            raise FeedRestartingError(
                f"feed {self._settings.name!r} is still starting after {units.seconds(within_s)}{self._why_not_open()}"
            )
        if self._running is None:
            assert self._ended is not None
            raise self._ended
        return self._running

    def _why_not_open(self) -> str:
        return "".join(f": {wait}" for wait in self._adoption.sentences(time.monotonic()))

    async def _tick_forever(self, running: _Running) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            if running.service.core.failed is not None:
                return
            with self._errors.reported():
                self._tick(running, tick)

    def _tick(self, running: _Running, tick: int) -> None:
        running.service.send(ev.Tick())
        if tick % TICKS_A_LOOK == 0:
            running.supervision.handle(cluster.Tick())
            self._look(running)
            if not self._keeping.locked():
                self._tasks.spawn(self._keep_ledgers())
            if not self._claiming.locked():
                self._tasks.spawn(self._keep_claims(running))
        if tick % TICKS_A_REPORT == 0:
            staged_bytes = running.service.core.window.used_bytes
            workers = len(running.supervision.workers.workers)
            values = metric_values(self._counters, staged_bytes=staged_bytes, workers=workers)
            self._metrics.update(values, self._counters.reports.total.waits.counts)

    def _claims(self, running: _Running) -> Claims:
        return claims(self._settings, self._engine, running.supervision.state.own)

    async def _keep_claims(self, running: _Running) -> None:
        async with self._claiming:
            now = self._claims(running)
            if now != self._kept_claims:
                await asyncio.to_thread(registry.update, self._settings.name, now)
                self._kept_claims = now

    async def _keep_ledgers(self) -> None:
        async with self._keeping:  # a page that is written late must not replace a newer one
            pages = self._counters.ledgers.take_changed()
            try:
                if pages:
                    await asyncio.to_thread(recovery.keep_ledgers, self._settings.name, pages)
            except BaseException:  # also when it is cancelled
                self._counters.ledgers.keep_again(pages)
                raise

    async def _until_kept(self, report: ConsumerReport) -> None:
        if report.ledgers:
            # If the cluster's head does not answer, do not wait long: the write is retried every second.
            await asyncio.wait({self._tasks.spawn(self._keep_ledgers())}, timeout=KEPT_S)

    def _look(self, running: _Running) -> None:
        """Adapt the number of workers to the demand, by lending between feeds and by scaling.

        Nothing is awaited: `_tick_forever` calls this, and the next tick must not wait for other feeds or nodes.
        """
        counters, state, settings, now = self._counters, running.supervision.state, self._settings, time.monotonic()
        trial_of = running.ranks.trials()
        look = Look(now, dict(counters.reports.latest), counters.samples, counters.prep_s, counters.fetch_s)
        seen = self._demand.observe(
            look,
            running.service.core.consumers,
            workers=state.staying,
            pending=state.starting,
            reserved=min(settings.prep_workers, state.wanted),  # do not start replacements for lent workers
            most=settings.scaling.max_prep_workers or MOST_COUNT,
            machines=len(state.machines),
            has_room=self._has_room,
            trial_of=trial_of,
            has_all=running.service.core.has_all,
        )
        work = {
            name: (float(counters.worker_samples[name]), float(counters.worker_prep_s[name])) for name in state.workers
        }
        running.supervision.handle(cluster.WorkMeasured(work))
        running.supervision.handle(cluster.CachesMeasured(dict(running.supervision.caches.kept)))
        self._tasks.spawn(running.cache_monitor.poll(seen.demand_per_s if seen is not None else 0.0))
        if running.kept_form is not None:
            self._choose_form(running.kept_form, running)
        if seen is None:
            return
        workers = WorkerCounts(state.staying, sum(state.borrowed.values()), state.away)
        self._gains.observe(workers, seen, samples=counters.samples, now=now)
        running.service.send(
            self._demand.paces(
                look,
                seen,
                trial_of,
                scales=settings.scaling.max_prep_workers is not None,
                block_samples=running.info.order.block_samples,
            )
        )
        if settings.lending.enabled:
            self._tasks.spawn(running.lending.look(seen))
        if settings.scaling.max_prep_workers is not None:
            self._scale(running.supervision, seen, now)
            if next(self._room_looks) % LOOKS_A_ROOM == 0:
                self._tasks.spawn(self._look_for_room(state.machines))

    async def _look_for_room(self, machines: frozenset[str]) -> None:
        free = await asyncio.to_thread(resources.free_cpus)
        self._has_room = any(free.get(node, 0.0) >= self._settings.cpus_per_worker for node in machines)

    def _choose_form(self, kept_form: KeptForm, running: _Running) -> None:
        caches, pipelines = running.supervision.caches, running.service.forms_in_use()
        # A cache node may have been found whose node died before its memory was known.
        budgets = [caches.budgets[node] for node in caches.actors if node in caches.budgets]
        if not budgets:
            return
        samples = caches.stored_samples / len(budgets)
        memory_bytes = sum(budgets) / len(budgets)
        before = kept_form.current
        decoded = kept_form.look(time.monotonic(), pipelines, samples=samples, memory_bytes=memory_bytes)
        if decoded is None:
            return
        self._tasks.spawn(caches.keep_decoded(decoded))
        if before is not None and before.form != decoded.form:
            self._counters.note(kept_form.reason(pipelines))

    def _scale(self, supervision: Supervision, seen: Observation, now: float) -> None:
        wanted = supervision.state.wanted
        self._scaler.moved(wanted)
        decision = self._scaler.observe(seen, now)
        if decision.change:
            self._counters.note(f"{decision.workers} prep workers instead of {wanted}: {decision.reason}")
            supervision.handle(cluster.Scale(decision.workers))

    async def stop(self) -> None:
        """Stop the feed. Answers pending calls, and returns when workers and caches are gone."""
        reason = cluster.FeedEnd.STOPPED.of(self._settings.name)
        if self._running is not None:
            # This order answers callers while the actors that they call are still alive.
            self._running.service.fail(reason)
            await self._running.supervision.end(reason)
            await self._running.service.end_writing()
        self._workers.end_all()  # workers of a feed that was not open yet
        async with self._writing_plans:
            recovery.forget(self._settings.name)

    # ---- called by consumers ----

    async def info(self) -> FeedInfo:
        """Return the feed's description."""
        return (await self._until_running()).info

    async def announce(self, consumers: list[str], others: int = 0) -> None:
        """Reserve places for consumers that will join soon, and for ``others`` more that will be announced soon."""
        announced = calls.announce(consumers, others)
        running = await self._until_running()
        for event in announced:
            running.service.send(event)

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        member = None if self._running is None else self._running.service.core.consumers.by_name.get(consumer)
        self._counters.report(consumer, report, FEED_STREAM if member is None else stream_number(member.cursor))
        if member is not None:
            self._counters.report_steps(member.trial, consumer, member.world_size, report)

    async def _relaying(self, node: str, may_start: bool) -> Any | None:
        """Return the actor that relays calls on a node: its cache node or a relay."""
        cache = (await self._until_running()).supervision.caches.actors.get(node)
        return await relay_node(self._settings.name, node, may_start=may_start) if cache is None else cache

    async def enlist_rank(self, call: bytes) -> None:
        """Record the node of a rank that has opened a session, by a `RankReport`."""
        report = encoding.decoded(call, RankReport)
        calls.consumer_name(report.name)
        (await self._until_running()).ranks.enlist(report)
        async with self._enlisted:
            self._enlisted.notify_all()

    async def rank_orders(self, call: bytes) -> RankOrders:
        """Return the division of an epoch's minibatches among ranks, by a `RankCall`.

        Raises:
            StateError: other ranks of the trial shuffle this epoch differently.
        """
        asked = encoding.decoded(call, RankCall)
        calls.consumer_name(asked.report.name)
        running = await self._until_running()
        if asked.shuffle is not None:
            calls.shuffle(asked.shuffle, running.info.order.num_samples)

        def orders() -> RankOrders:
            caches, order = running.supervision.caches, running.info.order
            # Ranks cannot determine the home nodes of redrawn samples, so they take turns.
            placement = None if order.redrawn else caches.placements.newest
            return running.ranks.orders(asked.report, asked.epoch, placement, caches.actors, asked.shuffle)

        async with self._enlisted:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enlisted.wait_for(lambda: orders().plan is not None), asked.poll_s)
        answer = orders()
        if answer.plan is not None:
            await self._write_plans(running)
        return answer

    async def _write_plans(self, running: _Running) -> None:
        async with self._writing_plans:  # concurrent callers wait until the plans are written
            trials = running.ranks.to_write()
            try:
                for trial in trials:
                    await asyncio.to_thread(recovery.keep_trial, self._settings.name, running.info.fingerprint, trial)
            except Exception as error:  # the store has no exception type of its own; the rank calls again
                running.ranks.write_again(trials)
                self._errors.report(error)
                what = f"how ranks share out samples of feed {self._settings.name!r} cannot be written down"
                raise FeedRestartingError(f"{what}: {error}") from error

    async def status(self) -> FeedStatus:
        """Return a snapshot of the feed.

        Raises:
            FeedFailedError: the feed is not open yet.
        """
        if not self._opened.is_set() and not self._has_predecessor:
            raise FeedFailedError(f"feed {self._settings.name!r} is still starting{self._why_not_open()}")
        running = await self._until_running(STATUS_S)
        has_ended = running.service.core.failed is not None  # caches are gone: calls would time out
        return snapshot(
            self._counters,
            running.info,
            self._choice,
            running.service,
            running.supervision,
            claims=self._claims(running),
            caches={} if has_ended else await running.supervision.caches.stats(),
            changes=self._gains.changes,
        )

    async def costs(self) -> LoadingCosts:
        """Return the cost so far of loading samples for trials. Cache counters may be a few seconds old."""
        running = await self._until_running(STATUS_S)
        return self._counters.costs(self._settings.cpu_price_per_h, running.service.pipelines.by_stream())

    async def story(self, thing: str) -> list[str]:
        """Return the history of a block, consumer or worker; see `mbaas.coordinator.control.FeedControl.story`.

        Raises:
            ConfigError: `thing` is unknown; the message lists the valid names.
        """
        thing = calls.thing(thing)
        running = await self._until_running()
        core, number = running.service.core, block_number(thing)
        lines = story_of(core.stories, running.supervision.state.stories, thing)
        reason = "" if number is None else explain.why_kept(core, number)
        return [*lines, f"staged now, {reason}"] if reason else lines

    async def contents(self) -> tuple[FeedInfo, ray.ObjectRef[Dataset], Pipeline]:
        """Return the feed's description, a reference to its dataset, and its pipeline."""
        running = await self._until_running(STATUS_S)
        return running.info, running.supervision.caches.dataset_ref, self._pipeline

    async def ledgers(self, page: int) -> tuple[LedgerEntry, ...]:
        """Return a page of the ledgers, 0 for the oldest; () after the last one."""
        await self._until_running()
        return self._counters.ledgers.page(calls.whole("page", page))

    async def expect(self, epoch_s: float) -> None:
        """Compare the next epoch's duration with a prediction in seconds."""
        self._counters.expect(calls.number("epoch_s", epoch_s))

    async def placement_update(self) -> PlacementUpdate | None:
        """Return the placement for a restarted cache node."""
        return (await self._until_running()).supervision.caches.update

    # ---- called by coordinators of other feeds ----

    async def demand_report(self) -> DemandReport | None:
        """Return the number of workers present and needed. None if the feed does not lend, or has no estimate yet."""
        running = self._running
        return running.lending.demand_report() if running is not None and self._settings.lending.enabled else None

    async def take_on(self, offer: Offer) -> bool:
        """Take on another feed's worker, or a returning one. Return whether it was accepted."""
        return self._running is not None and await self._running.supervision.take_on(offer)

    async def shared_with(self, feed: str) -> Shared | None:
        """Return the workers shared by this feed and another one; None while this feed is not open."""
        return None if self._running is None else self._running.supervision.shared_with(feed)

    async def lent_worker_gone(self, actor: Any) -> None:
        """Record that a lent worker is gone."""
        if self._running is not None:  # a feed that is not open yet checks its workers when it opens
            self._running.supervision.lent_gone(actor)
