"""Shared memory where a worker prepares blocks, and other processes of its node read them without a copy.

A block in Ray's object store is prepared in its worker's memory and copied there. If all readers run on the worker's
node, it is prepared in memory that the worker shares (a Linux memfd), with a slot for each block. Only a `Slot` with
the positions of the arrays is sent. docs/scaling.md has measurements of the savings.

The kernel decides whether a slot may be overwritten. Readers hold a shared lock on it: the coordinator while the block
is staged, a consumer while it refers to any of its arrays. The worker writes under an exclusive lock, which it gets at
once or not at all. A process that dies loses its locks, however it dies. One that hangs keeps its slots, but does not
block others: a worker that finds no free slot uses Ray's object store. Each slot counts its writes, and readers compare
the count after locking.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.samples.fields import Arrays, Packed, memory
from mbaas.samples.order import Whole

HEADER_BYTES = mmap.ALLOCATIONGRANULARITY
"""The first bytes of a worker's memory: a unique token, then int64 [2, `MOST_SLOTS`]. The first row counts each slot's
writes, and the second one has the last write that a coordinator has locked."""

TOKEN_BYTES = 16

MOST_SLOTS = (HEADER_BYTES - TOKEN_BYTES) // 16

UNSEEN_S = 5.0
"""Time that a worker leaves a written slot alone until a coordinator locks it; the coordinator may be busy."""

ALIGNED_BYTES = 64
"""Alignment of arrays, as in NumPy and Ray."""

_SHARED, _EXCLUSIVE = fcntl.F_RDLCK, fcntl.F_WRLCK


def are_supported() -> bool:
    """Return whether this system has memfds and locks of open file descriptions, as Linux does."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_OFD_SETLK")


def _try_lock(fd: int, kind: int, number: int) -> bool:
    # Locks of open file descriptions, not of processes: two loaders in one process do not release each other's locks.
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, number, 1, 0))
    except (BlockingIOError, PermissionError):  # locked by another; POSIX allows both errors
        return False
    return True


def _counts_in(header: mmap.mmap) -> NDArray[np.int64]:
    return np.frombuffer(header, np.int64, 2 * MOST_SLOTS, TOKEN_BYTES).reshape(2, MOST_SLOTS)


class SlotColumn(Struct, frozen=True, array_like=True):
    """Position of an array in a slot: field (a `Packed` field has several arrays), offset in bytes, dtype and shape."""

    name: str
    at: Whole
    dtype: str
    shape: tuple[Whole, ...]


class Slot(Struct, frozen=True, array_like=True, tag=True):
    """Address of a block's arrays in the memory of the worker that made them."""

    path: str  # path under which processes of the same node open the memory
    token: bytes  # random bytes at its beginning, because another process or machine may use the same path
    number: Whole
    begin: Whole
    nbytes: Whole
    written: Whole  # generation of the slot: the number of writes before the arrays were complete
    columns: tuple[SlotColumn, ...]
    packed: tuple[str, ...] = ()  # names of the fields that are `Packed`

    def held(self) -> HeldSlot | None:
        """Lock the slot. None if it was overwritten, or its worker's memory cannot be opened."""
        try:
            opened = _open(self)
            fd = opened.lock(self)
        except OSError:  # its worker has ended or is on another machine, or this process has too many open files
            return None
        return None if fd is None else HeldSlot(self, opened, fd)

    def staged(self) -> HeldSlot | None:
        """Lock the slot as its coordinator, and mark it as seen for the worker; None as for `held`."""
        try:
            if (held := self.held()) is not None:
                held.opened.see(self)
        except OSError:  # the worker's memory cannot be written
            return None
        return held


# ---- writer ----


class SlotMemory:
    """A worker's slots of at least ``slot_bytes``; not thread-safe. They take up memory when they are first written.

    Raises `OSError` if the system has no such memory or locks.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = -(-slot_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._fd = os.memfd_create("mbaas-blocks", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        _try_lock(self._fd, _SHARED, MOST_SLOTS)  # a byte outside of the slots, to raise if locks are unsupported

        # The full size at once, so that each process maps it only once: a mapping takes a file descriptor.
        os.ftruncate(self._fd, self._begin(MOST_SLOTS))
        self._all = mmap.mmap(self._fd, self._begin(MOST_SLOTS))
        self._written, self._seen = _counts_in(self._all)
        self._path, self._token = f"/proc/{os.getpid()}/fd/{self._fd}", os.urandom(TOKEN_BYTES)
        self._all[:TOKEN_BYTES] = self._token
        self._newest_first: list[int] = []  # all slots with memory
        self._unused: list[int] = []  # slots whose memory was given back
        self._made_at: dict[int, float] = {}  # of slots handed out and not seen by a coordinator yet

    def take(self, most: int) -> SlotWriter | None:
        """Return a free slot to write to, the most recently written one, because its memory is in the CPU caches.

        None if there are already ``most`` slots and none is free.
        """
        for number in self._newest_first:
            if not self._is_awaited(number) and _try_lock(self._fd, _EXCLUSIVE, number):
                break
        else:
            if len(self._newest_first) >= min(most, MOST_SLOTS):
                return None
            number = self._unused.pop() if self._unused else len(self._newest_first)
            locked = _try_lock(self._fd, _EXCLUSIVE, number)
            assert locked, f"slot {number} was not handed out, and another process has locked it"
            self._newest_first.append(number)
        self._made_at.pop(number, None)
        self._newest_first.remove(number)
        self._newest_first.insert(0, number)
        self._trim(most)
        self._written[number] += 1  # before the first byte, so that readers of the old contents notice
        return SlotWriter(self, number, np.frombuffer(self._all, np.uint8, self._slot_bytes, self._begin(number)))

    def _trim(self, most: int) -> None:
        # Memory that was written once is given back when fewer slots are allowed than before.
        for number in self._newest_first[most:]:
            if not self._is_awaited(number) and _try_lock(self._fd, _EXCLUSIVE, number):
                self._all.madvise(mmap.MADV_REMOVE, self._begin(number), self._slot_bytes)
                _try_lock(self._fd, fcntl.F_UNLCK, number)
                self._newest_first.remove(number)
                self._unused.append(number)

    def _is_awaited(self, number: int) -> bool:
        made_at = self._made_at.get(number)
        if made_at is None or self._seen[number] == self._written[number]:
            return False
        return time.monotonic() - made_at < UNSEEN_S

    def _begin(self, number: int) -> int:
        return HEADER_BYTES + number * self._slot_bytes

    def hand_out(self, number: int, columns: tuple[SlotColumn, ...], packed: tuple[str, ...]) -> Slot:
        """Release a slot for reading."""
        self._made_at[number] = time.monotonic()
        shared = _try_lock(self._fd, _SHARED, number)
        assert shared, f"the exclusive lock on slot {number} is lost"
        written = int(self._written[number])
        return Slot(self._path, self._token, number, self._begin(number), self._slot_bytes, written, columns, packed)


class SlotWriter:
    """A slot that a worker writes, in ``room``: whole pages, uint8 [bytes]. It becomes free again unless it is handed
    out.
    """

    def __init__(self, memory: SlotMemory, number: int, room: NDArray[np.uint8]) -> None:
        self._memory, self._number, self.room = memory, number, room

    def samples(self, like: NDArray[Any]) -> NDArray[Any]:
        """Return the start of the slot as an array with the shape and dtype of ``like``."""
        return self.room[: like.nbytes].view(like.dtype).reshape(like.shape)

    def hand_out(self, arrays: Arrays) -> Slot | None:
        """Release these arrays for reading; those outside of the slot are copied behind the others.

        None if they do not fit; the slot is then free again.
        """
        flat = [(name, array) for name, column in arrays.items() for array in memory(column)]
        end = max((self._end_of(array) for _, array in flat if self._has(array)), default=0)
        columns = []
        for name, array in flat:
            at = self._address_of(array) if self._has(array) else -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
            if not self._has(array):
                end = at + array.nbytes
                if end > self.room.nbytes:
                    return None
                self.room[at:end].view(array.dtype).reshape(array.shape)[...] = array
            columns.append(SlotColumn(name, at, array.dtype.str, array.shape))
        packed = tuple(name for name, column in arrays.items() if isinstance(column, Packed))
        return self._memory.hand_out(self._number, tuple(columns), packed)

    def _has(self, array: NDArray[Any]) -> bool:
        return array.flags.c_contiguous and 0 <= self._address_of(array) <= self.room.nbytes - max(array.nbytes, 1)

    def _address_of(self, array: NDArray[Any]) -> int:
        return int(array.ctypes.data - self.room.ctypes.data)

    def _end_of(self, array: NDArray[Any]) -> int:
        return self._address_of(array) + array.nbytes


# ---- readers ----


class _Opened:
    """A worker's memory, mapped by a reader."""

    def __init__(self, slot: Slot) -> None:
        self._path = Path(slot.path)
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size < HEADER_BYTES:
            raise FileNotFoundError(f"{slot.path} is something else")
        self.fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._all = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        if self._all[:TOKEN_BYTES] != slot.token:
            raise FileNotFoundError(f"{slot.path} is the memory of another worker")
        self._slot_bytes = slot.nbytes
        self._slots = np.frombuffer(self._all, np.uint8, offset=HEADER_BYTES)
        self._slots_at = self._slots.ctypes.data
        self._written, _ = _counts_in(self._all)
        self._seen: NDArray[np.int64] | None = None

    @property
    def is_there(self) -> bool:
        """True while the worker has it open, so that others can open it."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self.fd))
        except OSError:
            return False

    def lock(self, slot: Slot) -> int | None:
        """Lock a slot until the returned file descriptor is closed; None if it was overwritten."""
        fd = self._reopened(os.O_RDONLY)
        held = False
        try:
            held = _try_lock(fd, _SHARED, slot.number) and bool(self._written[slot.number] == slot.written)
        finally:
            if not held:
                os.close(fd)
        return fd if held else None

    def see(self, slot: Slot) -> None:
        """Mark the slot as seen by a coordinator, for the worker."""
        if self._seen is None:
            fd = self._reopened(os.O_RDWR)
            _, self._seen = _counts_in(mmap.mmap(fd, HEADER_BYTES))
            os.close(fd)
        self._seen[slot.number] = slot.written

    def _reopened(self, mode: int) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", mode | os.O_CLOEXEC)

    def bytes_of(self, slot: Slot) -> NDArray[np.uint8]:
        return np.frombuffer(self._all, np.uint8, slot.nbytes, slot.begin)

    def room_at(self, address: int) -> NDArray[np.uint8] | None:
        """Return the slot that contains an address of this process."""
        number, _ = divmod(address - self._slots_at, self._slot_bytes)
        if not 0 <= number < MOST_SLOTS:
            return None
        return self._slots[number * self._slot_bytes :][: self._slot_bytes]


_opened: dict[bytes, _Opened] = {}  # by token
_opening = threading.Lock()


def _open(slot: Slot) -> _Opened:
    with _opening:
        if slot.token not in _opened:
            for token in [token for token, opened in _opened.items() if not opened.is_there]:
                del _opened[token]  # its worker has ended
            _opened[slot.token] = _Opened(slot)
        return _opened[slot.token]


def forget_all() -> None:
    """Release all mapped memory without locked slots."""
    with _opening:
        _opened.clear()


class HeldSlot:
    """A slot that is not overwritten while this object, or an array read from it, exists; see `Slot.held`."""

    ref: None = None

    def __init__(self, slot: Slot, opened: _Opened, fd: int) -> None:
        self.slot, self.opened = slot, opened
        weakref.finalize(self, os.close, fd).atexit = False

    @property
    def is_in_live_worker(self) -> bool:
        """See `PartMemory`."""
        return self.opened.is_there

    def sent(self) -> Slot:
        """See `PartMemory`."""
        return self.slot

    def read(self, timeout_s: float = 0.0) -> Arrays:  # noqa: ARG002 - as `PartMemory.read`; nothing to wait for
        """Return the arrays, read-only; the slot stays locked while any of the arrays or their views exist."""
        whole = self.opened.bytes_of(self.slot)
        # Every array below is a view of this one, which NumPy frees with the last view.
        weakref.finalize(whole, _release, self).atexit = False
        found: Arrays = {}
        for name, columns in itertools.groupby(self.slot.columns, key=lambda column: column.name):
            parts = [np.ndarray(column.shape, column.dtype, whole, column.at) for column in columns]
            found[name] = Packed(*parts) if name in self.slot.packed else parts[0]
        return found


def _release(_: HeldSlot) -> None:
    pass  # the finalizer's reference was the last one


def room_of(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return the memory of the slot that contains an array: whole pages, read-only; None if it is not in a slot.

    It stays mapped while the result exists, but the slot is not locked.
    """
    at = array.ctypes.data
    with _opening:
        rooms = (opened.room_at(at) for opened in _opened.values())
        return next((room for room in rooms if room is not None), None)


def will_be_written(room: NDArray[np.uint8]) -> bool:
    """Return whether the worker that owns a slot's memory still exists."""
    at = room.ctypes.data
    with _opening:
        return any(opened.room_at(at) is not None and opened.is_there for opened in _opened.values())
