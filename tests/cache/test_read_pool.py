"""Reading threads keep their order, survive failures and hanging reads, and end on request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mbaas.cache import read_pool
from mbaas.cache.read_pool import (
    CHUNK_SAMPLES,
    FIRST_PAUSE,
    HOLD_S,
    LATE_S,
    SPARE_THREADS,
    STUCK_S,
    Effort,
    HangingReads,
    Read,
    ReadPool,
)
from mbaas.cache.slab import Load, TemporaryReason
from mbaas.cache.stats import RECENT_EPOCHS, EpochCounts, Meter, TierMeter
from mbaas.dataset import SampleReader
from mbaas.errors import BadSampleError, StorageError
from mbaas.samples.placement import PartRequest
from mbaas.wire.samples import Amount, FetchCounts

DEADLINE_S = 20.0


class Storage(SampleReader):
    """Storage that returns each sample's id as its bytes; reads wait while the gate is closed.

    Samples in ``away`` fail that many times first; samples in ``stuck`` wait for their own event.
    """

    def __init__(self) -> None:
        self.away: dict[int, int] = {}
        self.stuck: dict[int, threading.Event] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.order: list[int] = []
        self.threads: set[str] = set()
        self.spans: list[tuple[float, float]] = []

    def read_into(self, sample_id: int, buffer: Any) -> None:
        self.order.append(sample_id)
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        begun_s = time.monotonic()
        assert self.gate.wait(DEADLINE_S)
        assert sample_id not in self.stuck or self.stuck[sample_id].wait(DEADLINE_S)
        if sample_id == 13:
            raise BadSampleError("file:13", "unlucky")
        if sample_id == 99:
            raise TypeError("a bug")
        if self.away.get(sample_id):
            self.away[sample_id] -= 1
            raise StorageError(f"file:{sample_id}", "slow down")
        buffer[:] = sample_id
        self.spans.append((begun_s, time.monotonic()))

    def wait_for(self, reads: int) -> None:
        for _ in range(reads):
            assert self.begun.acquire(timeout=DEADLINE_S)


def load_of(*ids: int, slab: int = 1, epoch: int = 0, length: int = 3) -> Load:
    lengths = np.full(len(ids), length, dtype=np.int64)
    rows = np.arange(len(ids))
    return Load(slab, PartRequest(0), epoch, None, rows, np.array(ids), lengths)


def empty(load: Load) -> np.ndarray:
    return np.zeros(load.nbytes, dtype=np.uint8)


@contextmanager
def pool_of(threads: int, **options: Any) -> Iterator[tuple[ReadPool, Storage, Meter]]:
    storage, meter = Storage(), Meter()
    pool = ReadPool(storage, threads=threads, meter=meter, **options)
    try:
        yield pool, storage, meter
    finally:
        for event in (storage.gate, *storage.stuck.values()):
            event.set()
        pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("mbaas-read")]


def run(task: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(task, DEADLINE_S))


def test_each_sample_lands_at_its_offset_and_failures_are_named() -> None:
    async def scenario() -> None:
        load = load_of(*range(5, 60))
        slab = empty(load)
        assert await pool.fill(load, slab, urgent=True) == {8: "unlucky"}
        good = [i for i in range(55) if i != 8]
        assert slab.reshape(55, 3)[good].tolist() == [[5 + i] * 3 for i in good]

    with pool_of(3) as (pool, storage, meter):
        run(scenario())
        assert len(storage.threads) <= 3
    assert meter.epochs == {0: EpochCounts(reads=Amount(55, 54 * 3), failures=1)}


def test_what_somebody_waits_for_overtakes_what_is_read_ahead() -> None:
    """One thread reads the first chunk and 3 more wait. Then an urgent load arrives, and one load hurries."""

    async def scenario() -> None:
        first, ahead, urgent = load_of(0), [load_of(i, slab=-i) for i in (1, 2, 3)], load_of(7, slab=7)
        storage.gate.clear()
        fills = [asyncio.create_task(pool.fill(x, empty(x), urgent=False)) for x in (first, *ahead)]
        await asyncio.sleep(0)
        await asyncio.to_thread(storage.wait_for, 1)
        fills.append(asyncio.create_task(pool.fill(urgent, empty(urgent), urgent=True)))
        await asyncio.sleep(0)
        pool.mark_urgent({-3})
        storage.gate.set()
        await asyncio.gather(*fills)

    with pool_of(1) as (pool, storage, _):
        run(scenario())
        assert storage.order == [0, 3, 7, 1, 2]


def test_a_cancelled_load_is_not_read_any_further() -> None:
    async def scenario() -> None:
        many, one = load_of(*range(40, 40 + 2 * CHUNK_SAMPLES)), load_of(1)
        storage.gate.clear()
        fill = asyncio.create_task(pool.fill(many, empty(many), urgent=False))
        await asyncio.sleep(0)
        await asyncio.to_thread(storage.wait_for, 1)
        fill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fill
        storage.gate.set()
        assert await pool.fill(one, empty(one), urgent=False) == {}

    with pool_of(1) as (pool, storage, _):
        run(scenario())
        assert storage.order == [*range(40, 40 + CHUNK_SAMPLES), 1]


def test_threads_read_at_the_same_time() -> None:
    async def scenario() -> None:
        load = load_of(1, 2, 3, 4)
        storage.gate.clear()
        fill = asyncio.create_task(pool.fill(load, empty(load), urgent=True))
        await asyncio.sleep(0)
        await asyncio.to_thread(storage.wait_for, 4)  # all four are inside a read before any ends
        storage.gate.set()
        await fill

    with pool_of(4) as (pool, storage, meter):
        run(scenario())
        use = meter.storage.sums()
        assert 0 < use.busy_s <= use.thread_s


def test_an_error_that_is_not_the_samples_own_comes_through() -> None:
    async def scenario() -> None:
        with pytest.raises(TypeError, match="a bug"):
            await pool.fill(load_of(99), empty(load_of(99)), urgent=True)

    with pool_of(2) as (pool, _, __):
        run(scenario())


def test_the_oldest_read_in_progress_is_known() -> None:
    async def scenario() -> None:
        assert pool.oldest() is None
        storage.gate.clear()
        fills = []
        for number in (4, 5):
            load = load_of(number, slab=number)
            fills.append(asyncio.create_task(pool.fill(load, empty(load), urgent=True)))
            await asyncio.sleep(0)
            await asyncio.to_thread(storage.wait_for, 1)
        oldest = pool.oldest()
        assert oldest is not None
        assert oldest.sample_id == 4
        assert began <= oldest.since <= time.monotonic()
        storage.gate.set()
        await asyncio.gather(*fills)

    began = time.monotonic()
    with pool_of(2) as (pool, storage, _):
        run(scenario())
        deadline = time.monotonic() + DEADLINE_S
        while pool.oldest() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pool.oldest() is None


@pytest.mark.parametrize(
    ("seconds", "cpu_s", "threads", "is_enough"),
    [
        (15e-6, 14e-6, 1, True),
        (240e-6, 40e-6, 8, True),
        (15e-6, 14e-6, 8, True),
        (5e-3, 14e-6, 8, False),
        (100e-6, 14e-6, 1, False),
        (2e-3, 1e-3, 8, False),
    ],
    ids=[
        "files in memory, one thread",
        "eight wait for each other",
        "seven have just come",
        "a disk",
        "a fast disk, one thread",
        "connections that are encrypted",
    ],
)
def test_reads_from_memory_are_known_by_their_time_and_whose_it_is(
    seconds: float, cpu_s: float, threads: int, is_enough: bool
) -> None:
    effort = Effort()
    assert not effort.one_is_enough
    for _ in range(20):
        effort.add(16, 16 * seconds, 16 * cpu_s, threads)
    assert effort.one_is_enough == is_enough


def test_one_chunk_that_waits_for_storage_is_enough_to_read_with_all_threads_again() -> None:
    effort = Effort()
    for _ in range(20):
        effort.add(16, 16 * 15e-6, 16 * 14e-6, 1)
    assert effort.one_is_enough
    effort.add(16, 16 * 5e-3, 16 * 14e-6, 1)
    assert not effort.one_is_enough


def test_what_several_threads_read_faster_is_seldom_tried_with_one() -> None:
    """A disk with 100 us latency keeps eight dedicated threads as busy as a single one."""
    effort, trials = Effort(), []
    for chunk in range(10_000):
        alone = effort.one_is_enough
        effort.add(16, 16 * (100e-6 if alone else 120e-6), 16 * 14e-6, 1 if alone else 8)
        if effort.one_is_enough and not alone:
            trials.append(16 * chunk)
    assert len(trials) == 6
    assert all(later - earlier >= FIRST_PAUSE << number for number, (earlier, later) in enumerate(pairwise(trials)))


def test_one_thread_reads_what_comes_from_memory_and_others_help_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(Effort, "add", lambda self, *_: setattr(self, "one_is_enough", True))
        await read(range(200, 232))
        storage.threads.clear()
        await read(range(100, 100 + 9 * CHUNK_SAMPLES))
        assert len(storage.threads) == 1
        storage.stuck, storage.begun = {50: threading.Event()}, threading.Semaphore(0)
        (hung,) = await begin(pool, storage, 50)
        others = load_of(*range(20, 40))
        fill = asyncio.create_task(pool.fill(others, empty(others), urgent=True))
        await asyncio.sleep(0)
        assert storage.order[-1] == 50
        time_.now += 2 * STUCK_S
        pool.replace_hanging()
        assert await fill == {}, "it does not wait for the one that hangs"
        storage.stuck[50].set()
        assert await hung == {}

    async def read(ids: range) -> None:
        load = load_of(*ids)
        assert await pool.fill(load, empty(load), urgent=True) == {}

    time_ = FakeTime()
    with pool_of(4, clock=time_.clock, sleep=time_.sleep) as (pool, storage, _):
        run(scenario())


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """Largest number of simultaneous reads, given their beginnings and ends."""
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


def test_a_tier_is_measured_up_to_now_also_in_the_middle_of_a_read() -> None:
    """The thread time of two threads adds up, their busy time does not."""
    tier = TierMeter()
    with tier.using(), tier.using():
        tier.moved(30)
        early = tier.sums()
        later = tier.sums()
    done = tier.sums()
    assert early.nbytes == done.nbytes == 30
    assert 0 < early.busy_s < early.thread_s <= later.thread_s <= done.thread_s <= 2 * done.busy_s
    assert tier.sums() == done, "no use is in progress"
    assert (done - early).nbytes == 0


def test_the_meter_counts_from_many_threads_and_keeps_the_newest_epochs() -> None:
    meter = Meter()
    with ThreadPoolExecutor(4) as threads:
        for epoch in range(RECENT_EPOCHS + 5):
            for _ in range(8):
                threads.submit(meter.count, epoch, EpochCounts(FetchCounts(local=Amount(2)), Amount(1)))
    assert set(meter.epochs) == set(range(5, RECENT_EPOCHS + 5))
    assert meter.epochs[5] == EpochCounts(FetchCounts(local=Amount(16)), Amount(8))
    assert meter.total.fetched.local.samples == 16 * (RECENT_EPOCHS + 5)


# ---- storage that does not return a sample ----


class FakeTime:
    """A clock that only pauses advance."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now += pause_s
        await asyncio.sleep(0)


def test_a_sample_that_storage_does_not_give_is_asked_for_again_alone() -> None:
    async def scenario() -> None:
        load = load_of(*range(20, 40))
        slab = empty(load)
        assert await pool.fill(load, slab, urgent=True) == {}
        assert slab.reshape(20, 3)[:, 0].tolist() == list(range(20, 40))
        assert pool.retries.failing(range(50)) == {}

    time_ = FakeTime()
    with pool_of(2, clock=time_.clock, sleep=time_.sleep) as (pool, storage, _):
        storage.away = {25: 2, 30: 1}
        run(scenario())
        assert sorted(storage.order[20:]) == [25, 25, 30]
        assert len(time_.pauses) == 2


def test_a_sample_that_is_away_for_longer_is_not_waited_for_and_nobody_calls_it_bad() -> None:
    async def scenario() -> None:
        load = load_of(24, 25)
        slab = empty(load)
        failures = await pool.fill(load, slab, urgent=True)
        assert failures == {1: "slow down"}
        assert isinstance(failures[1], TemporaryReason)
        assert slab.tolist() == [24, 24, 24, 0, 0, 0], "the other was read"
        assert pool.retries.failing([24, 25]) == {25: "slow down"}
        storage.away.clear()
        await pool.retry(np.array([25]), np.array([3]))
        assert pool.retries.failing([24, 25]) == {}

    time_ = FakeTime()
    with pool_of(2, clock=time_.clock, sleep=time_.sleep) as (pool, storage, _):
        storage.away = {25: 1_000}
        run(scenario())
        assert 0 < time_.now - 100.0 < HOLD_S


def test_a_sample_that_stays_away_is_bad_when_the_patience_is_over_and_says_why() -> None:
    async def scenario() -> None:
        load = load_of(24, 25)
        reason: str = TemporaryReason()
        while isinstance(reason, TemporaryReason):
            (reason,) = (await pool.fill(load, empty(load), urgent=True)).values()
            time_.now += 1.0
        assert reason.startswith("slow down (")
        assert 10 <= time_.now - 100.0 <= 13

    time_ = FakeTime()
    with pool_of(2, clock=time_.clock, sleep=time_.sleep, storage_s=10.0) as (pool, storage, _):
        storage.away = {25: 1_000}
        run(scenario())


def test_attempts_that_hang_leave_half_of_the_threads_to_the_others() -> None:
    """Four threads, and six samples that hang on retry: two threads remain for new reads."""

    async def scenario() -> None:
        storage.gate.clear()
        again = asyncio.create_task(pool.retry(np.arange(40, 46), np.full(6, 3)))
        await asyncio.sleep(0)
        await asyncio.to_thread(storage.wait_for, 2)
        others = load_of(1, 2)
        fill = asyncio.create_task(pool.fill(others, empty(others), urgent=False))
        await asyncio.sleep(0)
        await asyncio.to_thread(storage.wait_for, 2)
        assert sorted(storage.order[2:]) == [1, 2]
        storage.gate.set()
        assert await fill == {}
        await again
        assert sorted(storage.order) == [1, 2, *range(40, 46)]

    with pool_of(4) as (pool, storage, _):
        run(scenario())


def test_a_sample_that_was_given_up_alone_is_bad_for_the_load_that_needs_it() -> None:
    """As in a cache node: after a refusal, retry the sample alone until it is given up, then the load."""

    async def scenario() -> None:
        load = load_of(24, 25)
        assert isinstance((await pool.fill(load, empty(load), urgent=True))[1], TemporaryReason)
        while pool.retries.failing([25]):
            time_.now += pool.retries.pause_s([25], time_.now)
            await pool.retry(np.array([25]), np.array([3]))
        failures = await pool.fill(load, empty(load), urgent=True)
        assert not isinstance(failures[1], TemporaryReason)
        assert failures[1].endswith("attempts in 10 s)")

    time_ = FakeTime()
    with pool_of(2, clock=time_.clock, sleep=time_.sleep, storage_s=10.0) as (pool, storage, _):
        storage.away = {25: 1_000}
        run(scenario())


# ---- reads that hang ----


@pytest.mark.parametrize(
    ("ages_s", "hanging"),
    [
        ([], HangingReads(0, 0)),
        ([0.0, LATE_S - 0.1], HangingReads(0, 0)),
        ([LATE_S, 1e6, 3.0], HangingReads(2, 2)),
        ([LATE_S] * SPARE_THREADS, HangingReads(SPARE_THREADS, SPARE_THREADS)),
        ([LATE_S] * (SPARE_THREADS + 7), HangingReads(SPARE_THREADS + 7, SPARE_THREADS)),
    ],
)
def test_a_read_hangs_from_the_time_on_at_which_it_is_logged_and_so_many_are_replaced(
    ages_s: list[float], hanging: HangingReads
) -> None:
    assert HangingReads.of([Read(500.0 - age_s, 7) for age_s in ages_s], 500.0) == hanging


async def begin(pool: ReadPool, storage: Storage, *ids: int) -> list[asyncio.Task[dict[int, str]]]:
    """Read each sample as a separate load, and wait until all reads have begun."""
    loads = [load_of(i, slab=i) for i in ids]
    fills = [asyncio.create_task(pool.fill(load, empty(load), urgent=True)) for load in loads]
    await asyncio.sleep(0)
    await asyncio.to_thread(storage.wait_for, len(ids))
    return fills


def test_reads_that_hang_keep_nothing_else_from_being_read() -> None:
    """Two threads, and two samples that never arrive. Others are read once these reads count as hanging."""

    async def scenario() -> None:
        storage.stuck = {i: threading.Event() for i in (50, 51)}
        hung = await begin(pool, storage, 50, 51)
        others = load_of(*range(20, 40))
        fill = asyncio.create_task(pool.fill(others, empty(others), urgent=False))
        await asyncio.sleep(0)
        time_.now += LATE_S - 1
        assert pool.replace_hanging() == HangingReads(0, 0)
        assert storage.order == [50, 51], "both threads are taken"
        time_.now += 1
        assert pool.replace_hanging() == HangingReads(2, 2)
        assert await fill == {}
        for event in storage.stuck.values():
            event.set()
        assert [await each for each in hung] == [{}, {}], "late reads succeed"
        many = load_of(*range(100, 180))
        assert await pool.fill(many, empty(many), urgent=True) == {}
        assert most_at_once(storage.spans[-80:]) <= 2, "no thread hangs any more, and none is replaced"
        assert pool.threads == 2

    time_ = FakeTime()
    with pool_of(2, clock=time_.clock, sleep=time_.sleep) as (pool, storage, _):
        run(scenario())


def test_when_all_threads_and_all_that_may_replace_them_hang_nothing_is_read_until_one_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread, and at most one replacement."""
    monkeypatch.setattr(read_pool, "SPARE_THREADS", 1)

    async def scenario() -> None:
        storage.stuck = {i: threading.Event() for i in (50, 51)}
        first = await begin(pool, storage, 50)
        time_.now += LATE_S
        second = await begin(pool, storage, 51)
        time_.now += LATE_S
        assert pool.replace_hanging() == HangingReads(2, 1)
        other = load_of(3)
        fill = asyncio.create_task(pool.fill(other, empty(other), urgent=True))
        await asyncio.sleep(0)
        assert pool.replace_hanging() == HangingReads(2, 1)
        assert storage.order == [50, 51]
        storage.stuck[51].set()
        assert await fill == {}
        storage.stuck[50].set()
        await asyncio.gather(*first, *second)

    time_ = FakeTime()
    with pool_of(1, clock=time_.clock, sleep=time_.sleep) as (pool, storage, _):
        run(scenario())


def test_attempts_that_hang_do_not_keep_what_storage_did_not_give_from_being_asked_for_again() -> None:
    """There are two threads, and one may retry. Another sample is retried once the first attempt counts as hanging."""

    async def scenario() -> None:
        storage.stuck = {50: threading.Event()}
        hung = asyncio.create_task(pool.retry(np.array([50]), np.array([3])))
        await asyncio.sleep(0)
        await asyncio.to_thread(storage.wait_for, 1)
        again = asyncio.create_task(pool.retry(np.array([40]), np.array([3])))
        assert await pool.fill(load_of(3), empty(load_of(3)), urgent=True) == {}
        assert storage.order == [50, 3]
        time_.now += LATE_S
        pool.replace_hanging()
        await again
        storage.stuck[50].set()
        await hung
        assert storage.order == [50, 3, 40]

    time_ = FakeTime()
    with pool_of(2, clock=time_.clock, sleep=time_.sleep) as (pool, storage, _):
        run(scenario())
