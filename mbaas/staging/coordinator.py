"""The coordinator: the actor that runs a feed.

It has the first lane, in most feeds the only one, and serves its blocks at a `Desk`. Besides it hires and tunes, lends
and scales, knows who is where, and tells people how the feed is doing, for all lanes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import ray

from mbaas.allocation.hysteresis import Observation
from mbaas.allocation.lending import Outlook
from mbaas.allocation.scaling import Scaler
from mbaas.allocation.throughput import MOST_COUNT
from mbaas.cache.atlas import Survey
from mbaas.dataset import Dataset
from mbaas.errors import FeedFailedError, MbaasError
from mbaas.metrics import FeedMetrics
from mbaas.prep.engines import resolve_engine
from mbaas.staging import events as ev
from mbaas.staging.books import Books
from mbaas.staging.branches import Branches
from mbaas.staging.desk import Desk
from mbaas.staging.exchange import Exchange
from mbaas.staging.gauge import Gauge, Look
from mbaas.staging.jobs import Jobs
from mbaas.staging.neighbours import Offer
from mbaas.staging.production import Production
from mbaas.staging.protocol import START_TIMEOUT_S, TICK_S, Admission, FeedInfo
from mbaas.staging.ranks import RankDesk, RankOrders, RankPlace
from mbaas.staging.reception import Reception
from mbaas.staging.settings import FeedSettings
from mbaas.staging.snapshot import snapshot
from mbaas.staging.standing import Charter
from mbaas.staging.status import ConsumerReport, FeedStatus
from mbaas.staging.tuning import Tuning

TICKS_A_REPORT = 8
"""Metrics are brought up to date every so many ticks."""

TICKS_A_LOOK = 4
"""Whether more or fewer workers would be right is looked at every so many ticks."""


@ray.remote(num_cpus=0)
class Coordinator(Reception):
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
        self._books = Books()
        self._metrics = FeedMetrics(settings.name)
        self._production = Production(
            settings, pipeline, self._engine, books=self._books, send=self._send, spawn=self._jobs.spawn
        )
        self._branches = Branches(
            settings, production=self._production, books=self._books, spawn=self._jobs.spawn, fail=self._fail
        )
        self._goes_on = False
        self._gauge, self._scaler = Gauge(), Scaler(settings.scaling)
        self._exchange = Exchange(settings, engine=self._engine, production=self._production, books=self._books)
        self._tuning = Tuning(settings, production=self._production, books=self._books)
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
        self._branches.begin()
        await self._production.open(dataset)
        return await self._open()

    async def _go_on(self) -> None:
        """After a restart: take over what the predecessor left. Consumers tell their cursors themselves."""
        try:
            self._branches.begin()
            await self._production.adopt()
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
        layout, dataset = self._production.layout, self._production.dataset
        self._info = FeedInfo(
            settings=self._settings,
            sweep=layout.sweep,
            spec=layout.spec,
            fingerprint=f"{dataset.fingerprint}-{self._pipeline.fingerprint}-{self._settings.seed}",
            normalize=self._pipeline.normalize,
            class_names=dataset.class_names,
            lanes=self._branches.actors,
        )
        self._desk = Desk(
            self._info,
            layout,
            layout.lane(0, self._settings),
            atlas=self._production.territory.atlas,
            makers=self._branches,
            books=self._books,
            spawn=self._jobs.spawn,
            fail=self._fail,
        )
        self._ranks = RankDesk(self._desk.lane.blocks_per_epoch, self._cursor_of)
        self._production.begin()
        await self._branches.open(Charter(layout, self._info), self._desk)
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
                staged_bytes = self._desk.core.window.used_bytes + self._branches.staged_bytes
                self._metrics.update(self._books, staged_bytes, len(self._production.workforce.workers))

    def _look(self) -> None:
        """Have as many workers as trials need, if they would help: other feeds' first, then more from the cluster."""
        totals, production, settings, now = self._books.totals, self._production, self._settings, time.monotonic()
        look = Look(now, dict(self._books.reports), totals["samples"], totals["prep_s"])
        seen = self._gauge.observe(
            look,
            self._desk.core.roster,
            workers=production.staying,
            pending=production.awaited,
            reserved=min(settings.prep_workers, production.wanted),  # what is lent is not hired a second time
            most=settings.max_prep_workers or MOST_COUNT,
        )
        self._jobs.spawn(production.weigh())
        self._jobs.spawn(self._tuning.look(seen.demand_per_s if seen is not None else 0.0))
        if seen is None:
            return
        if settings.lending.enabled:
            self._jobs.spawn(self._exchange.look(seen))
        if settings.max_prep_workers is not None:
            self._scale(seen, now)

    def _scale(self, seen: Observation, now: float) -> None:
        self._scaler.moved(self._production.wanted)
        decision = self._scaler.observe(seen, now)
        if decision.change:
            self._books.note(f"{decision.workers} prep workers instead of {self._production.wanted}: {decision.reason}")
            self._production.scale(decision.workers)

    async def stop(self) -> None:
        """End the feed: calls that wait are answered, workers and cache are gone when this returns."""
        self._closing = True
        self._fail(f"feed {self._settings.name!r} was stopped")
        await self._branches.end()
        await self._production.end()

    # ---- what consumers call ----

    async def info(self) -> FeedInfo:
        """The feed's description."""
        await self._until_open()
        return self._info

    async def claims(self) -> int:
        """Bytes of the object store that this feed may use."""
        return self._settings.cache_bytes + self._settings.staging_bytes

    async def announce(self, consumers: list[str]) -> None:
        """Hold seats for consumers that will join soon."""
        await self._until_open()
        for consumer in consumers:
            self._send(ev.Announce(consumer))
        await self._branches.told()

    async def join(self, consumer: str, start: int | None, flexible: bool) -> Admission:
        """Open a session; in a feed with lanes in its first one.

        Raises:
            FeedFailedError: the feed cannot go on.
        """
        admission = await super().join(consumer, start, flexible)
        self._branches.tell()
        return admission

    async def leave(
        self,
        consumer: str,
        session: int | None,
        keep_seat: bool = False,
        report: ConsumerReport | None = None,
    ) -> None:
        """A consumer is done, or without a ``session`` somebody says so; with ``keep_seat`` its place is held for a
        successor.
        """
        await super().leave(consumer, session, keep_seat, report)
        self._branches.tell()
        if session is None:
            await self._branches.leave(consumer)

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        self._books.report(consumer, report)

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
            territory = self._production.territory
            return self._ranks.orders(place, epoch, territory.atlas.newest, territory.caches)

        async with self._enlisted:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enlisted.wait_for(lambda: orders().plan is not None), poll_s)
        return orders()

    def _cursor_of(self, consumer: str, session: int) -> int | None:
        member = self._desk.core.roster.session(consumer, session)
        return member.cursor if member is not None else None

    async def status(self) -> FeedStatus:
        """A snapshot.

        Raises:
            FeedFailedError: the feed is not open yet.
        """
        if not self._opened.is_set() and not self._has_predecessor:
            raise FeedFailedError(f"feed {self._settings.name!r} is still starting")
        await self._until_open()
        caches = {} if self._closing else await self._production.territory.stats()
        filings = [] if self._closing else await self._branches.filings()
        return snapshot(
            self._books,
            self._info,
            self._engine,
            self._desk,
            self._production.workforce,
            caches=caches,
            filings=filings,
        )

    async def expect(self, epoch_s: float) -> None:
        """Compare the next epoch with a prediction of its seconds."""
        self._books.expect(epoch_s)

    async def survey(self) -> Survey | None:
        """What a cache node that was restarted must know."""
        await self._until_open()
        return self._production.territory.survey

    # ---- what the coordinators of other feeds call ----

    async def outlook(self) -> Outlook | None:
        """How many workers the feed has, and needs; None if it does not lend, or does not know."""
        return self._exchange.outlook() if self._settings.lending.enabled else None

    async def take_on(self, offer: Offer) -> bool:
        """Have a worker of another feed, or one that comes back, work here."""
        return self._opened.is_set() and self._unopened is None and await self._production.loans.take_on(offer)

    async def lost_worker(self, actor: Any) -> None:
        """A worker that was lent is gone."""
        self._production.loans.lost(actor)

    # ---- for the parts of this actor ----

    def _send(self, event: ev.Event) -> None:
        """Give an event to the first lane, and to the others what follows from it for them."""
        self._desk.send(event)
        self._branches.heard(event)

    def _fail(self, reason: str) -> None:
        self._production.ended = True
        if hasattr(self, "_desk"):
            self._desk.fail(reason)
        self._books.note(f"the feed failed: {reason}")
        self._branches.tell()
