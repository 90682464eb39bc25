"""The storage of a node: a disk of a fixed speed, below a cache that all processes of the node share.

The bytes of samples come from files in memory. Only the time is modelled: a reader sends a request to the server of its
node, and gets the reply when the disk would have delivered the bytes. This needs neither root rights nor a cold page
cache, and several processes share one disk and one cache, as on a real node.

A request is int64[1 + 2n]: n, and then n pairs of a sample's id and its length. The reply is one byte. A request with
n = `STATISTICS` is answered with the counts so far, as int64[4].
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from mbaas.errors import MbaasError
from mbaas.model.page_cache import PAGE_BYTES, PageCache
from mbaas.tools.analysis.measuring.storage import Throttle

STATISTICS = -1

BACKLOG = 256
"""Connections that may wait to be accepted: each thread that reads has one."""

Policy = Literal["page_cache", "minio"]


class Cache(Protocol):
    """Decides which samples are in memory."""

    def access(self, sample: int, nbytes: int) -> bool:
        """Record a read of a whole sample of ``nbytes``, and return whether it was in memory."""


class LinuxCache:
    """The page cache of Linux; ``sizes`` are bytes of all samples.

    It has room for as many samples as the other caches: what whole pages take in addition is not counted.
    """

    def __init__(self, capacity_bytes: int, sizes: Sequence[int]) -> None:
        in_pages = sum(-(-nbytes // PAGE_BYTES) * PAGE_BYTES for nbytes in sizes)
        self._cache = PageCache(capacity_bytes=capacity_bytes * in_pages / sum(sizes), sizes=np.array(sizes))

    def access(self, sample: int, nbytes: int) -> bool:  # noqa: ARG002 - the sizes are known
        return bool(self._cache.read(np.array([sample]))[0])


class MinIOCache:
    """Admits samples until it is full, and never evicts (Mohan et al., VLDB 2021, section 6.1)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free_bytes = capacity_bytes
        self._samples: set[int] = set()

    def access(self, sample: int, nbytes: int) -> bool:
        if sample in self._samples:
            return True
        if nbytes <= self._free_bytes:
            self._free_bytes -= nbytes
            self._samples.add(sample)
        return False


@dataclass(frozen=True)
class StorageSettings:
    """The storage of one node.

    Attributes:
        bytes_per_s: speed of the disk; None: reading takes no time.
        policy: rule of the cache.
        cache_bytes: capacity of the cache; 0: every read goes to the disk.
        sizes: bytes of each sample of the dataset.
    """

    bytes_per_s: float | None
    policy: Policy
    cache_bytes: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ReadCounts:
    """Reads since the server started.

    Attributes:
        hits: samples read from the cache.
        reads, read_bytes: samples read from the disk.
        cpu_us: CPU microseconds of the server itself; loaders do not pay for the model.
    """

    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    cpu_us: int = 0

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def __sub__(self, earlier: ReadCounts) -> ReadCounts:
        return ReadCounts(*(a - b for a, b in zip(self._values, earlier._values, strict=True)))

    @property
    def _values(self) -> tuple[int, int, int, int]:
        return self.hits, self.reads, self.read_bytes, self.cpu_us


class NodeStorage:
    """The disk and the cache of a node. The clock is an argument; safe to use from several threads."""

    def __init__(self, settings: StorageSettings) -> None:
        rate = settings.bytes_per_s
        # A token bucket without a burst: idle time of a disk is lost.
        self._disk = None if rate is None else Throttle(rate)
        self._cache: Cache = (
            LinuxCache(settings.cache_bytes, settings.sizes)
            if settings.policy == "page_cache"
            else MinIOCache(settings.cache_bytes)
        )
        self._arrival_s = [0.0] * len(settings.sizes)  # of each sample's last read from the disk
        self._lock = threading.Lock()
        self._counts = ReadCounts()

    def request(self, wanted: Sequence[tuple[int, int]], now: float) -> float:
        """Return when all wanted samples, as (id, bytes), are there.

        A sample that another process reads from the disk at this moment counts as a hit, but arrives with that read.
        """
        ready, hits, reads, read_bytes = now, 0, 0, 0
        with self._lock:
            for sample, nbytes in wanted:
                if self._cache.access(sample, nbytes):
                    hits += 1
                else:
                    reads, read_bytes = reads + 1, read_bytes + nbytes
                    self._arrival_s[sample] = now if self._disk is None else self._disk.book(nbytes, now)
                ready = max(ready, self._arrival_s[sample])
            self._counts += ReadCounts(hits, reads, read_bytes)
        return ready

    def counts(self) -> ReadCounts:
        """Return the reads so far, without CPU time."""
        with self._lock:
            return self._counts


class StorageClient:
    """A process's access to the storage of its node. Each thread has its own connection. Picklable."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connections = threading.local()

    def wait_for(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Return when the storage would have delivered all wanted samples, as (id, bytes)."""
        self._connection().sendall(np.array([len(wanted), *(n for pair in wanted for n in pair)], np.int64).tobytes())
        self._receive(1)

    def counts(self) -> ReadCounts:
        """Return the reads of all processes of the node so far."""
        self._connection().sendall(np.array([STATISTICS], np.int64).tobytes())
        return ReadCounts(*np.frombuffer(self._receive(32), np.int64).tolist())

    def close(self) -> None:
        """Close this thread's connection; the next call opens another."""
        if (connection := self._connections.__dict__.pop("it", None)) is not None:
            connection.close()

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._connections, "it", None)
        if connection is None:
            connection = self._connections.it = socket.socket(socket.AF_UNIX)
            connection.connect(self._path)
        return connection

    def _receive(self, nbytes: int) -> bytes:
        received = self._connection().recv(nbytes, socket.MSG_WAITALL)
        if len(received) < nbytes:
            raise MbaasError(f"the storage server at {self._path} has ended")
        return received

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)  # type: ignore[misc]


@contextlib.contextmanager
def served_storage(folder: Path, name: str, settings: StorageSettings) -> Iterator[str]:
    """Run the storage of a node in its own process, and yield the path of its socket, ``name`` in ``folder``."""
    context = mp.get_context("spawn")
    path = str(folder / name)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(path, settings, theirs), name=f"storage {name}")
    process.start()
    theirs.close()
    try:
        ours.recv()  # it listens
        yield path
    finally:
        ours.close()  # ends it, also if this program is killed
        process.join()


def _serve(path: str, settings: StorageSettings, parent: Connection[None, None]) -> None:
    storage = NodeStorage(settings)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(BACKLOG)
        threading.Thread(target=_accept, args=(listener, storage), daemon=True).start()
        parent.send(None)
        with contextlib.suppress(EOFError):
            parent.recv()


def _accept(listener: socket.socket, storage: NodeStorage) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, storage), daemon=True).start()


def _answer(connection: socket.socket, storage: NodeStorage) -> None:
    with connection, connection.makefile("rb") as requests, contextlib.suppress(ConnectionError):
        while header := requests.read(8):
            number = int.from_bytes(header, "little", signed=True)
            if number == STATISTICS:
                hits, reads, read_bytes, _ = storage.counts()._values
                connection.sendall(np.array([hits, reads, read_bytes, time.process_time_ns() // 1000]).tobytes())
                continue
            pairs = np.frombuffer(requests.read(16 * number), np.int64).reshape(-1, 2).tolist()
            ready = storage.request([(sample, nbytes) for sample, nbytes in pairs], time.monotonic())
            time.sleep(max(0.0, ready - time.monotonic()))
            connection.sendall(b"\0")
