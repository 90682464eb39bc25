"""Test consumers: records of an epoch, and trials in separate processes.

A record is kept sample by sample and separate from the loader's ledger, so that each checks the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas.client.convert import Minibatch
from mbaas.coordinator.control import FeedControl
from mbaas.errors import MbaasError
from mbaas.feed import join
from mbaas.loader import Loader
from mbaas.wire.samples import EpochLedger

RESULT_S = 90.0
"""Longest wait for a trial's answer."""

CLOSE_S = 2.0
"""A trial that is busy, or whose feed does not answer, is killed if it has not left by then."""

KEPT = 4
"""Idle processes kept for later trials."""


@dataclass(frozen=True, eq=False)
class EpochRecord:
    """A consumer's record of an epoch, or of part of one.

    Attributes:
        sample_ids: int64[n], in the order of delivery.
        sizes: samples in each minibatch.
        digests: hash of each minibatch: pixels, labels and ids.
        row_digest: hashes of all rows in order, independent of the cuts into minibatches.
        ledger: the loader's own ledger; None if the epoch was not finished.
    """

    sample_ids: NDArray[np.int64]
    sizes: tuple[int, ...]
    digests: tuple[str, ...]
    row_digest: str
    ledger: EpochLedger | None

    def flaws(self, due: Iterable[int]) -> list[str]:
        """Describe every deviation from an exact epoch over the samples ``due``; empty for an exact epoch."""
        wanted = np.unique(np.fromiter(due, np.int64))
        got, times = np.unique(self.sample_ids, return_counts=True)
        found = {
            "missing": np.setdiff1d(wanted, got),
            "not due": np.setdiff1d(got, wanted),
            "more than once": got[times > 1],
        }
        flaws = [f"{len(ids)} samples {what}: {ids[:10].tolist()}" for what, ids in found.items() if len(ids)]
        if self.ledger is None or not self.ledger.exact:
            flaws.append(f"the loader's ledger is {self.ledger}")
        return flaws


class Recorder:
    """Builds an `EpochRecord` from numpy minibatches, one by one, without keeping the minibatches."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int64]] = []
        self._digests: list[str] = []
        self._rows = {name: hashlib.blake2b(digest_size=16) for name in ("image", "label", "sample_id")}

    def add(self, batch: Minibatch) -> None:
        whole = hashlib.blake2b(digest_size=16)
        for name, rows in self._rows.items():
            content = np.ascontiguousarray(batch[name]).data
            rows.update(content)
            whole.update(content)
        self._ids.append(np.array(batch["sample_id"]))
        self._digests.append(whole.hexdigest())

    def record(self, ledger: EpochLedger | None) -> EpochRecord:
        ids = np.concatenate([np.empty(0, np.int64), *self._ids])
        sizes = tuple(len(part) for part in self._ids)
        row_digest = "".join(rows.hexdigest() for rows in self._rows.values())
        return EpochRecord(ids, sizes, tuple(self._digests), row_digest, ledger)


def record_epoch(loader: Loader, step_s: float = 0.0) -> EpochRecord:
    """Record an epoch, or the rest of one, from a loader with format "numpy", working ``step_s`` per minibatch."""
    recorder = Recorder()
    for batch in loader:
        recorder.add(batch)
        time.sleep(step_s)
    return recorder.record(loader.ledger)


@ray.remote(num_cpus=0)
class TrialProcess:
    """A consumer in its own process. It holds its last minibatch, as a training step does."""

    def join(self, feed: str, consumer: str, options: dict[str, Any]) -> int:
        """Join the feed and return the process id."""
        self._loop: Iterator[Minibatch] | None = None
        self._loader = join(feed, consumer, format="numpy", **options)
        return os.getpid()

    def take(self, minibatches: int) -> None:
        """Take the next minibatches of an epoch, starting one if necessary, and hold the last one."""
        if self._loop is None:
            self._loop, self._recorder = iter(self._loader), Recorder()
        for _ in range(minibatches):
            self._batch = next(self._loop)
            self._recorder.add(self._batch)

    def rest(self, step_s: float = 0.0) -> EpochRecord:
        """Finish the epoch that `take` began, and record it completely. Each minibatch takes ``step_s`` of work."""
        self.take(0)
        assert self._loop is not None
        for batch in self._loop:
            self._batch = batch
            self._recorder.add(batch)
            del batch
            time.sleep(step_s)
        self._loop = self._batch = None  # type: ignore[assignment]
        return self._recorder.record(self._loader.ledger)

    def epochs(self, count: int, step_s: float = 0.0) -> list[EpochRecord]:
        return [self.rest(step_s) for _ in range(count)]

    def finish(self, count: int) -> list[EpochRecord]:
        """Run ``count`` epochs, then leave. `take` may have begun the first."""
        records = self.epochs(count)
        self.close()
        return records

    def go_on(self, stop: str) -> EpochRecord:
        """Read epochs until the file ``stop`` exists; return the last record."""
        while True:
            record = self.rest()
            if Path(stop).exists():
                return record

    def state(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self._loop = None
        self._loader.load_state_dict(state)

    def flush(self) -> None:
        """Send metrics and ledgers now."""
        self._loader.flush()

    def close(self) -> None:
        self._loop = self._batch = None  # type: ignore[assignment]
        self._loader.close()


class Trial:
    """Handle of a `TrialProcess`. Methods return a reference at once; `result` waits for it.

    Attributes:
        pid: process id.
    """

    def __init__(self, consumer: str, actor: Any, joined: Any) -> None:
        self.consumer, self.actor = consumer, actor
        self._joined = joined

    @property
    def pid(self) -> int:
        pid: int = result(self._joined)
        return pid

    def take(self, minibatches: int) -> Any:
        return self.actor.take.remote(minibatches)

    def rest(self) -> Any:
        return self.actor.rest.remote()

    def epochs(self, count: int, step_s: float = 0.0) -> Any:
        return self.actor.epochs.remote(count, step_s)

    def finish(self, count: int) -> Any:
        return self.actor.finish.remote(count)

    @contextlib.contextmanager
    def going_on(self, stop: Path, due: Iterable[int]) -> Iterator[None]:
        """Read epochs in the background; the last one must be exact over the samples ``due``."""
        last = self.actor.go_on.remote(str(stop))
        try:
            yield
        finally:
            stop.touch()
        assert result(last).flaws(due) == []
        stop.unlink()

    def state(self) -> Any:
        return self.actor.state.remote()

    def load(self, state: dict[str, Any]) -> Any:
        return self.actor.load.remote(state)

    def close(self) -> Any:
        return self.actor.close.remote()


class Pool:
    """Reusable processes of trials that have left: starting one takes a second of CPU time.

    Processes of a Ray session that has ended are dropped.
    """

    def __init__(self) -> None:
        self._cluster = ""
        self._idle: list[Any] = []

    def take(self) -> Any:
        """Return a process without a trial."""
        self._forget_others()
        return self._idle.pop() if self._idle else TrialProcess.remote()  # type: ignore[attr-defined]

    def give_back(self, actor: Any) -> None:
        """Keep a process if its trial leaves at once; otherwise end it."""
        self._forget_others()
        try:
            ray.get(actor.close.remote(), timeout=CLOSE_S)
        except (ray.exceptions.RayError, MbaasError):
            ray.kill(actor)
            return
        self._idle.append(actor)
        if len(self._idle) > KEPT:
            ray.kill(self._idle.pop(0))

    def ids(self) -> set[str]:
        """Ray actor ids of the idle processes."""
        self._forget_others()
        return {actor._actor_id.hex() for actor in self._idle}

    def _forget_others(self) -> None:
        worker: Any = ray._private.worker.global_worker
        cluster = worker.node.session_name
        if cluster != self._cluster:
            self._cluster, self._idle = cluster, []


POOL = Pool()


class Trials:
    """The trials of one feed; a context manager that closes and ends every trial."""

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._trials: list[Trial] = []

    def join(self, consumer: str, **options: Any) -> Trial:
        """Start a trial that joins at once; ``options`` are passed to `mbaas.join`."""
        actor = POOL.take()
        trial = Trial(consumer, actor, actor.join.remote(self._feed, consumer, options))
        self._trials.append(trial)
        return trial

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for trial in self._trials:
            POOL.give_back(trial.actor)
            with contextlib.suppress(MbaasError):
                FeedControl.of(self._feed).remove(trial.consumer)


def result(ref: Any, deadline_s: float = RESULT_S) -> Any:
    """Return the result of a trial's call.

    Raises:
        ray.exceptions.GetTimeoutError: no result within ``deadline_s``.
    """
    return ray.get(ref, timeout=deadline_s)
