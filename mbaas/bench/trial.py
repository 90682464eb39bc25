"""The consumer that all rows share: a process that takes minibatches and touches their arrays.

It warms up through whole epochs for as long as its window will last, and then goes through its window. Afterwards it
goes on, unmeasured, until every other trial has finished too: otherwise the last ones would have the machine to
themselves. Nothing stands between warm-up and window, so that no row starts its window with a full buffer.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.bench.rows import EpochLoader, Minibatch, TrialSpec, open_loader

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Warm:
    """A trial has finished its warm-up."""


@dataclass(frozen=True)
class Failed:
    """A trial cannot go on; ``reason`` is its traceback."""

    reason: str


@dataclass(frozen=True)
class TrialResult:
    """What a trial saw.

    Attributes:
        samples: taken in the window.
        seconds: length of the window.
        cpu_s: CPU seconds of the trial's own process in the window; workers are not in it, threads are.
        epochs: checked for `missing` and `repeated` samples, warm-up included.
        missing: samples that an epoch did not hold, summed over epochs.
        repeated: deliveries beyond the first of a sample in an epoch, summed over epochs.
    """

    samples: int
    seconds: float
    cpu_s: float
    epochs: int
    missing: int
    repeated: int


Message = Warm | Failed | TrialResult


@dataclass(frozen=True)
class Gate:
    """How trials start and stop together."""

    start: Barrier
    stop: Event


@dataclass(frozen=True)
class Window:
    """Length of the window: whole epochs, at least one and at least ``seconds``; or exactly ``epochs``."""

    seconds: float
    epochs: int | None = None

    def is_over(self, epochs: int, elapsed_s: float) -> bool:
        """Return whether a window of ``epochs`` whole epochs in ``elapsed_s`` seconds is long enough."""
        if self.epochs is not None:
            return epochs >= self.epochs
        return epochs >= 1 and elapsed_s >= self.seconds


class Ledger:
    """Counts how often each sample of an epoch came.

    It is not `mbaas.client.ledger`: a benchmark must not check mbaas by mbaas, and other rows have no ledger.
    """

    def __init__(self, samples: int) -> None:
        self.epochs = self.missing = self.repeated = 0
        self._counts = np.zeros(samples, np.int64)

    def add(self, sample_ids: NDArray[np.int64]) -> None:
        """Count a minibatch: int64[n] ids."""
        np.add.at(self._counts, sample_ids, 1)  # not `+= 1`, which counts an id that is there twice once

    def close_epoch(self) -> None:
        """End an epoch: what did not come is missing."""
        self.epochs += 1
        self.missing += int((self._counts == 0).sum())
        self.repeated += int(np.maximum(self._counts - 1, 0).sum())
        self._counts[:] = 0


def touch(array: NDArray[Any]) -> int:
    """Read one byte of every page, as a trial that uses its data does; return their sum.

    Raises:
        ValueError: the array is not in C order, and reading it would mean copying it.
    """
    if not array.flags.c_contiguous:
        raise ValueError("a row must deliver its arrays in C order")
    return int(array.reshape(-1).view(np.uint8)[::PAGE_BYTES].sum())


def read(array: NDArray[Any]) -> int:
    """Read every byte, as a trial that computes with all of its data does; return the largest."""
    return int(array.reshape(-1).view(np.uint8).max(initial=0))


def touch_on_gpu(tensor: Any) -> int:
    """Do as `touch` does with a tensor, and wait until the GPU has."""
    return int(tensor.reshape(-1)[::PAGE_BYTES].sum())


def read_on_gpu(tensor: Any) -> int:
    """Do as `read` does with a tensor, and wait until the GPU has."""
    return int(tensor.max())


def run_trial(spec: TrialSpec, window: Window, gate: Gate, host: Any) -> None:
    """Be a trial; this is the main function of its process.

    It tells ``host`` (a Connection) `Warm`, then `TrialResult`, or `Failed`.
    """
    connection: Connection[Message, None] = host
    try:
        loader = open_loader(spec)
        try:
            on_host, on_gpu = (read, read_on_gpu) if spec.reads_all else (touch, touch_on_gpu)
            consume(loader, window, gate, connection, on_gpu if spec.gpu else on_host)
        finally:
            loader.close()
    except Exception:  # of any library that a row uses: the host has to hear why, or it would wait
        connection.send(Failed(f"trial {spec.trial}: {traceback.format_exc()}"))


def consume(
    loader: EpochLoader,
    window: Window,
    gate: Gate,
    host: Connection[Message, None],
    use: Callable[[Any], int] = touch,
) -> None:
    """Warm up, be measured, and go on until all others were; ``use`` is done to every array of a minibatch."""
    ledger = Ledger(loader.samples)
    gate.start.wait()  # alone, a trial would warm up with the machine to itself
    _measure(loader, window, ledger, use)
    host.send(Warm())
    host.send(_measure(loader, window, ledger, use))
    while not gate.stop.is_set():
        _take(_until(gate.stop, loader.epoch()), ledger, use)


def _measure(loader: EpochLoader, window: Window, ledger: Ledger, use: Callable[[Any], int]) -> TrialResult:
    samples = epochs = 0
    began, began_cpu = time.monotonic(), time.process_time()
    # whole epochs: what a row pays between two of them counts, too, and every one is checked
    while not window.is_over(epochs, time.monotonic() - began):
        samples += _take(loader.epoch(), ledger, use)
        ledger.close_epoch()
        epochs += 1
    seconds, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    return TrialResult(samples, seconds, cpu_s, ledger.epochs, ledger.missing, ledger.repeated)


def _take(minibatches: Iterator[Minibatch], ledger: Ledger, use: Callable[[Any], int]) -> int:
    """Use up ``minibatches``; return the number of samples."""
    samples = 0
    for values, sample_ids in minibatches:
        for array in values:
            use(array)
        ledger.add(sample_ids)
        samples += len(sample_ids)
        del values, array, sample_ids  # a minibatch that is held while the next is asked for takes up room in staging
    return samples


def _until(stop: Event, minibatches: Iterator[Any]) -> Iterator[Any]:
    for minibatch in minibatches:
        yield minibatch
        del minibatch
        if stop.is_set():
            return
