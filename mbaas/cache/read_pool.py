"""Threads that read storage directly into slabs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import counted, seconds
from mbaas.cache.slab import Load, TemporaryReason
from mbaas.cache.stats import EpochCounts, Meter
from mbaas.errors import BadSampleError, StorageError
from mbaas.samples.order import Ids
from mbaas.settings import Timeouts
from mbaas.wire.samples import Amount

if TYPE_CHECKING:
    from mbaas.dataset import SampleReader

CHUNK_SAMPLES = 16
"""Samples per chunk. Fewer would make scheduling expensive; more would make urgent samples wait for a thread."""

LATE_S = 20.0
"""Age at which a read counts as hanging: it is logged, and a replacement thread is started."""

HUNG_S = 45.0
"""Age of a read at which waiting fetches return a `TemporaryReason`, before their workers are considered stuck."""

QUICK_S = 100e-6
"""Mean read time below which reads count as coming from memory, if they are also mostly CPU time.

More threads would then compete for the interpreter lock. On two cores, eight threads read small files from the page
cache at 0.4 times the rate of one thread.
"""

DECAY = 0.98
"""Decay of older measurements with each chunk."""

ENOUGH_READS = 128
"""Minimum number of reads for a decision."""

FIRST_PAUSE, LONGEST_PAUSE = 1 << 12, 1 << 20
"""Reads before the next single-thread trial, after several threads proved faster; doubles up to the maximum."""

STUCK_S = 0.1
"""While a read is older than this, several threads are used, regardless of earlier reads."""

SPARE_THREADS = 32
"""Maximum number of replacement threads. Each holds memory for up to one block. If all threads hang, reading stops."""


# ---- retries: clock and random numbers are arguments; nothing here sleeps or blocks a thread ----

FIRST_PAUSE_S = 0.2
"""Upper bound of the first random pause; the bound doubles with each attempt."""

MAX_PAUSE_S = 10.0
"""Limit of the bound: after an outage, samples are read again within this time."""

HOLD_S = 2.0
"""Longest wait of a fetch for a failing sample. Then the reply omits the sample, and the caller may retry."""

SHORT_RETRY_S = 5.0
"""Shorter retry time, for samples given up before, and for missing files after another missing file was given up.

Otherwise an unreadable sector would cost the full time in every epoch, and a thousand deleted files a thousand times
that. The first missing file gets the full time, because a server may be down, or a network file system may cache an
absence for a minute. A file counts as missing only if its folder exists.
"""

FORGET_S = 30.0
"""Time after which a sample's failures are forgotten.

It starts when a retry is due and nothing requests the sample; a later request has the full retry time. For a sample
given up, it starts at that point; until then each further failure makes the sample bad at once.
"""


@dataclass(eq=False)
class _FailingSample:
    since: float  # first failed attempt, since it was last given up
    again: bool  # it was given up before, and not read since
    attempts: int = 0  # failed ones since then
    due: float | None = None  # time of the next attempt; None once it is given up
    reason: str = ""  # of the last failure
    is_missing: bool = False  # the last failure was a missing file
    given_up: float = 0.0  # time when it was given up


class Retries:
    """The failing samples of one cache node, retried for ``storage_s`` before they count as bad.

    ``draw`` returns random numbers in [0, 1), so that simultaneous failures are retried at different times.
    """

    def __init__(self, storage_s: float, draw: Callable[[], float]) -> None:
        self._storage_s, self._draw = storage_s, draw
        self._known: dict[int, _FailingSample] = {}  # by sample; samples given up stay until they are read
        # The most recently resolved missing file was given up.
        self._files_are_gone = False
        self._outage_since: float | None = None  # start of the outage that was logged
        # Samples given up since the last `log` call, and samples read since the outage was logged.
        self._given_up = self._came = 0

    def failed(self, sample_id: int, error: StorageError, now: float) -> str:
        """Record a failed attempt. Return the reason, as a `TemporaryReason` unless the sample is bad now."""
        failing = self._known.get(sample_id)
        # A fetch that waited for the sample reads it again with its whole slab, and must then get the final error.
        if failing is not None and failing.due is None and now - failing.given_up <= FORGET_S:
            return self._verdict(failing, error)
        if failing is None or failing.due is None or now - failing.due > FORGET_S:
            given_up = failing is not None and failing.due is None
            failing = self._known[sample_id] = _FailingSample(now, again=given_up)
        failing.attempts += 1
        is_short = failing.again or (error.is_missing and self._files_are_gone)
        limit_s = min(SHORT_RETRY_S, self._storage_s) if is_short else self._storage_s
        left_s = failing.since + limit_s - now
        bound_s = min(FIRST_PAUSE_S * 2 ** min(failing.attempts - 1, 20), MAX_PAUSE_S)
        # The last attempt is at the end of the time limit, so that the limit is used in full.
        failing.due = now + min(self._draw() * bound_s, left_s) if left_s > 0 else None
        failing.reason, failing.is_missing = error.reason, error.is_missing
        if failing.due is not None:
            return TemporaryReason(error.reason)
        failing.given_up = now
        self._given_up += 1
        self._files_are_gone |= error.is_missing
        return self._verdict(failing, error)

    def _verdict(self, failing: _FailingSample, error: StorageError) -> str:
        return f"{error.reason} ({counted(failing.attempts, 'attempt')} in {seconds(failing.given_up - failing.since)})"

    def resolved(self, sample_ids: Iterable[int]) -> None:
        """Record samples that were read, or are bad for a permanent reason."""
        if not self._known:
            return
        came = [failing for sample_id in sample_ids if (failing := self._known.pop(sample_id, None)) is not None]
        self._came += len(came)
        if any(failing.is_missing for failing in came):
            self._files_are_gone = False

    def failing(self, sample_ids: Iterable[int]) -> dict[int, str]:
        """Return the samples that fail and are not given up: id -> reason of the last failure."""
        if not self._known:
            return {}
        found = {i: failing for i in sample_ids if (failing := self._known.get(i)) is not None}
        return {i: failing.reason for i, failing in found.items() if failing.due is not None}

    def pause_s(self, sample_ids: Iterable[int], now: float) -> float:
        """Return the seconds until all of the given failing samples may be retried."""
        return max(0.0, *(due - now for i in sample_ids if (due := self._known[i].due) is not None))

    def are_new(self, sample_ids: Iterable[int]) -> bool:
        """Return whether all given failing samples are due for a retry within `HOLD_S` of their first failure."""
        known = [self._known[i] for i in sample_ids]
        return all(failing.due is not None and failing.due < failing.since + HOLD_S for failing in known)

    def log(self, uri: Callable[[int], str], now: float) -> list[str]:
        """Return log lines about changes since the last call."""
        lines = []
        old = {i: failing for i, failing in self._known.items() if now - failing.since >= HOLD_S}
        waiting = {i: t for i, t in old.items() if t.due is not None and now - t.due <= FORGET_S}
        if waiting and self._outage_since is None:
            first = min(waiting, key=lambda i: waiting[i].since)
            self._outage_since, self._came = waiting[first].since, 0
            lines.append(
                f"storage does not give {counted(len(waiting), 'sample')}, for instance {uri(first)}: "
                f"{waiting[first].reason}; asked again for up to {seconds(self._storage_s)}"
            )
        if self._given_up:
            lines.append(f"gave up {counted(self._given_up, 'sample')} that storage did not give")
            self._given_up = 0
        if self._outage_since is not None and not waiting:
            if self._came:
                lines.append(f"storage works again, after {seconds(now - self._outage_since)}")
            self._outage_since = None
        return lines


# ---- threads ----


class Read(NamedTuple):
    """A sample being read, and the start time on the pool's clock. ``again``: storage failed to deliver it before."""

    since: float
    sample_id: int
    again: bool = False


class Effort:
    """Decides from recent reads whether a single thread would read as fast as several.

    With several threads, time spent waiting for the interpreter lock cannot be distinguished from waiting for storage.
    So if all threads together are about as busy as one can be, a single thread is tried. If it turns out to wait for
    storage, the next trial comes after twice as many reads.
    """

    def __init__(self) -> None:
        self._reads = self._seconds = self._cpu_s = 0.0
        self._until_trial, self._pause = 0, FIRST_PAUSE
        self.one_is_enough = False

    def add(self, reads: int, seconds: float, cpu_s: float, threads: int) -> None:
        """Add a chunk's number of reads, its elapsed and CPU time, and the number of threads reading at that time."""
        self._reads = DECAY * self._reads + reads
        self._seconds = DECAY * self._seconds + seconds / threads
        self._cpu_s = DECAY * self._cpu_s + cpu_s
        self._until_trial -= reads
        is_quick = self._seconds < QUICK_S * self._reads and 2 * self._cpu_s > self._seconds
        if self.one_is_enough and not is_quick:
            self.one_is_enough, self._until_trial = False, self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif is_quick and self._reads >= ENOUGH_READS and self._until_trial <= 0:
            self.one_is_enough = True


class HangingReads(NamedTuple):
    """Number of hanging reads, and of their replacement threads (at most `SPARE_THREADS`)."""

    reads: int
    replaced: int

    @classmethod
    def of(cls, reads: Iterable[Read], now: float) -> HangingReads:
        late = sum(now - read.since >= LATE_S for read in reads)
        return cls(late, min(late, SPARE_THREADS))


@dataclass(eq=False)
class _Job:
    """Samples of a load, to be read once by several threads. Changed only under the pool's lock."""

    load: Load
    slab: NDArray[np.uint8]
    indices: list[int]  # within the load
    size: int  # samples per chunk
    urgent: bool  # a fetch waits for them
    again: bool  # storage failed to deliver them before
    begun: int = 0  # number of indices taken by threads
    reading: int = 0  # chunks in progress
    errors: dict[int, BadSampleError] = field(default_factory=dict)  # by index
    done: Future[dict[int, BadSampleError]] = field(default_factory=Future)  # if cancelled, no further chunk is taken

    @property
    def chunks_left(self) -> int:
        return 0 if self.done.done() else -(-(len(self.indices) - self.begun) // self.size)

    def take(self) -> list[int]:
        start, self.begun = self.begun, min(self.begun + self.size, len(self.indices))
        self.reading += 1
        return self.indices[start : self.begun]

    def finish_chunk(self, outcome: dict[int, BadSampleError] | Exception) -> None:
        """Record the outcome of a chunk. An error that is not specific to a sample ends the job."""
        self.reading -= 1
        if isinstance(outcome, Exception):
            self.begun = len(self.indices)
            if not self.done.done() and self.done.set_running_or_notify_cancel():
                self.done.set_exception(outcome)
            return
        self.errors |= outcome
        self.end_if_read()

    def end_if_read(self) -> None:
        is_read = self.begun == len(self.indices) and not self.reading
        if is_read and not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_result(self.errors)


class ReadPool:
    """Threads that fill slabs, with urgent reads before read-ahead.

    A sample that storage failed to deliver is retried after a pause, during which no thread waits. Retries may hang, so
    they use at most half of the threads. A thread with a hanging read cannot be stopped; a replacement thread reads
    other samples in the meantime. Reads from memory, such as small files in the page cache, use a single thread.

    Args:
        reader: called from all threads concurrently.
        threads: storage with high latency needs more threads than cores.
        meter: counts every read.
        storage_s: seconds of retries before a sample counts as bad.
        clock, sleep: monotonic time in s; a pause in the event loop.
    """

    def __init__(
        self,
        reader: SampleReader,
        *,
        threads: int,
        meter: Meter,
        storage_s: float = Timeouts().storage_s,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.threads = threads
        self._reader = reader
        self._meter = meter
        self.retries = Retries(storage_s, random.random)
        self._clock, self._sleep = clock, sleep
        # An executor starts threads only when they have work.
        self._executor = ThreadPoolExecutor(threads + SPARE_THREADS, thread_name_prefix="mbaas-read")
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []  # jobs with untaken chunks, oldest first
        self._reads: dict[int, Read] = {}  # by thread; lock-free, because each thread writes only its own entry
        self._effort = Effort()
        self._retrying = 0  # working threads whose chunk is a retry
        # Threads that take chunks. At most `_most()`, except that surplus threads finish their current chunk.
        self._working = 0
        self._closed = False

    async def fill(
        self, load: Load, slab: NDArray[np.uint8], *, urgent: bool, rows: NDArray[np.intp] | None = None
    ) -> dict[int, str]:
        """Read the samples of `load` with index in `rows`, by default all, into `slab`, uint8[load.nbytes].

        Return index -> reason of failed reads; a `TemporaryReason` if storage may deliver the sample later. After a
        cancellation, chunks in progress still write into `slab`.
        """
        indices = list(range(len(load.rows))) if rows is None else rows.tolist()
        # All threads should share an awaited slab, however few samples it has.
        size = max(1, min(CHUNK_SAMPLES, -(-len(indices) // self.threads)))
        failures = await self._read_all(load, slab, indices, size=size, urgent=urgent, again=False)
        while temporary := [i for i, reason in failures.items() if isinstance(reason, TemporaryReason)]:
            ids = load.sample_ids[temporary].tolist()
            if not self.retries.are_new(ids):
                break
            await self._sleep(self.retries.pause_s(ids, self._clock()))
            for i in temporary:
                del failures[i]
            # Single samples: each retry may run into storage's full timeout, and must not delay others of its chunk.
            failures |= await self._read_all(load, slab, temporary, size=1, urgent=urgent, again=True)
        return failures

    async def retry(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> None:
        """Retry failing samples alone, recording the outcome in `retries`. (A fetch would read their whole slabs.)"""
        load = Load(0, None, None, None, np.arange(len(sample_ids)), sample_ids, lengths)
        scratch = np.empty(load.nbytes, np.uint8)
        await self._read_all(load, scratch, list(range(len(sample_ids))), size=1, urgent=True, again=True)

    async def _read_all(
        self, load: Load, slab: NDArray[np.uint8], indices: list[int], *, size: int, urgent: bool, again: bool
    ) -> dict[int, str]:
        """Read samples once, in chunks of ``size``. Return index -> reason of the failed ones."""
        job = _Job(load, slab, indices, size, urgent, again)
        with self._lock:
            job.end_if_read()  # for an empty job
            self._jobs.append(job)
            self._start_threads()
        errors = await asyncio.wrap_future(job.done)
        failures, resolved, now = {}, [], self._clock()
        for i, sample_id in zip(indices, load.sample_ids[indices].tolist(), strict=True):
            error = errors.get(i)
            if isinstance(error, StorageError):
                failures[i] = self.retries.failed(sample_id, error, now)
                continue
            resolved.append(sample_id)
            if error is not None:
                failures[i] = error.reason
        self.retries.resolved(resolved)
        return failures

    def mark_urgent(self, slabs: Collection[int]) -> None:
        with self._lock:
            for job in self._jobs:
                job.urgent |= job.load.slab in slabs

    def replace_hanging(self) -> HangingReads:
        """Start replacement threads for hanging reads, and return the counts."""
        with self._lock:
            self._start_threads()
        return self._hanging()

    def oldest(self) -> Read | None:
        # Copying is atomic in the interpreter; threads change the dict concurrently.
        return min(self._reads.copy().values(), default=None)

    def hung(self, sample_ids: Collection[int], now: float) -> dict[int, str]:
        """Return the samples whose current read is older than `HUNG_S`: id -> reason."""
        late = {read.sample_id: now - read.since for read in self._reads.copy().values() if now - read.since > HUNG_S}
        said = "storage has not answered for"
        return {i: TemporaryReason(f"{said} {seconds(late[i])}") for i in sample_ids if i in late}

    def close(self) -> None:
        """End the threads after their current chunks."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=True)

    def _start_threads(self) -> None:
        """Start as many threads as there is work for. Call it with the lock held."""
        free = 0 if self._closed else self._most() - self._working
        if free <= 0:
            return
        for _ in range(min(free, sum(job.chunks_left for job in self._jobs))):
            self._working += 1
            self._executor.submit(self._work)

    def _most(self) -> int:
        oldest = self.oldest() if self._effort.one_is_enough else None
        is_stuck = oldest is not None and self._clock() - oldest.since >= STUCK_S
        width = 1 if self._effort.one_is_enough and not is_stuck else self.threads
        return width + self._hanging().replaced

    def _hanging(self) -> HangingReads:
        return HangingReads.of(self._reads.copy().values(), self._clock())

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            job, chunk = taken
            outcome: dict[int, BadSampleError] | Exception
            wall, cpu, threads = time.perf_counter(), time.thread_time(), self._working
            try:
                outcome = self._read(job, chunk)
            except Exception as error:  # passed to the waiting fetch; the thread continues
                outcome = error
            self._reads.pop(threading.get_ident(), None)
            took = time.perf_counter() - wall, time.thread_time() - cpu
            with self._lock:
                self._retrying -= job.again
                self._effort.add(len(chunk), *took, max(threads, self._working))
                self._start_threads()
                job.finish_chunk(outcome)

    def _take(self) -> tuple[_Job, list[int]] | None:
        with self._lock:
            job = None if self._closed or self._working > self._most() else self._next()
            if job is None:
                self._working -= 1
                return None
            self._retrying += job.again
            return job, job.take()

    def _next(self) -> _Job | None:
        """Return the job to read from next. Call it with the lock held."""
        self._jobs = [job for job in self._jobs if job.chunks_left]
        # Skipped retries are not lost: each thread calls this again after its current retry.
        able = self._jobs
        if any(job.again for job in self._jobs):
            reads = [read for read in self._reads.copy().values() if read.again]
            if self._retrying - HangingReads.of(reads, self._clock()).replaced >= max(1, self.threads // 2):
                able = [job for job in self._jobs if not job.again]
        return next((job for job in able if job.urgent), able[0] if able else None)

    def _read(self, job: _Job, chunk: list[int]) -> dict[int, BadSampleError]:
        load, nbytes, thread = job.load, 0, threading.get_ident()
        failures: dict[int, BadSampleError] = {}
        with self._meter.storage.using():
            for i in chunk:
                offset, length = int(load.offsets[i]), int(load.lengths[i])
                sample_id = int(load.sample_ids[i])
                self._reads[thread] = Read(self._clock(), sample_id, job.again)
                try:
                    self._reader.read_into(sample_id, job.slab[offset : offset + length])
                    nbytes += length
                    # Per sample, because the tuner reads these totals during a chunk.
                    self._meter.storage.moved(length)
                except BadSampleError as error:
                    failures[i] = error  # the rest of the chunk is still read
        reads = len(chunk)
        self._meter.count(load.epoch, EpochCounts(reads=Amount(reads, nbytes), failures=len(failures)))
        return failures
