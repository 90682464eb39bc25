"""Processes that do one kind of work. A process that dies or hangs is replaced, and its piece is reported as lost."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, reduction
from typing import Any, Generic, TypeVar, cast

from mbaas.base.units import seconds
from mbaas.errors import ResourceError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_LOOK_S = 1.0
"""Period of the check for hanging processes."""

_READY = "ready"


@dataclass(frozen=True)
class Lost:
    """A piece whose process ended or was killed; ``reason`` is a clause."""

    reason: str


class Pool(Generic[Piece, Result]):
    """Processes that work on pieces, one at a time each.

    Args:
        make: called once in each process; returns the function that works on a piece. Pickled once, and its large
            buffers are shared by all processes.
        processes: their number.
        limit_s: time in seconds for one piece, after which its process is killed.
    """

    def __init__(self, make: Callable[[], Callable[[Piece], Result]], processes: int, limit_s: float) -> None:
        self._payload = _Shared.of(make)
        self._limit_s = limit_s
        self._ahead: deque[Piece] = deque()
        self._workers = [_Worker(self._payload) for _ in range(processes)]

    def add(self, pieces: Iterable[Piece]) -> None:
        """Queue pieces, such as the parts of a lost one, before all pieces that `run` has not begun."""
        self._ahead.extend(pieces)

    def run(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Result | Lost]]:
        """Yield each piece with its result, in the order of completion.

        Raises:
            ResourceError: a process died while it started.
            Exception: whatever the function or ``make`` raised.
        """
        todo = iter(pieces)
        while True:
            for number, worker in enumerate(self._workers):
                if (lost := worker.lost(self._limit_s)) is not None:
                    piece, self._workers[number] = worker.piece, _Worker(self._payload)
                    yield piece, lost
                elif worker.is_idle and (piece := self._next(todo)) is not None:
                    worker.begin(piece)
            busy = {worker.pipe: worker for worker in self._workers if not worker.is_idle}
            if not busy and not self._ahead:
                return
            for pipe in connection.wait(list(busy), timeout=_LOOK_S):
                worker = busy[cast("connection.Connection[Any, Any]", pipe)]
                piece = worker.piece
                found = worker.answer()
                if found is not None:
                    yield piece, found

    def _next(self, todo: Iterator[Piece]) -> Piece | None:
        return self._ahead.popleft() if self._ahead else next(todo, None)

    def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.kill()
        self._payload.close()


class _Worker:
    """One process, and its current piece: None if it is idle or starting."""

    def __init__(self, payload: _Shared) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process would inherit threads' locks
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, payload), daemon=True, name="mbaas-check")
        self.process.start()
        theirs.close()
        self.piece: Any = None
        self._is_starting, self._has_ended, self._began = True, False, 0.0

    @property
    def is_idle(self) -> bool:
        return not self._is_starting and self.piece is None

    def begin(self, piece: Any) -> None:
        self.piece, self._began = piece, time.monotonic()
        try:
            self.pipe.send(piece)
        except OSError:  # it died while it was idle
            self._has_ended = True

    def answer(self) -> Any:
        """Receive a message: return a result, or None if the process has started or ended; raise its error."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            self._has_ended = True
            if self._is_starting:
                self.process.join()
                raise ResourceError(f"a process that checks samples {self._end()} while it started") from None
            return None
        if isinstance(found, BaseException):
            raise found
        if self._is_starting:
            self._is_starting = False
            return None
        self.piece = None
        return found

    def lost(self, limit_s: float) -> Lost | None:
        """Return the reason if the process has ended or exceeded the limit, else None."""
        if self._has_ended:
            self.process.join()
            return Lost(f"the process that prepared it {self._end()}")
        if self.piece is not None and time.monotonic() - self._began > limit_s:
            self.kill()
            return Lost(f"it was not prepared within {seconds(limit_s)} (timeouts.prep_s)")
        return None

    def _end(self) -> str:
        code = self.process.exitcode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Shared:
    """An object pickled into memory without a file. Its large buffers are mapped, not copied, by each process."""

    def __init__(self, fd: Any, bounds: tuple[int, ...]) -> None:
        self._fd, self._bounds = fd, bounds

    @classmethod
    def of(cls, value: Any) -> _Shared:
        buffers: list[pickle.PickleBuffer] = []
        first = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(first), *(each.raw() for each in buffers)]
        bounds, end = [0], 0
        fd = os.memfd_create("mbaas-check", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as file:
            for part in parts:
                file.write(part)
                padding = -len(part) % 64  # so that arrays begin at aligned addresses
                file.write(bytes(padding))
                end += len(part)
                bounds += [end, end := end + padding]
        return cls(fd, tuple(bounds[:-1]))

    def value(self) -> Any:
        """Return the object, in the process that received this."""
        mapped = memoryview(mmap.mmap(self._fd.detach(), 0, prot=mmap.PROT_READ))
        parts = [mapped[start:end] for start, end in zip(self._bounds[::2], self._bounds[1::2], strict=True)]
        return pickle.loads(parts[0], buffers=parts[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        return _Shared, (reduction.DupFd(self._fd), self._bounds)

    def close(self) -> None:
        os.close(self._fd)


def _work(pipe: connection.Connection[Any, Any], payload: _Shared) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the main one kills this
    try:
        work = payload.value()()
        pipe.send(_READY)
        while True:
            pipe.send(work(pipe.recv()))
    except EOFError:  # the program has ended
        return
    except Exception as error:
        pipe.send(error)
