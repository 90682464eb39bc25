"""Memory in which a worker makes blocks and other processes of its node read them, so that nothing is copied.

A block that goes through Ray's object store is made in memory of its worker and copied there. Where all who read it
run on the worker's node it is made where they read it: in memory that the worker shares (Linux's memfd), a slot for
each block. What travels is a `Slot`, which says where the arrays lie. What that saves is in docs/scaling.md.

The kernel says whether a slot may be written anew. Whoever needs what is in it holds a shared lock on it: the
coordinator as long as the block is staged, a consumer as long as it refers to any of its arrays. The worker writes
under an exclusive lock, which it gets at once or not at all. A process that dies loses its locks, however it dies; one
that hangs keeps its slots, and nobody waits for them, since a worker that finds none free makes an ordinary object. A
slot counts how often it was written, and whoever locks one looks whether it is still what it was told of.
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
from numpy.typing import NDArray

from mbaas.fields import Arrays, Packed, memory
from mbaas.messages import Slot, SlotColumn

HEADER_BYTES = mmap.ALLOCATIONGRANULARITY
"""The first bytes of a worker's memory: a token that no other memory has, and int64 [2, `MOST_SLOTS`], how often each
slot was written and which of these times a coordinator has locked it.
"""

TOKEN_BYTES = 16

MOST_SLOTS = (HEADER_BYTES - TOKEN_BYTES) // 16

UNSEEN_S = 5.0
"""So long a worker leaves a slot alone that no coordinator has locked since it was written: that one may be busy."""

ALIGNED_BYTES = 64
"""Arrays begin at multiples of this, as NumPy's own and Ray's do."""

_SHARED, _EXCLUSIVE = fcntl.F_RDLCK, fcntl.F_WRLCK


def are_supported() -> bool:
    """Tell whether this system has such memory and such locks: Linux does."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_OFD_SETLK")


def _try_lock(fd: int, kind: int, number: int) -> bool:
    # Locks of an open file description, not of a process: two loaders in one process do not lose each other's.
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, number, 1, 0))
    except (BlockingIOError, PermissionError):  # another one has it: POSIX allows both answers
        return False
    return True


def _counts_in(header: mmap.mmap) -> NDArray[np.int64]:
    return np.frombuffer(header, np.int64, 2 * MOST_SLOTS, TOKEN_BYTES).reshape(2, MOST_SLOTS)


# ---- who writes ----


class SlotMemory:
    """A worker's slots; not thread-safe. They take memory when they are first written.

    Args:
        slot_bytes: what a slot holds at least.

    Raises:
        OSError: the system gives no such memory, or has no such locks.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = -(-slot_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._fd = os.memfd_create("mbaas-blocks", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        _try_lock(self._fd, _SHARED, MOST_SLOTS)  # a byte that stands for no slot: for the error
        # As large as it may ever be, so that all map it once: a mapping takes a file descriptor.
        os.ftruncate(self._fd, self._begin(MOST_SLOTS))
        self._all = mmap.mmap(self._fd, self._begin(MOST_SLOTS))
        self._written, self._seen = _counts_in(self._all)
        self._path, self._token = f"/proc/{os.getpid()}/fd/{self._fd}", os.urandom(TOKEN_BYTES)
        self._all[:TOKEN_BYTES] = self._token
        self._newest_first: list[int] = []  # those that were ever written
        self._made_at: dict[int, float] = {}  # of slots that were handed out and not seen by a coordinator since

    def take(self, most: int) -> Place | None:
        """Return a slot to write to, the one that was written last if several are free: its memory is in the caches.

        None if none is free, and there are ``most`` of them.
        """
        for number in self._newest_first:
            if not self._is_awaited(number) and _try_lock(self._fd, _EXCLUSIVE, number):
                break
        else:
            number = len(self._newest_first)
            if number >= min(most, MOST_SLOTS):
                return None
            locked = _try_lock(self._fd, _EXCLUSIVE, number)
            assert locked, f"nobody was told of slot {number}, and somebody has locked it"
            self._newest_first.append(number)
        self._made_at.pop(number, None)
        self._newest_first.remove(number)
        self._newest_first.insert(0, number)
        self._written[number] += 1  # before the first byte is: who was told of what was there cannot take it for that
        return Place(self, number, np.frombuffer(self._all, np.uint8, self._slot_bytes, self._begin(number)))

    def _is_awaited(self, number: int) -> bool:
        made_at = self._made_at.get(number)
        if made_at is None or self._seen[number] == self._written[number]:
            return False
        return time.monotonic() - made_at < UNSEEN_S

    def _begin(self, number: int) -> int:
        return HEADER_BYTES + number * self._slot_bytes

    def hand_out(self, number: int, columns: tuple[SlotColumn, ...], packed: tuple[str, ...]) -> Slot:
        """Let others read a slot."""
        self._made_at[number] = time.monotonic()
        shared = _try_lock(self._fd, _SHARED, number)
        assert shared, f"the exclusive lock on slot {number} is lost"
        written = int(self._written[number])
        return Slot(self._path, self._token, number, self._begin(number), self._slot_bytes, written, columns, packed)


class Place:
    """A slot that a worker writes; it is free again if it is not handed out.

    Args:
        memory: whose slot it is.
        number: of the slot.
        room: uint8 [bytes], its memory.

    Attributes:
        room: as above: whole pages.
    """

    def __init__(self, memory: SlotMemory, number: int, room: NDArray[np.uint8]) -> None:
        self._memory, self._number, self.room = memory, number, room

    def samples(self, like: NDArray[Any]) -> NDArray[Any]:
        """Return the slot's beginning as an array of the shape and type of another one."""
        return self.room[: like.nbytes].view(like.dtype).reshape(like.shape)

    def hand_out(self, arrays: Arrays) -> Slot | None:
        """Let others read these arrays, of which some may lie in the slot; others are copied there, behind those.

        None if they do not fit; the slot is free again then.
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


# ---- who reads ----


class _Opened:
    """The memory of a worker as a reader has it."""

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
        """Whether the worker has it open, so that others can open it."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self.fd))
        except OSError:
            return False

    def lock(self, slot: Slot) -> int | None:
        """Hold a slot until the file descriptor that is returned is closed; None if it is not what it was."""
        fd = self._reopened(os.O_RDONLY)
        held = False
        try:
            held = _try_lock(fd, _SHARED, slot.number) and bool(self._written[slot.number] == slot.written)
        finally:
            if not held:
                os.close(fd)
        return fd if held else None

    def see(self, slot: Slot) -> None:
        """Tell the worker that a coordinator has the slot."""
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
        """Return the slot in which an address of this process lies."""
        number, _ = divmod(address - self._slots_at, self._slot_bytes)
        if not 0 <= number < MOST_SLOTS:
            return None
        return self._slots[number * self._slot_bytes :][: self._slot_bytes]


_opened: dict[bytes, _Opened] = {}  # token -> memory that this process has opened
_opening = threading.Lock()


def _lock(slot: Slot) -> tuple[_Opened, int] | None:
    """Hold a slot; return its memory, and the file descriptor to close. None if it is gone, or cannot be opened."""
    try:
        opened = _open(slot)
        fd = opened.lock(slot)
    except OSError:  # its worker has ended, or is none of this machine, or this process has too many files open
        return None
    return None if fd is None else (opened, fd)


def _open(slot: Slot) -> _Opened:
    with _opening:
        if slot.token not in _opened:
            for token in [token for token, opened in _opened.items() if not opened.is_there]:
                del _opened[token]  # its worker has ended
            _opened[slot.token] = _Opened(slot)
        return _opened[slot.token]


def forget_all() -> None:
    """Let go of all memory in which nothing is held here any more."""
    with _opening:
        _opened.clear()


class HeldSlot:
    """A slot that nobody writes as long as this object lives; see `hold`.

    Attributes:
        slot: the slot.
    """

    def __init__(self, slot: Slot, opened: _Opened, fd: int) -> None:
        self.slot, self._opened = slot, opened
        weakref.finalize(self, os.close, fd).atexit = False

    @property
    def is_there(self) -> bool:
        """Whether the worker that made it is there, so that processes of its node can open its memory."""
        return self._opened.is_there


def hold(slot: Slot) -> HeldSlot | None:
    """Hold a slot for others, as its coordinator; None if it is gone, or was written anew."""
    locked = _lock(slot)
    if locked is None:
        return None
    opened, fd = locked
    held = HeldSlot(slot, opened, fd)
    try:
        opened.see(slot)
    except OSError:
        return None
    return held


def arrays_in(slot: Slot) -> Arrays | None:
    """Return the arrays in a slot, read-only, which stay what they are as long as one of them or a view is referred to.

    None if they are gone: the worker's memory cannot be opened, or the slot was written anew.
    """
    locked = _lock(slot)
    if locked is None:
        return None
    opened, fd = locked
    whole = opened.bytes_of(slot)
    # Every array below is a view of this one, which NumPy lets go with the last of them.
    weakref.finalize(whole, os.close, fd).atexit = False
    found: Arrays = {}
    for name, columns in itertools.groupby(slot.columns, key=lambda column: column.name):
        parts = [_view(whole, column) for column in columns]
        found[name] = Packed(*parts) if name in slot.packed else parts[0]
    return found


def room_of(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return the memory of the slot in which an array lies: whole pages, read-only. It stays mapped as long as this is
    referred to, but does not hold the slot.

    None if it lies in none.
    """
    at = array.ctypes.data
    with _opening:
        rooms = (opened.room_at(at) for opened in _opened.values())
        return next((room for room in rooms if room is not None), None)


def will_be_written(room: NDArray[np.uint8]) -> bool:
    """Tell whether the worker to whose memory a slot belongs is still there."""
    at = room.ctypes.data
    with _opening:
        return any(opened.room_at(at) is not None and opened.is_there for opened in _opened.values())


def _view(whole: NDArray[np.uint8], column: SlotColumn) -> NDArray[Any]:
    return np.ndarray(column.shape, column.dtype, whole, column.at)
