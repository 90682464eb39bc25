"""The coordinator: the actor that runs a feed.

A thin shell around `mbaas.staging.core.StagingCore`: calls and completions become events, instructions become calls.
It owns the staged blocks, because it is the caller of ``prepare``: they outlive the workers that made them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from mbaas.cache.atlas import Survey, Wanted
from mbaas.dataset import Dataset
from mbaas.errors import BadSampleError, ConsumerRemovedError, FeedFailedError, MbaasError, StateError
from mbaas.metrics import FeedMetrics
from mbaas.order import Sweep
from mbaas.prep.engine import resolve_engine
from mbaas.prep.worker import BlockMeta, Probe
from mbaas.staging import events as ev
from mbaas.staging.books import Books
from mbaas.staging.core import StagingCore, StagingLimits
from mbaas.staging.protocol import POLL_S, Admission, DeliveredBlock, DeliveredPart, Delivery, FeedInfo
from mbaas.staging.settings import FeedSettings
from mbaas.staging.sizing import MIN_BLOCKS_STAGED, block_samples
from mbaas.staging.status import ConsumerReport, FeedStatus
from mbaas.staging.territory import Territory
from mbaas.staging.workforce import Hired, Workforce

START_TIMEOUT_S = 90.0
"""A feed opens within so long or not at all; a lack of CPUs is noticed after 30 s."""

TICK_S = 0.25
"""Period at which leases, patience and task deadlines are looked at."""

NODE_ANSWER_S = 5.0
"""When a worker dies and its node's cache does not answer within so long, the node counts as dead."""

NODES_PERIOD_S = 1.0
"""Period at which Ray is asked which nodes are alive, where a feed has workers on more than one."""

TICKS_A_REPORT = 8
"""Metrics are brought up to date every so many ticks."""

CREDIT = 2
"""Tasks a worker has in hand: one that it makes, one whose bytes are fetched meanwhile."""

READY_AHEAD = 2
"""Blocks that may be ready before the slowest consumer needs them, beside those that are being made."""

ID_BYTES = 16
"""Label and sample id, int64 each."""

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
        dataset: its samples.
        pipeline: what to do to them.
        gpus: GPUs in the cluster, for ``engine="auto"``.
    """

    def __init__(self, settings: FeedSettings, dataset: Dataset, pipeline: Any, gpus: int) -> None:
        self._settings, self._dataset, self._pipeline = settings, dataset, pipeline
        self._engine = resolve_engine(settings.engine, pipeline, gpus=gpus)
        self._dataset_ref = ray.put(dataset)
        self._workforce = Workforce(settings, self._dataset_ref, pipeline, self._engine)
        self._staged: dict[int, dict[int, DeliveredPart]] = {}
        self._calls: dict[str, _Call] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._removed: dict[tuple[str, int], str] = {}
        self._sessions = 0
        self._progress = 0
        self._closing = False
        self._opened = asyncio.Event()
        self._books = Books()
        self._metrics = FeedMetrics(settings.name)

    # ---- life ----

    async def start(self) -> FeedInfo:
        """Hire the workers, learn what a prepared sample is, and open.

        Raises:
            ResourceError: workers did not get their CPUs.
            BadSampleError: no sample can be prepared.
            ConfigError: the staging budget is too small.
        """
        hired = await self._workforce.hire_all()
        probe = await self._workforce.probe(hired[0])
        self._open(probe, hired)
        await asyncio.gather(*(self._workforce.configure(w, self._sweep, probe.spec) for w in hired))
        await self._resettle()
        for worker in hired:
            self._send(ev.WorkerUp(worker.name, CREDIT, worker.node))
        self._spawn(self._tick_forever())
        self._spawn(self._watch_nodes())
        self._opened.set()
        return self._info

    async def _until_open(self) -> None:
        """Consumers may come while the feed starts; they wait as long as `start` may take."""
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FeedFailedError(
                f"feed {self._settings.name!r} is still starting after {START_TIMEOUT_S:g} s"
            ) from None

    def _open(self, probe: Probe, hired: list[Hired]) -> None:
        settings = self._settings
        per_node = Counter(worker.node for worker in hired)
        workers = max(per_node.values())
        sample_bytes = probe.spec.nbytes + ID_BYTES
        size = block_samples(
            num_samples=len(self._dataset),
            batch_size=settings.batch_size,
            sample_bytes=sample_bytes,
            staging_bytes=settings.staging_bytes,
            workers=workers,
            sample_s=probe.sample_s,
            nodes=len(per_node),
        )
        self._sweep = Sweep(len(self._dataset), settings.seed, size)
        self._territory = Territory(
            ray.get_runtime_context().current_actor,
            self._dataset,
            self._dataset_ref,
            self._sweep,
            cache_bytes=settings.cache_bytes,
            readahead_bytes=self._readahead_bytes(size),
        )
        self._core = StagingCore(
            self._limits(size * sample_bytes, workers),
            self._sweep.blocks_per_epoch,
            self._block_bytes,
            self._territory.atlas.shares,
        )
        self._sample_bytes = sample_bytes
        self._info = FeedInfo(
            settings=settings,
            sweep=self._sweep,
            spec=probe.spec,
            fingerprint=f"{self._dataset.fingerprint}-{self._pipeline.fingerprint}-{settings.seed}",
            normalize=self._pipeline.normalize,
            class_names=self._dataset.class_names,
        )

    def _limits(self, block_bytes: int, workers: int) -> StagingLimits:
        settings = self._settings
        ahead = settings.ahead_blocks or CREDIT * workers + READY_AHEAD
        return StagingLimits(
            budget_bytes=settings.staging_bytes,
            ahead_blocks=max(MIN_BLOCKS_STAGED - 1, min(ahead, settings.staging_bytes // block_bytes)),
            lease_s=settings.lease_s,
            boarding_s=settings.boarding_s,
            patience_s=settings.patience_s,
            prep_timeout_s=settings.prep_timeout_s,
        )

    def _readahead_bytes(self, block_size: int) -> int:
        if self._settings.readahead_bytes is not None:
            return self._settings.readahead_bytes
        mean = float(np.mean(self._dataset.lengths(np.arange(min(1000, len(self._dataset))))))
        return int(mean * block_size * CREDIT * self._settings.prep_workers)

    def _block_bytes(self, block: int) -> int:
        first, end = self._sweep.span(block)
        return (end - first) * self._sample_bytes

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
            if tick % TICKS_A_REPORT == 0:
                self._metrics.update(self._books, self._core.window.used_bytes, len(self._workforce.workers))

    async def stop(self) -> None:
        """End the feed: calls that wait are answered, workers and cache are gone when this returns."""
        self._closing = True
        self._fail(f"feed {self._settings.name!r} was stopped")
        self._workforce.dismiss_all()
        if hasattr(self, "_territory"):
            self._territory.close_all()

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
        return not all(self._core.window.has(block, part, task) for part, task in parts)

    async def heartbeat(self, consumer: str, session: int, released: int, done: int, report: ConsumerReport) -> bool:
        """A consumer is alive; False if its session is not open any more."""
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
        if report is not None:
            self._books.report(consumer, report)
        self._send(ev.Leave(consumer, session, keep_seat))

    async def status(self) -> FeedStatus:
        """A snapshot.

        Raises:
            FeedFailedError: the feed is not open yet.
        """
        if not self._opened.is_set():
            raise FeedFailedError(f"feed {self._settings.name!r} is still starting")
        caches = {} if self._closing else await self._territory.stats()
        return self._books.snapshot(self._info, self._engine, self._core, self._workforce, caches)

    async def survey(self) -> Survey | None:
        """What a cache node that was restarted must know."""
        return self._territory.survey

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
                self._spawn(self._make(instruction))
            case ev.Deliver():
                delivered = tuple(self._delivered(block) for block in instruction.blocks)
                self._answer(instruction.consumer, Delivery(delivered, progress=self._progress))
            case ev.Drop():
                self._staged.pop(instruction.block, None)
            case ev.Retire():
                self._workforce.dismiss(instruction.worker)
                self._spawn(self._replace(instruction.worker))
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
        if hasattr(self, "_core") and self._core.failed is None:
            self._core.failed = reason
        self._books.note(f"the feed failed: {reason}")
        for consumer in list(self._calls):
            self._answer(consumer, Delivery(error=FeedFailedError(reason)))

    # ---- work ----

    async def _make(self, order: ev.Prepare) -> None:
        """Have one part of a block made; whatever comes of it becomes an event."""
        worker = self._workforce.workers.get(order.worker)
        if worker is None:
            return
        wanted = Wanted(order.block, order.share)
        meta_ref, payload_ref = worker.actor.prepare.remote(wanted, self._books.left_out(order.block))
        try:
            meta: BlockMeta = await meta_ref
        except ray.exceptions.RayActorError:
            await self._lost(order.worker, f"process {worker.pid} died")
        except ray.exceptions.RayError as error:
            await self._lost(order.worker, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
        else:
            self._finished(order, meta, payload_ref)

    def _finished(self, order: ev.Prepare, meta: BlockMeta, payload_ref: Any) -> None:
        if not self._core.crew.has(order.task):
            return
        self._progress += 1
        first, end = self._sweep.span(meta.block)
        self._books.finished(order.worker, meta, self._sweep.epoch_of(meta.block), end - first)
        fatal = self._settings.on_bad_sample == "raise" and meta.bad
        part = DeliveredPart(meta, [] if fatal else [payload_ref], order.part, order.task)
        self._staged.setdefault(order.block, {})[order.part] = part
        error = str(BadSampleError(meta.bad[0].uri, meta.bad[0].reason)) if fatal else None
        self._send(ev.Prepared(order.task, error))
        self._books.forget_below(min((c.floor for c in self._core.roster.cohorts.values()), default=0))

    async def _lost(self, name: str, reason: str) -> None:
        """A worker is gone, or its part ended in an error that is not the data's: replace it."""
        worker = self._workforce.workers.get(name)
        if worker is None or self._closing:
            return
        self._workforce.dismiss(name)
        if await self._territory.answers(worker.node, NODE_ANSWER_S):
            self._send(ev.WorkerDown(name, reason))
        else:
            await self._node_down(worker.node, f"{name} died and its cache does not answer")
        await self._replace(name)

    async def _replace(self, name: str) -> None:
        hired = await self._workforce.replace(name, give_up=lambda: self._closing or self._core.failed is not None)
        if hired is not None:
            await self._workforce.configure(hired, self._sweep, self._info.spec)
            if self._territory.is_settled_on(self._workforce.per_node()):
                await self._territory.tell(hired.actor)
            else:
                await self._resettle()
            self._send(ev.WorkerUp(hired.name, CREDIT, hired.node))

    # ---- nodes ----

    async def _resettle(self) -> None:
        """Give the samples homes on the nodes that have workers now."""
        weights = {node: float(count) for node, count in self._workforce.per_node().items()}
        if weights:
            await self._territory.settle(weights, [worker.actor for worker in self._workforce.workers.values()])
            self._books.note(f"samples have homes on {len(weights)} node{'s' * (len(weights) > 1)}: {self._shares()}")

    def _shares(self) -> str:
        """How the workers are spread, for the log."""
        counts = sorted(self._workforce.per_node().items())
        return ", ".join(f"{node[:8]} ({count} prep worker{'s' * (count > 1)})" for node, count in counts)

    async def _watch_nodes(self) -> None:
        """Notice nodes that Ray has given up."""
        here = ray.get_runtime_context().get_node_id()
        while not self._closing:
            await asyncio.sleep(NODES_PERIOD_S)
            if set(self._territory.caches) <= {here}:
                continue
            nodes = await asyncio.get_running_loop().run_in_executor(None, ray.nodes)
            alive = {node["NodeID"] for node in nodes if node["Alive"]}
            for node in set(self._territory.caches) - alive:
                await self._node_down(node, "Ray says that it is dead")

    async def _node_down(self, node: str, reason: str) -> None:
        """A node is gone: make again what lay there, hire other workers, give its samples new homes."""
        if node not in self._territory.caches or self._closing:
            return
        self._territory.close(node)
        workers = [worker.name for worker in self._workforce.workers.values() if worker.node == node]
        for name in workers:
            self._workforce.dismiss(name)
        self._send(ev.NodeDown(node, reason))
        for name in workers:
            self._spawn(self._replace(name))
        await self._resettle()
