"""The coordinator: the actor that runs a feed.

A thin shell around `mbaas.staging.core.StagingCore`: calls and completions become events, instructions become calls.
It owns the staged blocks, because it is the caller of ``prepare``: they outlive the workers that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from dataclasses import dataclass
from typing import Any

import ray

from mbaas.allocation.hysteresis import Observation
from mbaas.allocation.lending import Outlook
from mbaas.allocation.rates import MOST_COUNT
from mbaas.allocation.scaling import Scaler
from mbaas.cache.atlas import Survey
from mbaas.dataset import Dataset
from mbaas.errors import BadSampleError, ConsumerRemovedError, FeedFailedError, MbaasError, StateError
from mbaas.metrics import FeedMetrics
from mbaas.prep.engine import resolve_engine
from mbaas.prep.worker import BlockMeta
from mbaas.staging import events as ev
from mbaas.staging.books import Books
from mbaas.staging.core import StagingCore
from mbaas.staging.exchange import Exchange
from mbaas.staging.gauge import Gauge, Look
from mbaas.staging.neighbours import Offer
from mbaas.staging.production import Production
from mbaas.staging.protocol import POLL_S, Admission, DeliveredBlock, DeliveredPart, Delivery, FeedInfo
from mbaas.staging.ranks import RankDesk, RankOrders, RankPlace
from mbaas.staging.settings import FeedSettings
from mbaas.staging.status import ConsumerReport, FeedStatus
from mbaas.staging.tuning import Tuning

START_TIMEOUT_S = 90.0
"""A feed opens within so long or not at all; a lack of CPUs is noticed after 30 s."""

TICK_S = 0.25
"""Period at which leases, patience and task deadlines are looked at."""

TICKS_A_REPORT = 8
"""Metrics are brought up to date every so many ticks."""

TICKS_A_LOOK = 4
"""Whether more or fewer workers would be right is looked at every so many ticks."""

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Re-check every invariant of the core after every event (on in mbaas's own tests)."""


@dataclass
class _Call:
    """A consumer's call that waits for blocks."""

    session: int
    answer: asyncio.Future[Delivery]


@ray.remote(num_cpus=0)
class Coordinator:
    """Runs one feed; made by `mbaas.serve`.

    Args:
        settings: the feed's options.
        pipeline: what to do to samples.
        gpus: GPUs in the cluster, for ``engine="auto"``.
    """

    def __init__(self, settings: FeedSettings, pipeline: Any, gpus: int) -> None:
        self._settings, self._pipeline = settings, pipeline
        self._engine = resolve_engine(settings.engine, pipeline, gpus=gpus)
        self._staged: dict[int, dict[int, DeliveredPart]] = {}
        self._calls: dict[str, _Call] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._sessions = time.time_ns() // 1_000_000  # above those of an earlier coordinator of this feed
        self._progress = 0
        self._closing = False
        self._unopened: MbaasError | None = None
        self._opened = asyncio.Event()
        self._enlisted = asyncio.Condition()
        self._books = Books()
        self._metrics = FeedMetrics(settings.name)
        self._production = Production(
            settings, pipeline, self._engine, books=self._books, send=self._send, spawn=self._spawn
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
        """
        await self._production.open(dataset)
        return self._open()

    async def _go_on(self) -> None:
        """After a restart: take over what the predecessor left. Consumers tell their cursors themselves."""
        try:
            await self._production.adopt()
        except MbaasError as error:
            self._unopened = error
            self._opened.set()
        else:
            self._open()

    async def _until_open(self) -> None:
        """Consumers may come while the feed starts; they wait as long as `start` may take."""
        if self._has_predecessor and not self._goes_on:
            self._goes_on = True
            self._spawn(self._go_on())
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FeedFailedError(
                f"feed {self._settings.name!r} is still starting after {START_TIMEOUT_S:g} s"
            ) from None
        if self._unopened is not None:
            raise self._unopened

    def _open(self) -> FeedInfo:
        layout, dataset = self._production.layout, self._production.dataset
        self._sweep = layout.sweep
        self._core = StagingCore(
            layout.limits(self._settings),
            self._sweep.blocks_per_epoch,
            layout.block_bytes,
            self._production.territory.atlas.shares,
        )
        self._info = FeedInfo(
            settings=self._settings,
            sweep=self._sweep,
            spec=layout.spec,
            fingerprint=f"{dataset.fingerprint}-{self._pipeline.fingerprint}-{self._settings.seed}",
            normalize=self._pipeline.normalize,
            class_names=dataset.class_names,
        )
        self._desk = RankDesk(self._sweep.blocks_per_epoch, self._cursor_of)
        self._production.begin()
        self._spawn(self._tick_forever())
        self._opened.set()
        return self._info

    def _spawn(self, coroutine: Any) -> None:
        job = asyncio.get_running_loop().create_task(coroutine)
        self._jobs.add(job)
        job.add_done_callback(self._job_done)

    def _job_done(self, job: asyncio.Task[Any]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._fail(f"an internal error: {type(error).__name__}: {error}")

    async def _tick_forever(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            if self._closing:
                return
            self._send(ev.Tick())
            if tick % TICKS_A_LOOK == 0:
                self._look()
            if tick % TICKS_A_REPORT == 0:
                self._metrics.update(self._books, self._core.window.used_bytes, len(self._production.workforce.workers))

    def _look(self) -> None:
        """Have as many workers as trials need, if they would help: other feeds' first, then more from the cluster."""
        totals, production, settings, now = self._books.totals, self._production, self._settings, time.monotonic()
        look = Look(now, dict(self._books.reports), totals["samples"], totals["prep_s"])
        seen = self._gauge.observe(
            look,
            self._core.roster,
            workers=production.staying,
            pending=production.awaited,
            reserved=min(settings.prep_workers, production.wanted),  # what is lent is not hired a second time
            most=settings.max_prep_workers or MOST_COUNT,
        )
        self._spawn(self._tuning.look(seen.demand_per_s if seen is not None else 0.0))
        if seen is None:
            return
        if settings.lending.enabled:
            self._spawn(self._exchange.look(seen))
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

    async def join(self, consumer: str, start: int | None, flexible: bool) -> Admission:
        """Open a session.

        Raises:
            FeedFailedError: the feed cannot go on.
        """
        await self._until_open()
        self._sessions += 1
        self._answer(consumer, Delivery(error=StateError(f"consumer {consumer!r} joined again elsewhere")))
        for instruction in self._send(ev.Join(consumer, self._sessions, start, flexible)):
            if isinstance(instruction, ev.Seat):
                return Admission(instruction.session, instruction.cursor, self._info)
        raise FeedFailedError(self._core.failed or f"consumer {consumer!r} was not admitted")

    async def ask(
        self,
        consumer: str,
        session: int,
        cursor: int,
        released: int,
        done: int,
        want: int,
        poll_s: float = POLL_S,
        lost: tuple[ev.Lost, ...] = (),
    ) -> Delivery:
        """Wait until at least one block from ``cursor`` on is there, at most ``poll_s``.

        ``lost`` are parts of blocks that the consumer was given and could not read.
        """
        await self._until_open()
        for event in lost:
            self._send(event)
        self._answer(consumer, Delivery(waits_for="a newer call took its place"))
        call = _Call(session, asyncio.get_running_loop().create_future())
        self._calls[consumer] = call
        self._send(ev.Ask(consumer, session, cursor, released, done, want))
        await asyncio.wait([call.answer], timeout=poll_s)
        if call.answer.done():
            return call.answer.result()
        del self._calls[consumer]
        return Delivery(waits_for=self._core.explain_wait(consumer), progress=self._progress)

    async def is_given_up(self, block: int, parts: list[tuple[int, int]]) -> bool:
        """Whether one of the parts, given as (number, task that made it), is not what the block is made of any more."""
        await self._until_open()
        return not all(self._core.window.has(block, part, task) for part, task in parts)

    async def heartbeat(self, consumer: str, session: int, released: int, done: int, report: ConsumerReport) -> bool:
        """A consumer is alive; False if its session is not open any more."""
        await self._until_open()
        self._books.report(consumer, report)
        answer = self._send(ev.Heartbeat(consumer, session, released, done))
        return not any(isinstance(i, ev.Refuse) and i.consumer == consumer for i in answer)

    async def leave(
        self,
        consumer: str,
        session: int | None,
        keep_seat: bool = False,
        report: ConsumerReport | None = None,
    ) -> None:
        """A consumer is done; with ``keep_seat`` its place is held for a successor."""
        await self._until_open()
        if report is not None:
            self._books.report(consumer, report)
        self._send(ev.Leave(consumer, session, keep_seat))

    async def enlist_rank(self, place: RankPlace) -> None:
        """A rank of a data-parallel trial opened a session: where it runs."""
        await self._until_open()
        self._desk.enlist(place)
        async with self._enlisted:
            self._enlisted.notify_all()

    async def rank_orders(self, place: RankPlace, epoch: int, poll_s: float) -> RankOrders:
        """By what the minibatches of an epoch are shared out; waits for missing ranks, at most ``poll_s``."""
        await self._until_open()

        def orders() -> RankOrders:
            territory = self._production.territory
            return self._desk.orders(place, epoch, territory.atlas.newest, territory.caches)

        async with self._enlisted:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enlisted.wait_for(lambda: orders().plan is not None), poll_s)
        return orders()

    def _cursor_of(self, consumer: str, session: int) -> int | None:
        member = self._core.roster.session(consumer, session)
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
        return self._books.snapshot(self._info, self._engine, self._core, self._production.workforce, caches)

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

    # ---- instructions ----

    def _send(self, event: ev.Event) -> list[ev.Instruction]:
        done = self._core.handle(event, time.monotonic())
        if VALIDATE:
            self._core.validate()
        for instruction in done:
            self._carry_out(instruction)
        return done

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Prepare():
                leave_out = self._books.left_out(instruction.block)
                self._spawn(self._production.make(instruction, leave_out, self._finished))
            case ev.Deliver():
                delivered = tuple(self._delivered(block) for block in instruction.blocks)
                self._answer(instruction.consumer, Delivery(delivered, progress=self._progress))
            case ev.Drop():
                self._staged.pop(instruction.block, None)
            case ev.Retire():
                self._production.retire(instruction.worker)
            case ev.Dismiss():
                self._production.dismiss(instruction.worker)
            case ev.Remove() | ev.Refuse():
                self._expel(instruction.consumer, instruction.session, self._why_expelled(instruction))
            case ev.FailFeed():
                self._fail(instruction.reason)
            case ev.Note():
                self._books.note(instruction.text)
        if isinstance(instruction, ev.Remove):
            self._books.note(f"{instruction.consumer} was removed: {instruction.reason}")

    def _delivered(self, number: int) -> DeliveredBlock:
        parts = self._staged[number]
        if self._core.window.blocks[number].error is not None:
            parts = {i: part for i, part in parts.items() if not part.payload}
        return DeliveredBlock(number, tuple(part for _, part in sorted(parts.items())))

    def _answer(self, consumer: str, delivery: Delivery) -> None:
        call = self._calls.pop(consumer, None)
        if call is not None and not call.answer.done():
            call.answer.set_result(delivery)

    def _why_expelled(self, instruction: ev.Remove | ev.Refuse) -> MbaasError:
        """`ConsumerRemovedError`, upon which the consumer joins again, unless its name is another's by now."""
        consumer = instruction.consumer
        member = self._core.roster.members.get(consumer)
        if member is not None and member.session > instruction.session:
            return StateError(f"consumer {consumer!r} joined again elsewhere: {instruction.reason}")
        return ConsumerRemovedError(f"consumer {consumer!r}: {instruction.reason}")

    def _expel(self, consumer: str, session: int, error: MbaasError) -> None:
        call = self._calls.get(consumer)
        if call is not None and call.session == session:
            self._answer(consumer, Delivery(error=error, expelled=self._core.failed is None))

    def _fail(self, reason: str) -> None:
        self._production.ended = True
        if hasattr(self, "_core") and self._core.failed is None:
            self._core.failed = reason
        self._books.note(f"the feed failed: {reason}")
        for consumer in list(self._calls):
            self._answer(consumer, Delivery(error=FeedFailedError(reason)))

    # ---- work ----

    def _finished(self, order: ev.Prepare, meta: BlockMeta, payload_ref: Any) -> None:
        if not self._core.crew.has(order.task):
            return
        self._progress += 1
        first, end = self._sweep.span(meta.block)
        self._books.finished(order.worker, meta, self._sweep.epoch_of(meta.block), end - first)
        fatal = self._settings.on_bad_sample == "raise" and meta.bad
        node = self._core.crew.workers[order.worker].node
        part = DeliveredPart(meta, [] if fatal else [payload_ref], order.part, order.task, node, order.share)
        self._staged.setdefault(order.block, {})[order.part] = part
        error = str(BadSampleError(meta.bad[0].uri, meta.bad[0].reason)) if fatal else None
        self._send(ev.Prepared(order.task, error))
        self._books.forget_below(min((c.floor for c in self._core.roster.cohorts.values()), default=0))
