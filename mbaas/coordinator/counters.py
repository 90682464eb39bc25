"""Counters of a feed: samples, consumers' reports, ledgers, bad samples, and the log of decisions."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from mbaas.base.units import percent, seconds
from mbaas.core.ledgers import LedgerBook
from mbaas.core.staging.streams import FEED_STREAM, stream_number
from mbaas.model.sharing import LoadingCosts, PipelineCosts, Repeats
from mbaas.model.waits import UnevenSteps
from mbaas.samples.order import SampleOrder
from mbaas.status import SkippedSample
from mbaas.wire.blocks import BlockMeta
from mbaas.wire.consumers import ConsumerReport
from mbaas.wire.samples import MUCH_LEFT_OUT, BadSample, EpochLedger, FetchCounts, LedgerEntry, Sum

KEPT_NOTES = 200
KEPT_SKIPPED = 1000
KEPT_NAMES = 1000
"""Most consumers, and most workers, that are remembered: more than a coordinator serves at a time."""

KEPT_MOVES = 100
"""Moves of workers between feeds whose times are kept, the newest ones."""

KEPT_BLOCKS = 10_000
"""Number of per-block counts above which old blocks are dropped.

A scan costs more than the few bytes that each count takes.
"""


class Sums:
    """The sum over many processes of counters that each start at 0; `total` includes processes that are gone."""

    def __init__(self) -> None:
        self.total = 0.0
        self._latest: dict[Hashable, float] = {}  # most recently updated process last

    def enter(self, process: Hashable, so_far: float) -> float | None:
        """Update a process's counter. Return its increase, or None for a new process.

        Smaller values than before arrived late and count as 0.
        """
        before = self._latest.pop(process, None)
        more = max(0.0, so_far - (before or 0.0))
        self._latest[process] = (before or 0.0) + more
        self.total += more
        if len(self._latest) > KEPT_NAMES:  # its part of the total stays
            del self._latest[next(iter(self._latest))]
        return more if before is not None else None


class Reports:
    """Reports of consumers.

    The numbers in a report are sums over its loader's life, not differences, so the next report repairs a lost one.

    Attributes:
        latest: consumer -> last report of its newest loader, for a while also after the consumer left.
        total: the sum over all loaders.
    """

    def __init__(self) -> None:
        self.latest: dict[str, ConsumerReport] = {}
        self.total = ConsumerReport()
        # (consumer, loader) -> last report, most recently updated last
        self._by_loader: dict[tuple[str, str], ConsumerReport] = {}

    def enter(self, consumer: str, report: ConsumerReport) -> None:
        """Record a report. Reports of a loader may arrive in any order, even after reports of the next loader."""
        before = self._by_loader.pop((consumer, report.loader), None)
        if before is not None and report.is_older_than(before):
            report = before
        self._by_loader[consumer, report.loader] = report
        self.total = self.total.plus(report.since(before or ConsumerReport()))
        last = self.latest.get(consumer)
        if before is None or last is None or last.loader == report.loader:
            self.latest[consumer] = report
        if len(self._by_loader) > KEPT_NAMES:  # its part of the total stays
            name, loader = next(iter(self._by_loader))
            del self._by_loader[name, loader]
            if (last := self.latest.get(name)) is not None and last.loader == loader:
                del self.latest[name]


@dataclass(frozen=True)
class StreamCounts(Sum):
    """Samples prepared for a stream, seconds of workers, and samples delivered to its consumers."""

    samples: int = 0
    prep_s: float = 0.0
    delivered: int = 0


class Counters:
    """Counters of one feed.

    Attributes:
        samples, fetch_s, prep_s, fetched: sums over all prepared parts, as in `BlockMeta`.
        parts: prepared parts.
        by_stream: stream -> counts of its samples; see `mbaas.core.staging.streams`.
        rows_made: block -> its prepared rows, including repetitions; recent epochs only.
        remade: parts that were prepared again, counted each time.
        repeats: their samples, by cause.
        internal_errors: bugs that coordinators survived.
        workers_cpu_s, caches_cpu_s, coordinators_cpu_s: CPU seconds of the feed's processes.
        encoded_cpu_s, encoded_samples: see `LoadingCosts`.
        restarts: known restarts of the coordinator.
        prediction_error, start_s, moves_s: see `FeedStatus`.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.samples = 0
        self.fetch_s = self.prep_s = 0.0
        self.fetched = FetchCounts()
        self.parts = 0
        self.remade = 0
        self.repeats = Repeats()
        # block -> whether its bytes were needed at its last drop, and its rows made before; recent epochs only
        self._dropped: dict[int, tuple[bool, int]] = {}
        self.by_stream: dict[int, StreamCounts] = {}
        self.rows_made: dict[int, int] = {}
        self.worker_samples: Counter[str] = Counter()
        self.worker_prep_s: Counter[str] = Counter()
        self.workers_cpu_s, self.caches_cpu_s, self.coordinators_cpu_s = Sums(), Sums(), Sums()
        self.encoded_cpu_s, self.encoded_samples = 0.0, 0
        self.reports = Reports()
        self.ledgers = LedgerBook()
        self.rank_steps = UnevenSteps()
        self.internal_errors = self.restarts = 0
        self.prediction_error: float | None = None
        self.start_s: float | None = None
        self.moves_s: deque[float] = deque(maxlen=KEPT_MOVES)
        # worker from another feed without a part so far -> Unix time of the decision to move it
        self._moved_in: dict[str, float] = {}
        self._expected: tuple[float, float] | None = None  # seconds, and time of the prediction
        self.notes: deque[str] = deque(maxlen=KEPT_NOTES)
        self.skipped: dict[int, SkippedSample] = {}  # by sample, most recent last
        self.skipped_total = 0
        # stream -> newest epoch with skipped samples, and their number
        self._skipped_in_epoch: dict[int, tuple[int, int]] = {}
        self._said_much_is_left_out = False
        self._left_out: dict[int, tuple[BadSample, ...]] = {}

    def note(self, text: str) -> None:
        """Add a line with the time to the log of decisions."""
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")

    def moved_in(self, worker: str, decided_at: float) -> None:
        """Record that a worker comes from another feed, by a decision at this Unix time."""
        self._moved_in[worker] = decided_at
        if len(self._moved_in) > KEPT_MOVES:  # workers that died before their first part
            del self._moved_in[next(iter(self._moved_in))]

    def finished(self, worker: str, block: int, meta: BlockMeta, order: SampleOrder) -> None:
        """Count a part of a block prepared by a worker; ``order`` is in blocks of its pipeline."""
        block_rows = order.size_of(meta.block)
        self.parts += 1
        if (decided_at := self._moved_in.pop(worker, None)) is not None:
            self.moves_s.append(time.time() - decided_at)
        add(self.worker_samples, worker, meta.samples)
        add(self.worker_prep_s, worker, meta.prep_s)
        spent_s = self.workers_cpu_s.enter(worker, meta.cpu_s)
        if spent_s is not None and not meta.fetched.decoded.samples:
            self.encoded_cpu_s += spent_s
            self.encoded_samples += meta.samples
        self._count(stream_number(block), StreamCounts(meta.samples, meta.prep_s))
        self.samples += meta.samples
        self.fetch_s += meta.fetch_s
        self.prep_s += meta.prep_s
        self.fetched += meta.fetched
        # The sum of rows detects a repeated part: a block's parts divide its rows.
        rows = self.rows_made.get(block, 0) + meta.rows
        self.rows_made[block] = rows
        again = rows > block_rows
        self.remade += again
        if again:
            self.repeats += self._cause(block, rows, block_rows, meta.samples)
        # Bad samples of a repeated part were counted before.
        if not again:
            self._leave_out(block, meta, order)

    def dropped(self, block: int, *, for_room: bool) -> None:
        """Record that a block is no longer staged, because its bytes were needed or all consumers had it."""
        if block in self.rows_made:  # otherwise it was never prepared, or is forgotten
            self._dropped[block] = for_room, self.rows_made[block]

    def _cause(self, block: int, rows: int, block_rows: int, samples: int) -> Repeats:
        for_room, rows_before = self._dropped.get(block, (False, 0))
        # Since the last drop, each row is made once. A further time, as without a drop, the part was lost.
        if rows - rows_before > block_rows:
            return Repeats(lost=samples)
        return Repeats(dropped=samples) if for_room else Repeats(passed=samples)

    def _leave_out(self, block: int, meta: BlockMeta, order: SampleOrder) -> None:
        if not meta.bad:
            return
        self._left_out[block] = (*self.left_out(block), *meta.bad)
        self.skipped_total += len(meta.bad)
        epoch = meta.epoch
        for bad in meta.bad:
            before = self.skipped.pop(bad.sample_id, None)
            times = 1 if before is None else before.times + 1
            self.skipped[bad.sample_id] = SkippedSample(bad.sample_id, bad.uri, bad.reason, times, epoch)
        while len(self.skipped) > KEPT_SKIPPED:
            del self.skipped[next(iter(self.skipped))]
        newest, skipped = self._skipped_in_epoch.get(stream_number(block), (0, 0))
        if epoch >= newest:
            skipped = len(meta.bad) + (skipped if epoch == newest else 0)
            self._skipped_in_epoch[stream_number(block)] = epoch, skipped
        if not self._said_much_is_left_out and skipped > MUCH_LEFT_OUT * order.num_samples:
            self._said_much_is_left_out = True
            self.note(
                f"{skipped} of {order.num_samples} samples are left out as bad, so far in epoch {epoch}; the last is "
                f"{bad.uri}: {bad.reason}"
            )

    def forget_below(self, lowest: Callable[[], Mapping[int, int]]) -> None:
        """Drop the counts of blocks that will not be prepared again; ``lowest`` returns each stream's lowest block."""
        if len(self.rows_made) > KEPT_BLOCKS:
            least = {FEED_STREAM: 0, **lowest()}
            self._keep_blocks(lambda block: block >= least.get(stream_number(block), math.inf))

    def forget(self, block: int) -> None:
        """Drop the bad samples of a block that is prepared again: those that are still bad are counted again."""
        self.rows_made.pop(block, None)
        self._dropped.pop(block, None)
        left_out, stream = self._left_out.pop(block, ()), stream_number(block)
        epoch, skipped = self._skipped_in_epoch.get(stream, (0, 0))
        self._skipped_in_epoch[stream] = epoch, max(0, skipped - len(left_out))

    def forget_stream(self, stream: int) -> None:
        """Drop all counts of a stream that has ended. The next pipeline may get its number, and so the same blocks."""
        self.by_stream.pop(stream, None)
        self._skipped_in_epoch.pop(stream, None)
        self._keep_blocks(lambda block: stream_number(block) != stream)

    def _keep_blocks(self, is_kept: Callable[[int], bool]) -> None:
        self.rows_made = {block: rows for block, rows in self.rows_made.items() if is_kept(block)}
        self._left_out = {block: ids for block, ids in self._left_out.items() if is_kept(block)}
        self._dropped = {block: why for block, why in self._dropped.items() if is_kept(block)}

    def left_out(self, block: int) -> tuple[BadSample, ...]:
        """Return the samples, with reasons, that were bad when the block was first prepared."""
        return self._left_out.get(block, ())

    def report(self, consumer: str, report: ConsumerReport, stream: int = FEED_STREAM) -> None:
        """Record the report of a consumer that uses a stream now, and the ledgers of its finished epochs."""
        before = self.reports.total.samples
        # without ledgers and steps, possibly thousands, which are recorded below
        self.reports.enter(consumer, replace(report, ledgers=(), steps=()))
        self._count(stream, StreamCounts(delivered=self.reports.total.samples - before))
        for number, ledger in enumerate(report.ledgers, report.first_ledger):
            if not self.ledgers.add(LedgerEntry(consumer, report.loader, number, time.time(), ledger)):
                continue
            self._compare(ledger)
            if not ledger.exact:
                self.note(f"{consumer}: epoch {ledger.epoch} is not exact: {ledger}")

    def report_steps(self, trial: str, consumer: str, ranks: int, report: ConsumerReport) -> None:
        """Compare the steps in a report of a rank with those of the other ranks."""
        if ranks > 1:
            self.rank_steps.take(
                trial, consumer, ranks=ranks, loader=report.loader, first=report.first_step, waits=report.steps
            )

    def expect(self, epoch_s: float) -> None:
        """Record a prediction of an epoch's seconds, to compare with the next epoch."""
        self._expected = epoch_s, time.monotonic()

    def _compare(self, ledger: EpochLedger) -> None:
        if self._expected is None or not ledger.seconds:
            return
        epoch_s, since = self._expected
        if time.monotonic() - ledger.seconds >= since:
            self._expected = None
            self.prediction_error = epoch_s / ledger.seconds - 1
            took, predicted = seconds(ledger.seconds), seconds(epoch_s)
            self.note(
                f"an epoch took {took}; {predicted} were predicted ({percent(self.prediction_error, signed=True)})"
            )

    def _count(self, stream: int, counts: StreamCounts) -> None:
        self.by_stream[stream] = self.by_stream.get(stream, StreamCounts()) + counts

    def costs(self, cpu_price_per_h: float | None, pipelines: Mapping[int, str] | None = None) -> LoadingCosts:
        """Return the cost so far of loading samples for trials.

        ``pipelines`` are the fingerprints of several pipelines, by stream.
        """
        several = {
            fingerprint: PipelineCosts(counts.prep_s / self.prep_s if self.prep_s else 0.0, counts.delivered)
            for stream, fingerprint in (pipelines or {}).items()
            if (counts := self.by_stream.get(stream)) is not None
        }
        self.coordinators_cpu_s.enter("this one", time.process_time())
        return LoadingCosts(
            prep_cpu_s=self.workers_cpu_s.total,
            cache_cpu_s=self.caches_cpu_s.total,
            coordinator_cpu_s=self.coordinators_cpu_s.total,
            delivered_samples=self.reports.total.samples,
            encoded_cpu_s=self.encoded_cpu_s,
            encoded_samples=self.encoded_samples,
            cpu_price_per_h=cpu_price_per_h,
            pipelines=several,
        )


def add(sums: Counter[str], name: str, amount: float) -> None:
    """Add to a name's sum. Above `KEPT_NAMES` names, drop the one updated longest ago."""
    sums[name] = sums.pop(name, 0) + amount  # type: ignore[assignment]  # Counter says int, and takes any number
    if len(sums) > KEPT_NAMES:
        del sums[next(iter(sums))]
