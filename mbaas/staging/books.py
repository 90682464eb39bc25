"""What a feed has done so far: counters, consumers' reports, ledgers, samples left out, and the log of
decisions.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from mbaas.cache.stats import CacheStats
from mbaas.prep.worker import BlockMeta
from mbaas.staging.cohort import Member
from mbaas.staging.core import StagingCore
from mbaas.staging.protocol import FeedInfo
from mbaas.staging.status import (
    ConsumerReport,
    EpochLedger,
    FeedStatus,
    MemberStatus,
    NodeStatus,
    SkippedSample,
    WorkerStatus,
)
from mbaas.staging.workforce import Workforce

SUMMED = (
    "samples",
    "hits",
    "remote",
    "disk",
    "misses",
    "hit_bytes",
    "remote_bytes",
    "disk_bytes",
    "storage_bytes",
    "fetch_s",
    "prep_s",
)  # fmt: skip

KEPT_NOTES = 200
KEPT_SKIPPED = 1000
KEPT_LEDGERS = 1000


class Books:
    """Counters of one feed.

    Attributes:
        totals: sums over all parts of blocks: the fields of `BlockMeta` that are named in `SUMMED`.
        parts: parts that were made.
        rows_made: block -> rows of it that were made, re-makes included; of the last epochs only.
        remade: parts that were made again, counted each time.
        reports: consumer -> its latest report; those that left stay, so that sums only grow.
        past: the sum over loaders whose name another loader has taken.
        ledgers: (consumer, ledger), oldest first.
        prediction_error: see `FeedStatus`.
        inexact: ledgers that did not hold each sample of their epoch exactly once; stays 0 or mbaas has a bug.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.totals: Counter[str] = Counter()
        self.parts = 0
        self.remade = 0
        self.rows_made: dict[int, int] = {}
        self.worker_samples: Counter[str] = Counter()
        self.worker_prep_s: Counter[str] = Counter()
        self.reports: dict[str, ConsumerReport] = {}
        self.past: ConsumerReport = ConsumerReport()
        self.ledgers: deque[tuple[str, EpochLedger]] = deque(maxlen=KEPT_LEDGERS)
        self.inexact = 0
        self.prediction_error: float | None = None
        self._expected: tuple[float, float] | None = None  # seconds, and when they were predicted
        self.notes: deque[str] = deque(maxlen=KEPT_NOTES)
        self.skipped: deque[SkippedSample] = deque(maxlen=KEPT_SKIPPED)
        self.skipped_total = 0
        self._left_out: dict[int, tuple[int, ...]] = {}

    def note(self, text: str) -> None:
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")

    def finished(self, worker: str, meta: BlockMeta, epoch: int, block_rows: int) -> None:
        """A worker made a part of a block of ``block_rows`` rows."""
        self.parts += 1
        self.worker_samples[worker] += meta.samples
        self.worker_prep_s[worker] += meta.prep_s  # type: ignore[assignment]
        for name in SUMMED:
            self.totals[name] += getattr(meta, name)
        rows = self.rows_made.get(meta.block, 0) + meta.rows
        self.rows_made[meta.block] = rows
        again = rows > block_rows
        self.remade += again
        if not again:
            self._leave_out(meta, epoch)

    def _leave_out(self, meta: BlockMeta, epoch: int) -> None:
        if meta.bad:
            self._left_out[meta.block] = (*self.left_out(meta.block), *(bad.sample_id for bad in meta.bad))
            self.skipped_total += len(meta.bad)
            self.skipped.extend(SkippedSample(b.sample_id, b.uri, b.reason, epoch) for b in meta.bad)

    def forget_below(self, block: int) -> None:
        """Blocks below will not be made again: forget how much of them was made and what they left out."""
        if len(self.rows_made) > 10_000:
            self.rows_made = {b: n for b, n in self.rows_made.items() if b >= block}
            self._left_out = {b: ids for b, ids in self._left_out.items() if b >= block}

    def left_out(self, block: int) -> tuple[int, ...]:
        """Samples that were bad when the block was first made."""
        return self._left_out.get(block, ())

    def report(self, consumer: str, report: ConsumerReport) -> None:
        """A consumer says what it did so far; what an earlier loader of that name did becomes past."""
        old = self.reports.get(consumer)
        if old is not None and old.loader != report.loader:
            self.past = _add(self.past, old)
        self.reports[consumer] = report
        for ledger in report.ledgers:
            self.ledgers.append((consumer, ledger))
            self._compare(ledger)
            if not ledger.exact:
                self.inexact += 1
                self.note(f"{consumer}: epoch {ledger.epoch} is not exact: {ledger}")

    def expect(self, epoch_s: float) -> None:
        """Somebody predicts that the next epoch of a trial takes so long."""
        self._expected = epoch_s, time.monotonic()

    def _compare(self, ledger: EpochLedger) -> None:
        """The first epoch that begins after a prediction answers it."""
        if self._expected is None or not ledger.seconds:
            return
        epoch_s, since = self._expected
        if time.monotonic() - ledger.seconds >= since:
            self._expected = None
            self.prediction_error = epoch_s / ledger.seconds - 1
            self.note(
                f"an epoch took {ledger.seconds:.3g} s; {epoch_s:.3g} s were predicted ({self.prediction_error:+.1%})"
            )

    def delivered(self) -> ConsumerReport:
        """Sum over all consumers that ever were."""
        total = self.past
        for report in self.reports.values():
            total = _add(total, report)
        return total

    def snapshot(
        self, info: FeedInfo, engine: str, core: StagingCore, workforce: Workforce, caches: Mapping[str, CacheStats]
    ) -> FeedStatus:
        settings, sweep = info.settings, info.sweep
        return FeedStatus(
            name=settings.name,
            samples=sweep.num_samples,
            batch_size=settings.batch_size,
            block_samples=sweep.block_samples,
            blocks_per_epoch=sweep.blocks_per_epoch,
            engine=engine,
            members=tuple(self._member(core, m) for m in core.roster.members.values()),
            workers=tuple(self._worker(core, worker) for worker in workforce.workers.values()),
            skipped=tuple(self.skipped),
            skipped_total=self.skipped_total,
            notes=tuple(self.notes),
            ledgers=tuple(self.ledgers),
            inexact_epochs=self.inexact,
            staged_blocks=len(core.window.blocks),
            staged_bytes=core.window.used_bytes,
            staging_bytes=settings.staging_bytes,
            prepared_blocks=self.parts,
            prepared_samples=int(self.totals["samples"]),
            remade_blocks=self.remade,
            delivered_samples=self.delivered().samples,
            nodes=tuple(_node(node, stats, workforce.per_node()) for node, stats in sorted(caches.items())),
            cached_samples=sum(stats.cached_samples for stats in caches.values()),
            cached_bytes=sum(stats.cached_bytes for stats in caches.values()),
            cache_bytes=settings.cache_bytes * len(caches),
            hits=int(self.totals["hits"]),
            remote=int(self.totals["remote"]),
            disk=int(self.totals["disk"]),
            misses=int(self.totals["misses"]),
            hit_bytes=int(self.totals["hit_bytes"]),
            remote_bytes=int(self.totals["remote_bytes"]),
            disk_bytes=int(self.totals["disk_bytes"]),
            storage_bytes=int(self.totals["storage_bytes"]),
            fetch_s=float(self.totals["fetch_s"]),
            prep_s=float(self.totals["prep_s"]),
            prediction_error=self.prediction_error,
            uptime_s=time.monotonic() - self.began,
            failed=core.failed,
        )

    def _member(self, core: StagingCore, member: Member) -> MemberStatus:
        epoch, block = divmod(member.cursor, core.blocks_per_epoch)
        last = [ledger for name, ledger in self.ledgers if name == member.name]
        return MemberStatus(
            name=member.name,
            state=member.state.name.lower(),
            epoch=epoch,
            block=block,
            held_blocks=member.cursor - member.released,
            cohort=member.cohort,
            waits_for=core.explain_wait(member.name) if member.waiting else "",
            report=self.reports.get(member.name, ConsumerReport()),
            last_ledger=last[-1] if last else None,
        )

    def _worker(self, core: StagingCore, hired: Any) -> WorkerStatus:
        busy_s, samples = self.worker_prep_s[hired.name], self.worker_samples[hired.name]
        worker = core.crew.workers.get(hired.name)
        tasks = len(worker.tasks) if worker is not None else 0
        return WorkerStatus(hired.name, hired.pid, tasks, samples, samples / busy_s if busy_s else 0.0)


def _node(node: str, stats: CacheStats, workers: Mapping[str, int]) -> NodeStatus:
    return NodeStatus(
        node=node,
        workers=workers.get(node, 0),
        cached_samples=stats.cached_samples,
        cached_bytes=stats.cached_bytes,
        storage_bytes=stats.total.storage_bytes,
        storage_s=stats.storage_s,
        fetch_threads=stats.threads,
        readahead_bytes=stats.readahead_depth_bytes,
        memory_bytes_per_s=stats.speeds.memory,
        disk_bytes_per_s=stats.speeds.disk,
        peers_bytes_per_s=stats.speeds.peers,
        storage_bytes_per_s=stats.speeds.storage,
    )


def _add(one: ConsumerReport, other: ConsumerReport) -> ConsumerReport:
    return ConsumerReport(
        samples=one.samples + other.samples,
        wait_s=one.wait_s + other.wait_s,
        fetch_stall_s=one.fetch_stall_s + other.fetch_stall_s,
        step_s=one.step_s + other.step_s,
        local_bytes=one.local_bytes + other.local_bytes,
        remote_bytes=one.remote_bytes + other.remote_bytes,
    )
