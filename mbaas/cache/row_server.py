"""Serves rows of prepared parts to ranks on other nodes that need only some of the rows.

Threads are divided among the ranks' queues in proportion to the work. A rank about to straggle gets as many as it needs
("Lobster", ICPP 2022), because in data-parallel training the slowest rank sets the pace for all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import ray
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.base import units
from mbaas.errors import ConfigError, shown
from mbaas.model.threads import divide_threads, straggler_threads
from mbaas.samples.fields import Arrays, Column, Packed
from mbaas.wire.blocks import ROW
from mbaas.wire.consumers import MOST_NAME

Ints: TypeAlias = NDArray[np.int64]

CHUNK_BYTES = 1 << 20
"""Bytes a thread copies before choosing its next queue: about 0.1 ms of work."""

TAU_S = 0.002
"""Lateness that a rank may have before it gets more threads than its share of the work."""

RATE_BYTES_PER_S = 2e9
"""Copy rate of one thread until it is measured."""

MOST_LEFT_S = 1e9
"""Longest accepted time until a rank needs its rows: 30 years, for a trial paused in a debugger."""

FRESH = 0.1
"""Weight of the newest copy in the measured rate."""


MOST_PARTS = 10_000
"""Maximum number of block parts in one call."""


def check_pick(rank: object, part_refs: object, rows: object, bad_rows: object, left_s: object, *, most: int) -> None:
    """Validate the arguments of `RowPool.pick`, which come from another program. Raises `ConfigError`.

    Ranks share threads and queues, so a single due time of NaN would spoil the plan for all ranks. ``most`` is the
    number of rows of a block.
    """
    if not isinstance(rank, str) or not 0 < len(rank) <= MOST_NAME:
        raise ConfigError(f"rank must be text of 1 to {MOST_NAME} characters, got {shown(rank)}")
    if not isinstance(part_refs, list) or not 0 < len(part_refs) <= MOST_PARTS:
        raise ConfigError(f"part_refs must be a list of 1 to {MOST_PARTS} references, got {shown(part_refs)}")
    for ref in part_refs:
        if not isinstance(ref, ray.ObjectRef):
            raise ConfigError(f"part_refs must hold references to parts of a block, got {shown(ref)}")
    _check_rows("rows", rows, most)
    _check_rows("bad_rows", bad_rows, most)
    if isinstance(left_s, bool) or not isinstance(left_s, (int, float)):
        raise ConfigError(f"left_s must be a number, got {shown(left_s)}")
    if not 0 <= left_s <= MOST_LEFT_S:  # false for NaN, too
        raise ConfigError(f"left_s must be 0 to {units.exact(MOST_LEFT_S)}, got {shown(left_s)}")


def _check_rows(name: str, rows: object, most: int) -> None:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.ndim != 1:
        raise ConfigError(f"{name} must be an array int64[k], got {_kind(rows)}")
    if not len(rows):
        return
    if int(rows.min()) < 0 or int(rows.max()) >= most:
        raise ConfigError(f"{name} must be in [0, {most - 1}], got {int(rows.min())} to {int(rows.max())}")
    steps = np.diff(rows)
    if len(rows) > 1 and int(steps.min()) <= 0:
        at = int(steps.argmin())
        raise ConfigError(f"{name} must be ascending, got {int(rows[at])} before {int(rows[at + 1])}")


def _kind(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else shown(value)


def part_rows(part: Arrays, bad_rows: Ints) -> Ints:
    """Return the rows of the block that a part contains, ascending: int64[n]. A whole block has no `ROW` column."""
    if ROW in part:
        return part[ROW]
    return np.delete(np.arange(len(part["sample_id"]) + len(bad_rows), dtype=np.int64), bad_rows)


class Queue(Struct, frozen=True):
    """Work that a rank waits for."""

    work_s: float  # seconds of work for one thread
    left_s: float  # seconds until the rank stalls; 0 or less if it is stalled

    def late_s(self, threads: int) -> float:
        """Predict the rank's lateness in seconds with ``threads`` threads; negative if it is in time."""
        return (self.work_s / threads if threads else self.work_s) - self.left_s


def plan_threads(total: int, queues: Sequence[Queue], *, tau_s: float = TAU_S) -> list[int]:
    """Divide threads among queues, in proportion to their work.

    If the latest queue would then be more than ``tau_s`` late, it gets as many as it needs, and the others share the
    rest, at least one each.
    """
    work = [queue.work_s for queue in queues]
    counts = divide_threads(total, lengths=work)
    waiting = [i for i, queue in enumerate(queues) if queue.work_s > 0]
    if len(waiting) < 2 or total <= len(waiting):
        return counts  # no other queue has a thread to spare
    worst = max(waiting, key=lambda i: queues[i].late_s(counts[i]))
    most = total - len(waiting) + 1  # at least one for each other queue
    if queues[worst].late_s(counts[worst]) <= tau_s or counts[worst] >= most:
        return counts
    found = straggler_threads(queues[worst].late_s, least=counts[worst], most=most, tau_s=tau_s)
    others = divide_threads(total - found, lengths=[0.0 if i == worst else work_s for i, work_s in enumerate(work)])
    others[worst] = found
    return others


@dataclass(eq=False)
class Chunk:
    """A unit of work for one thread, due when the rank would stall without it."""

    nbytes: int
    due: float
    copy: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


class RowQueues:
    """The ranks' queues and the chunks in progress, without threads or clock. ``plan`` divides the threads."""

    def __init__(self, threads: int, plan: Callable[[int, Sequence[Queue]], list[int]] = plan_threads) -> None:
        self._threads, self._plan = threads, plan
        self._waiting: dict[str, deque[Chunk]] = {}  # by rank, never empty
        self._at_work: dict[str, list[Chunk]] = {}  # by rank, never empty
        self.rate_bytes_per_s = RATE_BYTES_PER_S

    def put(self, rank: str, chunks: Sequence[Chunk]) -> None:
        self._waiting.setdefault(rank, deque()).extend(chunks)

    def take(self, now: float) -> tuple[str, Chunk]:
        """Take a waiting chunk from the queue furthest below its planned threads; ties go to the oldest queue."""
        # Planned again for each chunk, because ranks arrive and become more urgent meanwhile.
        ranks = list(dict.fromkeys((*self._at_work, *self._waiting)))
        counts = dict(zip(ranks, self._plan(self._threads, [self._queue(rank, now) for rank in ranks]), strict=True))
        rank = max(self._waiting, key=lambda rank: counts[rank] - len(self._at_work.get(rank, ())))
        chunk = self._waiting[rank].popleft()
        if not self._waiting[rank]:
            del self._waiting[rank]
        self._at_work.setdefault(rank, []).append(chunk)
        return rank, chunk

    def finish(self, rank: str, chunk: Chunk, took_s: float) -> None:
        """Record that a thread has finished its chunk."""
        self._at_work[rank].remove(chunk)
        if not self._at_work[rank]:
            del self._at_work[rank]
        if took_s > 0:  # otherwise the clock is too coarse for a rate
            self.rate_bytes_per_s += FRESH * (chunk.nbytes / took_s - self.rate_bytes_per_s)

    def _queue(self, rank: str, now: float) -> Queue:
        # Chunks in progress count in full; they are short.
        chunks = [*self._at_work.get(rank, ()), *self._waiting.get(rank, ())]
        work_s = sum(chunk.nbytes for chunk in chunks) / self.rate_bytes_per_s
        return Queue(work_s, min(chunk.due for chunk in chunks) - now)


class RowPool:
    """A node's threads that copy rows out of parts."""

    def __init__(self, *, threads: int, queues: RowQueues | None = None) -> None:
        self._queues = RowQueues(threads) if queues is None else queues
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mbaas-rows")

    async def pick(
        self, rank: str, parts: Sequence[Arrays], rows: Ints, bad_rows: Ints, *, left_s: float
    ) -> list[Arrays]:
        """Copy the rows in ``rows`` (int64[k], ascending) out of each part of a block, into smaller parts with new
        arrays.

        ``bad_rows`` were left out when the block was prepared. Each ``rank`` has its own queue, and stalls in
        ``left_s`` seconds without these rows.
        """
        due, chunks, picked = time.monotonic() + left_s, [], []
        for part in parts:
            has = part_rows(part, bad_rows)
            entries = np.flatnonzero(np.isin(has, rows, assume_unique=True))
            columns = {name: column for name, column in part.items() if name != ROW}
            out = {name: _room(column, entries) for name, column in columns.items()}
            chunks += _chunks(columns, entries, out, due)
            picked.append({**out, ROW: has[entries]})
        await self.run(rank, chunks)
        return picked

    async def run(self, rank: str, chunks: Sequence[Chunk]) -> None:
        if chunks:
            with self._lock:
                self._queues.put(rank, chunks)
            # One call per chunk; which chunk it takes, from any rank, is decided when a thread is free.
            for _ in chunks:
                self._threads.submit(self._work)
            await asyncio.gather(*(asyncio.wrap_future(chunk.done) for chunk in chunks))

    def close(self) -> None:
        """End the threads after their current chunks."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        with self._lock:
            rank, chunk = self._queues.take(time.monotonic())
        began = time.perf_counter()
        try:
            chunk.copy()
        except Exception as error:  # passed to the waiting caller
            _resolve(chunk.done, error)
        else:
            _resolve(chunk.done, None)
        finally:
            with self._lock:
                self._queues.finish(rank, chunk, time.perf_counter() - began)


def _resolve(done: Future[None], error: Exception | None) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error) if error is not None else done.set_result(None)


def _room(column: Column, entries: NDArray[np.intp]) -> Column:
    if isinstance(column, Packed):
        return column.like(entries)
    return np.empty((len(entries), *column.shape[1:]), column.dtype)


def _chunks(part: Arrays, entries: NDArray[np.intp], out: Arrays, due: float) -> list[Chunk]:
    row_bytes = sum(column.nbytes for column in out.values()) // max(len(entries), 1)  # the mean, for packed columns
    size = max(1, CHUNK_BYTES // max(row_bytes, 1))
    starts = range(0, len(entries), size)
    return [Chunk(len(entries[i : i + size]) * row_bytes, due, _copy(part, entries, out, i, i + size)) for i in starts]


def _copy(part: Arrays, entries: NDArray[np.intp], out: Arrays, start: int, stop: int) -> Callable[[], None]:
    def copy() -> None:
        for name, column in out.items():
            if isinstance(column, Packed):
                part[name].copy_rows(entries[start:stop], column, np.arange(start, min(stop, len(entries))))
            else:
                # "clip", because the default mode copies through an internal buffer.
                np.take(part[name], entries[start:stop], axis=0, out=column[start:stop], mode="clip")

    return copy
