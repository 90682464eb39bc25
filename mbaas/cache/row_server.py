"""Serves rows of prepared parts to ranks on other nodes that need only some of the rows.

Threads serve ranks in order of arrival. A queue per rank, with more threads for the one about to straggle ("Lobster",
ICPP 2022), was no faster (docs/papers.md): copying a rank's rows takes milliseconds, preparing a block about a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import Arrays, Column, Packed
from mbaas.wire.blocks import ROW

Ints: TypeAlias = NDArray[np.int64]

CHUNK_BYTES = 1 << 20
"""Bytes that a thread copies at a time, so that threads share a large request: about 0.5 ms of work."""

MOST_PARTS = 10_000
"""Maximum number of block parts in one call."""


def check_pick(part_refs: object, rows: object, bad_rows: object, *, most: int) -> None:
    """Validate the arguments of `RowPool.pick`, which come from another program. Raises `ConfigError`.

    ``most`` is the number of rows of a block.
    """
    if not isinstance(part_refs, list) or not 0 < len(part_refs) <= MOST_PARTS:
        raise ConfigError(f"part_refs must be a list of 1 to {MOST_PARTS} references, got {shown(part_refs)}")
    for ref in part_refs:
        if not isinstance(ref, ray.ObjectRef):
            raise ConfigError(f"part_refs must hold references to parts of a block, got {shown(ref)}")
    _check_rows("rows", rows, most)
    _check_rows("bad_rows", bad_rows, most)


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


class RowPool:
    """A node's threads that copy rows out of parts."""

    def __init__(self, *, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mbaas-rows")

    async def pick(self, parts: Sequence[Arrays], rows: Ints, bad_rows: Ints) -> list[Arrays]:
        """Copy the rows in ``rows`` (int64[k], ascending) out of each part of a block, into smaller parts with new
        arrays.

        ``bad_rows`` were left out when the block was prepared.
        """
        copies: list[Callable[[], None]] = []
        picked: list[Arrays] = []
        for part in parts:
            has = part_rows(part, bad_rows)
            entries = np.flatnonzero(np.isin(has, rows, assume_unique=True))
            columns = {name: column for name, column in part.items() if name != ROW}
            out = {name: _room(column, entries) for name, column in columns.items()}
            copies += _copies(columns, entries, out)
            picked.append({**out, ROW: has[entries]})
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, copy) for copy in copies))
        return picked

    def close(self) -> None:
        """End the threads after their current copies."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _room(column: Column, entries: NDArray[np.intp]) -> Column:
    if isinstance(column, Packed):
        return column.like(entries)
    return np.empty((len(entries), *column.shape[1:]), column.dtype)


def _copies(part: Arrays, entries: NDArray[np.intp], out: Arrays) -> list[Callable[[], None]]:
    row_bytes = sum(column.nbytes for column in out.values()) // max(len(entries), 1)  # the mean, for packed columns
    size = max(1, CHUNK_BYTES // max(row_bytes, 1))
    return [_copy(part, entries, out, start, start + size) for start in range(0, len(entries), size)]


def _copy(part: Arrays, entries: NDArray[np.intp], out: Arrays, start: int, stop: int) -> Callable[[], None]:
    def copy() -> None:
        for name, column in out.items():
            if isinstance(column, Packed):
                part[name].copy_rows(entries[start:stop], column, np.arange(start, min(stop, len(entries))))
            else:
                # "clip", because the default mode copies through an internal buffer.
                np.take(part[name], entries[start:stop], axis=0, out=column[start:stop], mode="clip")

    return copy
