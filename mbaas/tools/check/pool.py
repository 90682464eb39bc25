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

_KILL_S = 5.0
"""Time that a killed process has to end."""

_LOOK_S = 1.0
"""Period of the check for hanging processes."""

START_S = 180.0
"""Time limit for the start of a process, which imports the modules of the pipeline."""

_READY = "ready"


@dataclass(frozen=True)
class Stage:
    """A part of the work on a piece, with a time limit of its own.

    Attributes:
        limit_s: seconds after which the process is killed.
        reason: a clause for the piece that is then lost.
        in_storage: whether the process then waited for storage.
    """

    limit_s: float
    reason: str
    in_storage: bool = False


_AGAIN_S = 0.5
"""A stage that begins again sooner keeps its limit, because a message for each sample would load the main process."""

_told: Callable[[Stage], None] | None = None  # in a process of a pool
_last: tuple[Stage, float] | None = None  # the stage of the current piece, and when it was told


def begin(stage: Stage) -> None:
    """Begin a stage of the current piece; without effect outside the processes of a pool."""
    global _last
    now = time.monotonic()
    if _told is not None and (_last is None or _last[0] != stage or now - _last[1] > _AGAIN_S):
        _told(stage)
        _last = stage, now


@dataclass(frozen=True)
class Lost:
    """A piece whose process ended or was killed.

    Attributes:
        reason: a clause.
        has_ended: whether the process ended by itself or by another program, perhaps before it began the piece.
        in_storage: whether it was killed while it waited for storage.
    """

    reason: str
    has_ended: bool = False
    in_storage: bool = False


class Pool(Generic[Piece, Result]):
    """Processes that work on pieces, one at a time each.

    Args:
        make: called once in each process; returns the function that works on a piece. Pickled once, and its large
            buffers are shared by all processes.
        processes: their number.
        limit_s: time in seconds for one piece, after which its process is killed; `begin` starts another limit.
        start_s: time in seconds for the start of a process.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[Piece], Result]],
        processes: int,
        limit_s: float,
        *,
        start_s: float = START_S,
    ) -> None:
        self._payload = _Shared.of(make)
        self._limit_s, self._start_s = limit_s, start_s
        self._ahead: deque[Piece] = deque()
        self._workers = [_Worker(self._payload) for _ in range(processes)]

    def add(self, pieces: Iterable[Piece]) -> None:
        """Queue pieces, such as the parts of a lost one, before all pieces that `run` has not begun."""
        self._ahead.extend(pieces)

    def run(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Result | Lost]]:
        """Yield each piece with its result, in the order of completion.

        Raises:
            ResourceError: a process died while it started, or did not start in time.
            Exception: whatever the function or ``make`` raised.
        """
        todo = iter(pieces)
        while True:
            for number, worker in enumerate(self._workers):
                worker.check_start(self._start_s)
                if (lost := worker.lost()) is not None:
                    piece, self._workers[number] = worker.piece, _Worker(self._payload)
                    yield piece, lost
                elif worker.is_idle and (piece := self._next(todo)) is not None:
                    worker.begin(piece, self._limit_s)
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


def not_prepared(limit_s: float) -> Stage:
    """Return the stage of preparing."""
    return Stage(limit_s, f"it was not prepared within {seconds(limit_s)} (timeouts.prep_s)")


@dataclass(frozen=True)
class _Raised:
    error: Exception


class _Worker:
    """One process, and its current piece: None if it is idle or starting."""

    def __init__(self, payload: _Shared) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process would inherit threads' locks
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, payload), daemon=True, name="mbaas-check")
        self.process.start()
        theirs.close()
        self.piece: Any = None
        self._is_starting, self._has_ended, self._began = True, False, time.monotonic()
        self._stage = Stage(0.0, "")

    @property
    def is_idle(self) -> bool:
        return not self._is_starting and self.piece is None

    def begin(self, piece: Any, limit_s: float) -> None:
        self.piece, self._began = piece, time.monotonic()
        self._stage = not_prepared(limit_s)
        try:
            self.pipe.send(piece)
        except OSError:  # it died while it was idle
            self._has_ended = True

    def answer(self) -> Any:
        """Receive a message: return a result, or None if a stage began or the process ended; raise its error."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            self._has_ended = True
            if self._is_starting:
                self.process.join()
                raise ResourceError(f"a process that checks samples {self._end()} while it started") from None
            return None
        if isinstance(found, _Raised):
            raise found.error
        if self._is_starting:
            self._is_starting = False
            return None
        if isinstance(found, Stage):
            self._stage, self._began = found, time.monotonic()
            return None
        self.piece = None
        return found

    def check_start(self, limit_s: float) -> None:
        """Raise ResourceError if the process did not start in time."""
        if self._is_starting and time.monotonic() - self._began > limit_s and not self.pipe.poll():
            raise ResourceError(f"a process that checks samples did not start within {seconds(limit_s)}")

    def lost(self) -> Lost | None:
        """Return the reason if the process has ended or exceeded the limit of its stage, else None."""
        if self._has_ended:
            self.process.join()
            self.pipe.close()
            return Lost(f"the process that prepared it {self._end()}", has_ended=True)
        stage = self._stage
        # A message may have waited while this program was stopped.
        if self.piece is not None and time.monotonic() - self._began > stage.limit_s and not self.pipe.poll():
            self.kill()
            return Lost(stage.reason, in_storage=stage.in_storage)
        return None

    def _end(self) -> str:
        code = self.process.exitcode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_KILL_S)  # a read from a dead file server may not end at all
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
    global _told, _last
    _told = pipe.send
    try:
        work = payload.value()()
        pipe.send(_READY)
        while True:
            piece, _last = pipe.recv(), None
            pipe.send(work(piece))
    except EOFError:  # the program has ended
        return
    except Exception as error:
        pipe.send(_Raised(error))
