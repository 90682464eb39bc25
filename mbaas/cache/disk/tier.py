"""The disks of a cache node: admission, reads and writes, each disk in its own threads."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import counted, seconds
from mbaas.cache.disk.shared import SharedStore
from mbaas.cache.disk.store import DiskStats, DiskStore
from mbaas.cache.slab import Failures, Load, Origin, Slab, extract
from mbaas.cache.stats import Meter, Speedometer, TierMeter
from mbaas.errors import MbaasError
from mbaas.model.tiers import Admission, DiskOrder, DiskRoom, admissions
from mbaas.samples.order import Ids
from mbaas.samples.placement import ENCODED, PlacementHistory
from mbaas.settings import Disk
from mbaas.status import DiskStatus
from mbaas.wire.samples import Amount

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

DISK_THREADS = 4
"""Threads that access one disk concurrently: enough to saturate a solid-state disk, few compared with prep."""

DISK_SLACK = 1.1
"""Assumed ratio of the bytes with their home on one node to the mean over all nodes."""

HANG_S = 20.0
"""A disk is dropped if one piece of a request takes this long."""

HANG_CHECK_S = 1.0
"""Interval at which requests check whether their disk hangs."""

OPEN_S = 20.0
"""A disk that takes longer to open is dropped; a cache node must have started within twice this time."""

CLOSE_S = 5.0
"""Time to finish requests when the node ends."""

PIECE_BYTES = 16 << 20
"""Bytes requested from a disk at a time: a working disk finishes a piece far sooner than `HANG_S`."""

GIVE_UP_READS = 8
"""Number of consecutive pieces without a readable sample after which a disk is dropped."""

Classes: TypeAlias = Callable[[Ids, Sequence[float]], NDArray[np.int64] | None]
"""Chooses disks for samples, as in `mbaas.cache.planner.Planner.disk_classes`."""

Result = TypeVar("Result")


class _Disk:
    """One disk: its stores and threads. `index` is its number in the order of the options."""

    def __init__(self, index: int, options: Disk, dataset: Dataset, identity: str) -> None:
        self.index, self.path, self.max_bytes, self.is_shared = index, options.path, options.max_bytes, options.shared
        self.decoded: DiskStore | None = None
        self.store: DiskStore | SharedStore
        fingerprint, samples = dataset.fingerprint, len(dataset)
        if options.shared:
            self.store = SharedStore(self.path, self.max_bytes, fingerprint, num_samples=samples)
        else:
            self.store = DiskStore(self.path, self.max_bytes, fingerprint, num_samples=samples)
            if identity:
                named = hashlib.blake2b(f"{fingerprint} {identity}".encode(), digest_size=16).hexdigest()
                left = max(0, self.max_bytes - self.store.stats().used_bytes)
                try:
                    self.decoded = DiskStore(self.path, left, f"{named}-decoded", num_samples=samples)
                except BaseException:  # including interrupts: the first store's lock would otherwise stay
                    self.store.close()
                    raise
        self.logged = [store.stats() for store in self.stores]  # at the last `log` call
        self.meter = TierMeter()
        self.speedometer = Speedometer()
        self.threads = DaemonThreads(DISK_THREADS)
        self.useless_reads = 0  # pieces in a row without a readable sample
        self.requests = 0  # in progress, and waiting for a thread
        self._count_lock = threading.Lock()
        self._pieces: dict[int, float] = {}  # thread -> when it began its piece
        self.last_check: Future[None] | None = None  # the last regular check; None before the first
        self.is_there = True  # result of the last check

    @property
    def stores(self) -> list[DiskStore | SharedStore]:
        return [self.store] if self.decoded is None else [self.store, self.decoded]

    def count_requests(self, more: int) -> None:
        with self._count_lock:
            self.requests += more

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Measure how long this thread waits for the disk."""
        thread = threading.get_ident()
        self._pieces[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._pieces[thread]

    @property
    def hangs(self) -> bool:
        """True if a piece takes `HANG_S`, even if others end meanwhile."""
        return time.monotonic() - min([*self._pieces.values()], default=math.inf) >= HANG_S

    def close(self) -> None:
        """End the threads and unlock the folder. No request may be in progress."""
        self.threads.end()
        for store in self.stores:
            store.close()

    def check(self) -> None:
        """Check whether the folder exists, and exchange samples with other users of a shared one. May hang."""
        self.is_there = self.store.is_there()
        if isinstance(self.store, SharedStore):
            self.store.refresh()


class DiskTier:
    """The disks of one cache node.

    They store the samples that ``placements`` assigns to this node, each once, on the fastest disk with room. A shared
    folder that can hold the whole dataset stores all of them, whatever local disks store.

    A disk that hangs, fails or disappears is dropped, which is logged, and its samples are read from storage. A disk
    that is full or rejects a write is still read.

    Args:
        identity: identity of decoded samples, as in `DecodedSamples`; "" if none are cached.
        classes: chooses the disk of samples that are drawn by weight.
    """

    def __init__(
        self,
        disks: Sequence[Disk],
        dataset: Dataset,
        placements: PlacementHistory,
        meter: Meter,
        identity: str = "",
        classes: Classes = lambda _ids, _capacities: None,
    ) -> None:
        self._disks: dict[int, _Disk] = {}  # index in ``disks`` -> disk, if it could be opened
        self._options = tuple(disks)
        self._lines: deque[str] = deque()
        self.order = DiskOrder([disk.path for disk in disks])
        opening = [
            in_daemon(functools.partial(_Disk, index, disk, dataset, identity)) for index, disk in enumerate(disks)
        ]
        wait(opening, OPEN_S)
        for index, opened in enumerate(opening):
            if not opened.done():
                self.drop(index, f"it could not be opened within {seconds(OPEN_S)}")
                opened.add_done_callback(_close_late)
            elif opened.exception() is None:
                self._disks[index] = opened.result()
        if error := next((error for opened in opening if opened.done() and (error := opened.exception())), None):
            self.close()  # otherwise the other disks would stay locked
            raise error
        self._dataset_bytes = dataset.total_bytes
        self._nodes, self._needed_bytes = 1, float(dataset.total_bytes)  # for all samples with their home here
        self._placements, self._meter, self._classes = placements, meter, classes

    # ---- which disks, and what for ----

    def _used(self, indices: Sequence[int] | None = None) -> list[_Disk]:
        return [self._disks[index] for index in (self.order.used if indices is None else indices)]

    @property
    def _local(self) -> list[_Disk]:
        return [disk for disk in self._used() if not disk.is_shared]

    @property
    def _local_bytes(self) -> int:
        return sum(disk.max_bytes for disk in self._local)

    @property
    def is_used(self) -> bool:
        return bool(self.order.used)

    @property
    def holds_all(self) -> bool:
        """True if the local disks can store all encoded samples of this node, or a shared disk the whole dataset."""
        shared = any(disk.max_bytes >= self._dataset_bytes for disk in self._used() if disk.is_shared)
        return shared or self._local_bytes >= self._needed_bytes

    @property
    def for_decoded_bytes(self) -> int:
        """Bytes of the disk budgets available to decoded samples: the part beyond all encoded samples if these fit."""
        if self._local_bytes < self._needed_bytes:
            return self._local_bytes
        return max(0, self._local_bytes - math.ceil(DISK_SLACK * self._needed_bytes))

    @property
    def free_for_decoded_bytes(self) -> int:
        return sum(disk.decoded.stats().free_bytes for disk in self._local if disk.decoded is not None)

    @property
    def decoded(self) -> Amount:
        """Number of decoded samples on disks, and the bytes of their files."""
        found = [disk.decoded.stats() for disk in self._local if disk.decoded is not None]
        return sum((Amount(stats.samples, stats.used_bytes) for stats in found), Amount())

    def divide(self, decoded_bytes: int) -> None:
        """Set the bytes for decoded samples, limited by the space that encoded samples leave.

        Each local disk has a part in proportion to its size.
        """
        decoded_bytes, total = max(0, min(decoded_bytes, self.for_decoded_bytes)), self._local_bytes
        for disk in self._local:
            if disk.decoded is not None:
                left = disk.max_bytes - disk.store.stats().used_bytes
                own = max(0, min(decoded_bytes * disk.max_bytes // total, left))
                disk.decoded.set_budget(own)
                disk.store.set_budget(disk.max_bytes - max(own, disk.decoded.stats().used_bytes))

    def update_nodes(self, nodes: int) -> None:
        self._nodes, self._needed_bytes = nodes, DISK_SLACK * self._dataset_bytes / nodes

    # ---- speeds and failures ----

    def to_probe(self) -> list[tuple[int, str, int]]:
        """Return index, path and free bytes of each disk."""
        return [(disk.index, disk.path, disk.store.stats().free_bytes) for disk in self._disks.values()]

    def drop(self, index: int, reason: str) -> None:
        """Stop using a disk, for good. Thread-safe."""
        self._lines.extend(self.order.failed(index, reason))

    def probed(self, index: int, bytes_per_s: float) -> None:
        """Record the probed speed of a disk, bytes/s of one thread."""
        self._disks[index].speedometer.probed(bytes_per_s)
        self._measured(self._disks[index])

    def _measured(self, disk: _Disk) -> None:
        if disk.speedometer.speed is not None:
            self.order.measured(disk.index, disk.speedometer.speed)

    def update(self, storage: float | None) -> None:
        """Update the order of the disks from regular reads and the speed of storage, and start the regular checks."""
        for disk in self._disks.values():
            if self.order.has_failed(disk.index):
                continue
            disk.speedometer.update(disk.meter.sums())
            self._measured(disk)
            if not disk.is_there:
                self.drop(disk.index, "its folder was removed")
            elif disk.hangs:
                self._drop_hanging(disk)
            elif disk.last_check is None or disk.last_check.done():
                if disk.last_check is not None and (error := disk.last_check.exception()) is not None:
                    self.drop(disk.index, f"{type(error).__name__}: {error}")
                    continue
                # In a separate thread, so that checks and reads do not wait for each other.
                disk.count_requests(1)
                disk.last_check = in_daemon(functools.partial(self._check_disk, disk))
        self._lines.extend(self.order.weigh(storage))

    def _check_disk(self, disk: _Disk) -> None:
        try:
            with disk.piece():
                disk.check()
        finally:
            disk.count_requests(-1)

    def _drop_hanging(self, disk: _Disk) -> None:
        self.drop(disk.index, f"it did not finish a request for {seconds(HANG_S)}")

    def status(self) -> tuple[DiskStatus, ...]:
        """Return the state of each disk, also of those that could not be opened."""
        return tuple(self._status(index, options) for index, options in enumerate(self._options))

    def _status(self, index: int, options: Disk) -> DiskStatus:
        state, disk = self.order[index], self._disks.get(index)
        stores = [] if disk is None else [store.stats() for store in disk.stores]
        write_failure = next((stats.write_failure for stats in stores if stats.write_failure), "")
        return DiskStatus(
            path=options.path,
            used_bytes=sum(stats.used_bytes for stats in stores),
            max_bytes=options.max_bytes,
            bytes_per_s=state.speed,
            is_used=state.is_used and not state.failure,
            failure=state.failure or write_failure,
        )

    def log(self) -> list[str]:
        """Return log lines about decisions and failures since the last call."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        for disk in self._disks.values():
            before, disk.logged = disk.logged, [store.stats() for store in disk.stores]
            for pair in zip(before, disk.logged, strict=True):
                lines += self._changes(disk.path, *pair)
        return lines

    @staticmethod
    def _changes(path: str, before: DiskStats, now: DiskStats) -> list[str]:
        lines = []
        if now.write_failure and not before.write_failure:
            lines.append(f"the disk cache {path} keeps nothing more: {now.write_failure}")
        if now.removal_failure and not before.removal_failure:
            lines.append(f"the disk cache {path} has less room: {now.removal_failure}")
        if damaged := now.damaged_samples - before.damaged_samples:
            lines.append(
                f"{counted(damaged, 'sample')} in the disk cache {path} could not be read, or had other "
                f"bytes than were written ({now.damaged_samples} since it was opened): read from storage"
            )
        return lines

    # ---- reads ----

    def has(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples are stored in any form: bool[n]."""
        found = self.decoded_lengths(sample_ids) > 0
        for disk in self._used():
            found |= disk.store.has(sample_ids)
        return found

    def decoded_lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of samples stored decoded, 0 for others: int64[n]."""
        lengths = np.zeros(len(sample_ids), np.int64)
        for disk in self._local:
            if disk.decoded is not None:
                lengths = np.where(lengths > 0, lengths, disk.decoded.lengths(sample_ids))
        return lengths

    async def read(
        self, load: Load, slab: Slab, origins: NDArray[np.int8], indices: Sequence[int] | None = None
    ) -> Slab:
        """Read the rows of a slab that disks store, and set their ``origins``.

        Only rows whose origin is still storage are read. ``indices`` selects the disks to try, the fastest first; by
        default all that are used. Returns the slab. After a hang it is a copy, because the disk may still write to
        the original.
        """
        for disk in self._used(indices):
            store = disk.store if load.form == ENCODED else disk.decoded
            rows = np.flatnonzero(origins == Origin.STORAGE)
            if store is None or not len(rows := rows[store.has(load.sample_ids[rows])]):
                continue
            get = functools.partial(self._get, disk, store, load, rows, slab)
            found = await self._ask(disk, get)
            if found is None:
                slab = slab.copy()
            else:
                origins[rows[found]] = Origin.DISK
        return slab

    def _get(
        self, disk: _Disk, store: DiskStore | SharedStore, load: Load, rows: NDArray[np.int64], slab: Slab
    ) -> NDArray[np.bool_]:
        found = np.zeros(len(rows), np.bool_)
        with self._meter.disk.using(), disk.meter.using():
            for piece in _pieces(load.lengths[rows]):
                if self.order.has_failed(disk.index):
                    break
                ids, lengths = load.sample_ids[rows[piece]], load.lengths[rows[piece]]
                with disk.piece():
                    found[piece] = store.get(ids, lengths, buffer=slab, offsets=load.offsets[rows[piece]])
                for meter in (self._meter.disk, disk.meter):
                    meter.moved(int(lengths[found[piece]].sum()))
                disk.useless_reads = 0 if found[piece].any() else disk.useless_reads + 1
                if disk.useless_reads >= GIVE_UP_READS:
                    self.drop(disk.index, f"{GIVE_UP_READS} reads in a row gave no sample as it was written")
        return found

    # ---- writes ----

    async def write(self, load: Load, slab: Slab, origins: NDArray[np.int8], failures: Failures) -> None:
        """Store samples that were read from storage and have their home here, unless memory caches them.

        `admissions` decides which disk stores which.
        """
        if load.form != ENCODED:
            return
        new = self._placements.is_home(load.sample_ids) & (origins == Origin.STORAGE) & load.readable(failures)
        if not new.any():
            return
        disks = self._used()
        sizes = [disk.max_bytes / self._nodes if disk.is_shared else disk.max_bytes for disk in disks]
        classes = self._classes(load.sample_ids, sizes)
        rules = admissions(
            [DiskRoom(disk.max_bytes, disk.is_shared) for disk in disks],
            needed_bytes=self._needed_bytes,
            dataset_bytes=self._dataset_bytes,
            has_classes=classes is not None,
            in_memory=load.permanent or load.interim,
        )
        left = new.copy()
        for disk in disks:
            left &= ~disk.store.has(load.sample_ids)
        for number, (disk, rule) in enumerate(zip(disks, rules, strict=True)):
            chosen = left.copy()
            if rule is Admission.EVERY:
                chosen = new & ~disk.store.has(load.sample_ids)
            elif rule is Admission.OF_CLASS:
                chosen &= classes == number
            if rule is Admission.NONE or not chosen.any():
                continue
            lengths = load.lengths[chosen]
            put = functools.partial(self._put, disk, disk.store, load.sample_ids[chosen], lengths)
            stored = await self._ask(disk, functools.partial(put, extract(slab, load.lengths, chosen)))
            if stored is not None:
                left[np.flatnonzero(chosen)[stored]] = False

    async def write_decoded(self, sample_ids: Ids, lengths: NDArray[np.int64], packed: Slab) -> None:
        """Store decoded samples that are not stored yet, as many as fit. ``packed`` contains them end to end."""
        left = self.decoded_lengths(sample_ids) == 0
        for disk in self._local:
            if disk.decoded is None or not left.any():
                continue
            put = functools.partial(self._put, disk, disk.decoded, sample_ids[left], lengths[left])
            stored = await self._ask(disk, functools.partial(put, extract(packed, lengths, left)))
            if stored is not None:
                left[np.flatnonzero(left)[stored]] = False

    def _put(
        self, disk: _Disk, store: DiskStore | SharedStore, sample_ids: Ids, lengths: NDArray[np.int64], packed: Slab
    ) -> NDArray[np.bool_]:
        stored = np.zeros(len(sample_ids), np.bool_)
        ends = np.cumsum(lengths)
        for piece in _pieces(lengths):
            if self.order.has_failed(disk.index):
                break
            content = packed[ends[piece[0]] - lengths[piece[0]] : ends[piece[-1]]]
            with disk.piece():
                stored[piece] = store.put(sample_ids[piece], lengths[piece], content)
        return stored

    async def _ask(self, disk: _Disk, work: Callable[[], Result]) -> Result | None:
        """Return the result of a request to a disk. If it fails or hangs, drop the disk and return None."""
        if self.order.has_failed(disk.index):
            return None
        disk.count_requests(1)
        request = disk.threads.submit(work)
        request.add_done_callback(lambda _: disk.count_requests(-1))
        future = asyncio.wrap_future(request)
        while not (await asyncio.wait([future], timeout=HANG_CHECK_S))[0]:
            if disk.hangs:
                self._drop_hanging(disk)
            if self.order.has_failed(disk.index):
                future.add_done_callback(lambda late: late.cancelled() or late.exception())  # not logged by asyncio
                return None
        try:
            return future.result()
        except (OSError, MbaasError) as error:
            self.drop(disk.index, str(error))
            return None

    def close(self) -> None:
        """Finish reads and writes in progress, end the threads, and unlock the folders.

        A disk that does not finish within `CLOSE_S` stays locked as long as this process.
        """
        deadline = time.monotonic() + CLOSE_S
        for disk in self._disks.values():
            disk.threads.end()
            while disk.requests and time.monotonic() < deadline:
                time.sleep(0.01)
            if not disk.requests:
                disk.close()


def _pieces(lengths: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """Split samples into runs of about `PIECE_BYTES`; return their indices."""
    # A piece ends in one multiple of `PIECE_BYTES`, so it exceeds them by less than its first sample.
    numbers = np.cumsum(lengths) // PIECE_BYTES
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(numbers)) + 1)


class DaemonThreads:
    """Threads that run work in order. Python does not wait for them when it ends, unlike for a `ThreadPoolExecutor`."""

    def __init__(self, threads: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.is_ended = False
        for _ in range(threads):
            threading.Thread(target=self._run, name="mbaas-disk", daemon=True).start()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Raises RuntimeError after `end`."""
        future: Future[Result] = Future()
        with self._lock:
            if self.is_ended:
                raise RuntimeError("the threads of a disk have ended, and were given more work")
            self._work.put(functools.partial(_finish, future, work))
        return future

    def end(self) -> None:
        """End the threads once all submitted work is done; do not wait. May be repeated."""
        with self._lock:
            self.is_ended = True
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it refers to samples
        self._work.put(None)  # for the other threads


def in_daemon(work: Callable[[], Result]) -> Future[Result]:
    """Run work in a daemon thread, because a disk that hangs must not delay the end of the process."""
    future: Future[Result] = Future()
    threading.Thread(target=_finish, args=(future, work), name="mbaas-disk-alone", daemon=True).start()
    return future


def _finish(future: Future[Result], work: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # raised where the result is used
        future.set_exception(error)


def _close_late(opened: Future[_Disk]) -> None:
    if opened.exception() is None:
        opened.result().close()
