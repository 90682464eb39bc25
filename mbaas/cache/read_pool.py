"""The threads that read storage, straight into slabs."""

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

from mbaas import units
from mbaas.cache.slab import Load, PassingReason
from mbaas.cache.stats import EpochCounts, Meter
from mbaas.cache.troubles import Troubles
from mbaas.errors import BadSampleError, ConfigError, StorageError
from mbaas.messages import Amount
from mbaas.order import Ids
from mbaas.settings import MOST_FETCH_THREADS, Timeouts

if TYPE_CHECKING:
    from mbaas.dataset import SampleReader

CHUNK_SAMPLES = 16
"""The most samples a thread reads in one go. With fewer, handing them out would cost too much beside reading them; with
more, an urgent sample would wait too long for a thread.
"""

LATE_S = 20.0
"""Age of a read at which it counts as hanging: it is logged, and another thread reads in place of its thread."""

HUNG_S = 45.0
"""Age of a read at which those who wait for it are sent away, to come again: sooner than they are taken for stuck."""

QUICK_S = 100e-6
"""If reads take less than this on average, and mostly of a processor's time, they come from memory, and further threads
would only wait for the interpreter's lock: eight on two cores read small files from the page cache at 0.4 times the
pace of one.
"""

REMEMBERED = 0.98
"""What was measured of earlier chunks counts this much less with each further one."""

ENOUGH_READS = 128
"""Nothing is concluded from fewer."""

FIRST_PAUSE, LONGEST_PAUSE = 1 << 12, 1 << 20
"""After so many reads one thread reads alone again by way of trial, once it turned out that several are faster."""

STUCK_S = 0.1
"""While a read is older than this, one thread is not enough, whatever reads took before."""

SPARE_THREADS = 32
"""So many threads whose reads hang have others in their place. Each holds the memory that it reads into, of up to a
block. Further ones count as working again: when all do, nothing more is read here until one comes back.
"""


class Read(NamedTuple):
    """A sample that is being read, and since when, on the pool's clock; ``again``: storage did not give it before."""

    since: float
    sample_id: int
    again: bool = False


class Effort:
    """Learns from what reads took lately whether one thread alone would read as fast as several.

    Beside others a thread waits for the interpreter's lock, and that cannot be told from waiting for storage. So one
    thread reads alone by way of trial where all of them together are about as busy as one can be; if it waits for
    storage then, the next trial comes after twice as many reads.
    """

    def __init__(self) -> None:
        self._reads = self._seconds = self._cpu_s = 0.0
        self._until_trial, self._pause = 0, FIRST_PAUSE
        self.one_is_enough = False

    def add(self, reads: int, seconds: float, cpu_s: float, threads: int) -> None:
        """Take in a chunk, and the time that its thread needed for it while so many threads read.

        Args:
            reads: how many.
            seconds: from beginning to end.
            cpu_s: of a processor's time.
            threads: that read, this one among them.
        """
        self._reads = REMEMBERED * self._reads + reads
        self._seconds = REMEMBERED * self._seconds + seconds / threads
        self._cpu_s = REMEMBERED * self._cpu_s + cpu_s
        self._until_trial -= reads
        is_quick = self._seconds < QUICK_S * self._reads and 2 * self._cpu_s > self._seconds
        if self.one_is_enough and not is_quick:
            self.one_is_enough, self._until_trial = False, self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif is_quick and self._reads >= ENOUGH_READS and self._until_trial <= 0:
            self.one_is_enough = True


class Hanging(NamedTuple):
    """How many reads hang, and how many of these, at most `SPARE_THREADS`, have another thread in their place."""

    reads: int
    replaced: int

    @classmethod
    def among(cls, reads: Iterable[Read], now: float) -> Hanging:
        """Count the reads that hang."""
        late = sum(now - read.since >= LATE_S for read in reads)
        return cls(late, min(late, SPARE_THREADS))


@dataclass(eq=False)
class _Job:
    """Samples of a load that are to be read once, by several threads. Whoever changes it has the pool's lock.

    Attributes:
        load, slab: where the samples go.
        indices: of the samples, within the load.
        size: how many of them one thread reads in one go, a chunk.
        urgent: somebody waits for them.
        again: storage did not give them when it was first asked.
        begun: how many of ``indices`` threads have taken.
        reading: chunks that threads are reading.
        errors: index -> why that sample could not be read.
        done: gets ``errors`` when all are read; cancelled, no further chunk is taken.
    """

    load: Load
    slab: NDArray[np.uint8]
    indices: list[int]
    size: int
    urgent: bool
    again: bool
    begun: int = 0
    reading: int = 0
    errors: dict[int, BadSampleError] = field(default_factory=dict)
    done: Future[dict[int, BadSampleError]] = field(default_factory=Future)

    @property
    def chunks_left(self) -> int:
        """How many chunks no thread has taken."""
        return 0 if self.done.done() else -(-(len(self.indices) - self.begun) // self.size)

    def take(self) -> list[int]:
        """Take the next chunk."""
        start, self.begun = self.begun, min(self.begun + self.size, len(self.indices))
        self.reading += 1
        return self.indices[start : self.begun]

    def put_down(self, outcome: dict[int, BadSampleError] | Exception) -> None:
        """Take in what came of a chunk; an error that is no sample's ends the job."""
        self.reading -= 1
        if isinstance(outcome, Exception):
            self.begun = len(self.indices)
            if not self.done.done() and self.done.set_running_or_notify_cancel():
                self.done.set_exception(outcome)
            return
        self.errors |= outcome
        self.end_if_read()

    def end_if_read(self) -> None:
        """Hand out the errors if all samples are read, and somebody still wants to know."""
        is_read = self.begun == len(self.indices) and not self.reading
        if is_read and not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_result(self.errors)


class ReadPool:
    """Threads that fill slabs; what somebody waits for goes before what is read ahead.

    A sample that storage did not give is asked for again after a pause, in which no thread waits. An attempt may hang,
    though: so what is asked for again has at most half of the threads. A thread whose read hangs, as with a server of
    files that is gone, cannot be ended; another one reads in its place, so that what lies elsewhere is read meanwhile.
    What comes from memory, such as small files of the page cache, is read by one thread.

    Args:
        reader: called from all threads at once.
        threads: at least 1; more than cores are right for storage that answers late.
        meter: counts every read.
        storage_s: how long a sample is asked for again before it counts as bad.
        clock, sleep: monotonic seconds; a pause in the event loop.

    Raises:
        ConfigError: no threads, or more than `MOST_FETCH_THREADS`.
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
        self._reader = reader
        self._meter = meter
        self.troubles = Troubles(storage_s, random.random)
        self._clock, self._sleep = clock, sleep
        # As large as it may ever become: it starts threads only when there is work for them, and cannot be resized.
        self._executor = ThreadPoolExecutor(MOST_FETCH_THREADS + SPARE_THREADS, thread_name_prefix="mbaas-read")
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []  # with chunks that no thread has taken, oldest first
        self._reads: dict[int, Read] = {}  # by thread, each of which writes its own entry only and so needs no lock
        self._effort = Effort()
        self._asking_again = 0  # of those, threads with a chunk that storage did not give before
        # Threads that take chunks: `_most()` as long as there are any, more only until they have read those in hand.
        self._working = 0
        self._closed = False
        self.set_threads(threads)

    @property
    def threads(self) -> int:
        """How many read at once."""
        return self._width

    def set_threads(self, threads: int) -> None:
        """Read with ``threads`` threads from now on; those that are too many end after the chunk they are reading.

        Raises:
            ConfigError: no threads, or more than `MOST_FETCH_THREADS`.
        """
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        if threads > MOST_FETCH_THREADS:
            raise ConfigError(f"threads must be at most {MOST_FETCH_THREADS}, got {threads}")
        with self._lock:
            self._width = threads
            self._start_threads()

    async def fill(
        self, load: Load, slab: NDArray[np.uint8], *, urgent: bool, rows: NDArray[np.intp] | None = None
    ) -> dict[int, str]:
        """Read samples of `load` into `slab`, uint8[load.nbytes]: those with index `rows`, or all.

        When cancelled, chunks that no thread has begun are not read; the others go on writing into `slab`.

        Returns:
            Index within the load -> why that sample could not be read; a `PassingReason` where storage did not give it
            for longer than it is waited for here, and may give it later.
        """
        indices = list(range(len(load.rows))) if rows is None else rows.tolist()
        # A slab that is awaited should be read by all threads at once, however few samples it has.
        size = max(1, min(CHUNK_SAMPLES, -(-len(indices) // self._width)))
        failures = await self._read_all(load, slab, indices, size=size, urgent=urgent, again=False)
        while passing := [i for i, reason in failures.items() if isinstance(reason, PassingReason)]:
            ids = load.sample_ids[passing].tolist()
            if not self.troubles.are_new(ids):
                break
            await self._sleep(self.troubles.pause_s(ids, self._clock()))
            for i in passing:
                del failures[i]
            # One by one: each may take as long as storage takes to err, and must not hold up the others of a chunk.
            failures |= await self._read_all(load, slab, passing, size=1, urgent=urgent, again=True)
        return failures

    async def ask_again(self, sample_ids: Ids, lengths: NDArray[np.int64]) -> None:
        """Look whether storage gives samples now that are in trouble, and note it in `troubles`.

        A fetch that needs them would else read everything that goes with them, again and again.
        """
        load = Load(0, None, None, None, np.arange(len(sample_ids)), sample_ids, lengths)
        scratch = np.empty(load.nbytes, np.uint8)
        await self._read_all(load, scratch, list(range(len(sample_ids))), size=1, urgent=True, again=True)

    async def _read_all(
        self, load: Load, slab: NDArray[np.uint8], indices: list[int], *, size: int, urgent: bool, again: bool
    ) -> dict[int, str]:
        """Read samples once, in chunks of ``size``, and return why those that failed did."""
        job = _Job(load, slab, indices, size, urgent, again)
        with self._lock:
            job.end_if_read()  # there may be nothing to read
            self._jobs.append(job)
            self._start_threads()
        errors = await asyncio.wrap_future(job.done)
        failures, resolved, now = {}, [], self._clock()
        for i, sample_id in zip(indices, load.sample_ids[indices].tolist(), strict=True):
            error = errors.get(i)
            if isinstance(error, StorageError):
                failures[i] = self.troubles.failed(sample_id, error, now)
                continue
            resolved.append(sample_id)
            if error is not None:
                failures[i] = error.reason
        self.troubles.resolved(resolved)
        return failures

    def hurry(self, slabs: Collection[int]) -> None:
        """Read these slabs before others: somebody waits for them now."""
        with self._lock:
            for job in self._jobs:
                job.urgent |= job.load.slab in slabs

    def replace_hanging(self) -> Hanging:
        """Have other threads read in place of those whose reads hang by now; return how many these are."""
        with self._lock:
            self._start_threads()
        return self._hanging()

    def oldest(self) -> Read | None:
        """Tell which read has been in progress for the longest time."""
        # Of a copy, which is one step of the interpreter: threads come and go meanwhile.
        return min(self._reads.copy().values(), default=None)

    def hung(self, sample_ids: Collection[int], now: float) -> dict[int, str]:
        """Find which of the samples a thread has been reading for `HUNG_S`: id -> that."""
        late = {read.sample_id: now - read.since for read in self._reads.copy().values() if now - read.since > HUNG_S}
        said = "storage has not answered for"
        return {i: PassingReason(f"{said} {units.seconds(late[i])}") for i in sample_ids if i in late}

    def close(self) -> None:
        """End the threads, each after the chunk it is reading."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=True)

    def _start_threads(self) -> None:
        """Put as many more threads to work as there is work for; the caller has the lock."""
        free = 0 if self._closed else self._most() - self._working
        if free <= 0:
            return
        for _ in range(min(free, sum(job.chunks_left for job in self._jobs))):
            self._working += 1
            self._executor.submit(self._work)

    def _most(self) -> int:
        """Return how many threads may take chunks."""
        return (1 if self._one_is_enough() else self._width) + self._hanging().replaced

    def _one_is_enough(self) -> bool:
        if not self._effort.one_is_enough:
            return False
        oldest = self.oldest()
        return oldest is None or self._clock() - oldest.since < STUCK_S

    def _hanging(self) -> Hanging:
        return Hanging.among(self._reads.copy().values(), self._clock())

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            job, chunk = taken
            outcome: dict[int, BadSampleError] | Exception
            wall, cpu, threads = time.perf_counter(), time.thread_time(), self._working
            try:
                outcome = self._read(job, chunk)
            except Exception as error:  # whatever it is, it is told to who waits, and the thread goes on
                outcome = error
            self._reads.pop(threading.get_ident(), None)
            took = time.perf_counter() - wall, time.thread_time() - cpu
            with self._lock:
                self._asking_again -= job.again
                self._effort.add(len(chunk), *took, max(threads, self._working))
                self._start_threads()
                job.put_down(outcome)

    def _take(self) -> tuple[_Job, list[int]] | None:
        """Take the next chunk of a job; None ends the thread."""
        with self._lock:
            job = None if self._closed or self._working > self._most() else self._next()
            if job is None:
                self._working -= 1
                return None
            self._asking_again += job.again
            return job, job.take()

    def _next(self) -> _Job | None:
        """Choose the job to read for next; the caller has the lock."""
        self._jobs = [job for job in self._jobs if job.chunks_left]
        # What is passed over is not forgotten: each thread that is asking again looks here when it is done.
        all_again = any(job.again for job in self._jobs) and self._all_ask_again()
        able = [job for job in self._jobs if not (job.again and all_again)]
        return next((job for job in able if job.urgent), able[0] if able else None)

    def _all_ask_again(self) -> bool:
        """Whether as many threads ask again as may."""
        hanging = Hanging.among((read for read in self._reads.copy().values() if read.again), self._clock())
        return self._asking_again - hanging.replaced >= max(1, self._width // 2)

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
                    # Sample by sample: the tuner looks at these sums while a chunk is being read.
                    self._meter.storage.moved(length)
                except BadSampleError as error:
                    failures[i] = error  # the others of the chunk are read all the same
        reads = len(chunk)
        self._meter.count(load.epoch, EpochCounts(reads=Amount(reads, nbytes), failures=len(failures)))
        return failures
