"""Rows of prepared parts, for ranks on other nodes that need a few of them: threads, and who gets them.

Every rank has a queue. The threads of the node go to the queues in proportion to the work that waits in them, except
that a rank which is about to straggle gets as many as it needs to be in time ("Lobster", ICPP 2022): in data-parallel
training the slowest rank sets the pace of all.
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

from mbaas import units
from mbaas.allocation.threads import divide_threads, straggler_threads
from mbaas.errors import ConfigError, shown
from mbaas.fields import Arrays, Column, Packed
from mbaas.messages import MOST_NAME, ROW

Ints: TypeAlias = NDArray[np.int64]

CHUNK_BYTES = 1 << 20
"""How much a thread copies before it looks again who needs it most: about a tenth of a millisecond of work."""

TAU_S = 0.002
"""How late a rank may be before it gets more threads than its work alone would give it."""

RATE_BYTES_PER_S = 2e9
"""Speed at which one thread copies, until it is measured."""

MOST_LEFT_S = 1e9
"""The longest that a rank may have until it needs rows: 30 years, for a trial that was held in a debugger."""

FRESH = 0.1
"""Weight of the newest copy in the rate, against those before it."""


MOST_PARTS = 10_000
"""Parts of a block that one call may ask rows of."""


def check_pick(rank: object, part_refs: object, rows: object, bad_rows: object, left_s: object, *, most: int) -> None:
    """Check what a rank asks for, which is a program of somebody else: see `RowPool.pick`.

    Ranks share the threads and the queues, and one due time that is no number would spoil the plan for all.

    Args:
        most: rows of a block.

    Raises:
        ConfigError: says which value cannot be, what it is and what it must be.
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
    """Tell which rows of the block a part has, ascending: int64[n].

    Args:
        part: with `ROW` unless it is the whole block.
        bad_rows: rows of the block that were left out.
    """
    if ROW in part:
        return part[ROW]
    return np.delete(np.arange(len(part["sample_id"]) + len(bad_rows), dtype=np.int64), bad_rows)


class Queue(Struct, frozen=True):
    """The work that a rank waits for.

    Attributes:
        work_s: seconds that one thread needs for it.
        left_s: seconds until the rank stands still without it; 0 or less if it does already.
    """

    work_s: float
    left_s: float

    def late_s(self, threads: int) -> float:
        """Predict how many seconds late it will be with ``threads`` threads; negative if it is in time."""
        return (self.work_s / threads if threads else self.work_s) - self.left_s


def plan_threads(total: int, queues: Sequence[Queue], *, tau_s: float = TAU_S) -> list[int]:
    """Decide how many threads each queue gets.

    In proportion to the work; if the one that will be the latest is then more than ``tau_s`` late, it gets as many as
    it needs, which leaves at least one for every other, and these share the rest.
    """
    work = [queue.work_s for queue in queues]
    counts = divide_threads(total, lengths=work)
    waiting = [i for i, queue in enumerate(queues) if queue.work_s > 0]
    if len(waiting) < 2 or total <= len(waiting):
        return counts  # there is nobody to take a thread from
    worst = max(waiting, key=lambda i: queues[i].late_s(counts[i]))
    most = total - len(waiting) + 1  # one is left for each of the others
    if queues[worst].late_s(counts[worst]) <= tau_s or counts[worst] >= most:
        return counts
    found = straggler_threads(queues[worst].late_s, least=counts[worst], most=most, tau_s=tau_s)
    others = divide_threads(total - found, lengths=[0.0 if i == worst else work_s for i, work_s in enumerate(work)])
    others[worst] = found
    return others


@dataclass(eq=False)
class Chunk:
    """A piece of work for one thread.

    Attributes:
        nbytes: to copy.
        due: when the rank stands still without it, on the clock of `RowQueues`' caller.
        copy: does it.
    """

    nbytes: int
    due: float
    copy: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


class RowQueues:
    """Queues of ranks, and the threads that are at work for each; without threads or clocks of its own.

    Args:
        threads: in all.
        plan: how many each queue gets; see `plan_threads`.

    Attributes:
        rate_bytes_per_s: of one thread, as measured.
    """

    def __init__(self, threads: int, plan: Callable[[int, Sequence[Queue]], list[int]] = plan_threads) -> None:
        self._threads, self._plan = threads, plan
        self._waiting: dict[str, deque[Chunk]] = {}  # by rank; none is empty
        self._at_work: dict[str, list[Chunk]] = {}  # by rank; none is empty
        self.rate_bytes_per_s = RATE_BYTES_PER_S

    def put(self, rank: str, chunks: Sequence[Chunk]) -> None:
        """Add chunks that a rank waits for."""
        self._waiting.setdefault(rank, deque()).extend(chunks)

    def take(self, now: float) -> tuple[str, Chunk]:
        """Take work for a thread that is free: of the queue that lacks most threads, the earlier one among equals.

        There must be a chunk that waits.
        """
        # Planned anew for each chunk: ranks come, and grow more urgent, while the last one is copied.
        ranks = list(dict.fromkeys((*self._at_work, *self._waiting)))
        counts = dict(zip(ranks, self._plan(self._threads, [self._queue(rank, now) for rank in ranks]), strict=True))
        rank = max(self._waiting, key=lambda rank: counts[rank] - len(self._at_work.get(rank, ())))
        chunk = self._waiting[rank].popleft()
        if not self._waiting[rank]:
            del self._waiting[rank]
        self._at_work.setdefault(rank, []).append(chunk)
        return rank, chunk

    def finish(self, rank: str, chunk: Chunk, took_s: float) -> None:
        """Note that a thread has done its chunk, and is free again."""
        self._at_work[rank].remove(chunk)
        if not self._at_work[rank]:
            del self._at_work[rank]
        if took_s > 0:  # else the clock was too coarse to tell a rate
            self.rate_bytes_per_s += FRESH * (chunk.nbytes / took_s - self.rate_bytes_per_s)

    def _queue(self, rank: str, now: float) -> Queue:
        # What is being copied counts as a whole, as if it had not begun: a chunk is short.
        chunks = [*self._at_work.get(rank, ()), *self._waiting.get(rank, ())]
        work_s = sum(chunk.nbytes for chunk in chunks) / self.rate_bytes_per_s
        return Queue(work_s, min(chunk.due for chunk in chunks) - now)


class RowPool:
    """The threads of a node that copy rows out of parts.

    Args:
        threads: at least 1.
        queues: who gets them; by default `RowQueues`.
    """

    def __init__(self, *, threads: int, queues: RowQueues | None = None) -> None:
        self._queues = RowQueues(threads) if queues is None else queues
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mbaas-rows")

    async def pick(
        self, rank: str, parts: Sequence[Arrays], rows: Ints, bad_rows: Ints, *, left_s: float
    ) -> list[Arrays]:
        """Copy from each part the rows that are among ``rows``: a smaller part, in fresh arrays.

        Args:
            rank: who asks; one queue each.
            parts: of one block.
            rows: of the block, int64[k], ascending.
            bad_rows: rows of the block that were left out.
            left_s: seconds until the rank stands still without them.
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
        """Have a rank's chunks done."""
        if chunks:
            with self._lock:
                self._queues.put(rank, chunks)
            # A call for each chunk, of this rank or another: which one it takes is decided when a thread is free.
            for _ in chunks:
                self._threads.submit(self._work)
            await asyncio.gather(*(asyncio.wrap_future(chunk.done) for chunk in chunks))

    def close(self) -> None:
        """End the threads, each after what it is copying."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _work(self) -> None:
        with self._lock:
            rank, chunk = self._queues.take(time.monotonic())
        began = time.perf_counter()
        try:
            chunk.copy()
        except Exception as error:  # whatever it is, it is told to who waits
            _resolve(chunk.done, error)
        else:
            _resolve(chunk.done, None)
        finally:
            with self._lock:
                self._queues.finish(rank, chunk, time.perf_counter() - began)


def _resolve(done: Future[None], error: Exception | None) -> None:
    """Tell who waits, unless it does not wait any more."""
    if done.set_running_or_notify_cancel():
        done.set_exception(error) if error is not None else done.set_result(None)


def _room(column: Column, entries: NDArray[np.intp]) -> Column:
    """Make memory for these samples of a part."""
    if isinstance(column, Packed):
        return column.like(entries)
    return np.empty((len(entries), *column.shape[1:]), column.dtype)


def _chunks(part: Arrays, entries: NDArray[np.intp], out: Arrays, due: float) -> list[Chunk]:
    """Make the chunks that copy ``entries`` of a part to ``out``."""
    row_bytes = sum(column.nbytes for column in out.values()) // max(len(entries), 1)  # the mean, if they differ
    size = max(1, CHUNK_BYTES // max(row_bytes, 1))
    starts = range(0, len(entries), size)
    return [Chunk(len(entries[i : i + size]) * row_bytes, due, _copy(part, entries, out, i, i + size)) for i in starts]


def _copy(part: Arrays, entries: NDArray[np.intp], out: Arrays, start: int, stop: int) -> Callable[[], None]:
    def copy() -> None:
        for name, column in out.items():
            if isinstance(column, Packed):
                part[name].copy_rows(entries[start:stop], column, np.arange(start, min(stop, len(entries))))
            else:
                # "clip", because in the default mode NumPy takes a detour through a buffer of its own.
                np.take(part[name], entries[start:stop], axis=0, out=column[start:stop], mode="clip")

    return copy
