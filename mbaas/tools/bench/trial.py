"""The consumer of all rows: a process that takes minibatches and reads their arrays.

It warms up for whole epochs, for the length of its window. The window follows without a pause, so that no row starts it
with a full buffer. Then the trial continues, unmeasured, until all other trials have finished; otherwise the last
trials would have the machine to themselves.
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

from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec, Window, open_loader

PAGE_BYTES = 4096


@dataclass(frozen=True)
class WarmedUp:
    """A trial has finished its warm-up."""


@dataclass(frozen=True)
class TrialFailure:
    """A trial has failed; ``reason`` is its traceback."""

    reason: str


@dataclass(frozen=True)
class TrialResult:
    """Measurements of a trial.

    Attributes:
        samples: samples taken in the window.
        seconds: length of the window.
        cpu_s: CPU seconds of the trial's process in the window, including threads, but not worker processes.
        epochs: epochs checked for missing and repeated samples, including the warm-up.
        missing: samples absent from an epoch, summed over epochs.
        repeated: deliveries of a sample after the first in an epoch, summed over epochs.
    """

    samples: int
    seconds: float
    cpu_s: float
    epochs: int
    missing: int
    repeated: int


Message = WarmedUp | TrialFailure | TrialResult


@dataclass(frozen=True)
class Gate:
    """Synchronizes the start and stop of trials."""

    start: Barrier
    stop: Event


class Ledger:
    """Counts deliveries; not `mbaas.client.ledger`, because a benchmark must not check mbaas by mbaas.

    ``use`` is called with every array.
    """

    def __init__(self, samples: int, use: Callable[[Any], int] | None = None) -> None:
        self.epochs = self.missing = self.repeated = 0
        self._counts, self._use = np.zeros(samples, np.int64), use or touch

    def take(self, minibatches: Iterator[Minibatch]) -> int:
        """Use and count all minibatches; return the number of samples."""
        samples = 0
        for values, sample_ids in minibatches:
            for array in values:
                self._use(array)
            self.add(sample_ids)
            samples += len(sample_ids)
            del values, array, sample_ids  # holding a minibatch while taking the next one occupies staging
        return samples

    def add(self, sample_ids: NDArray[np.int64]) -> None:
        np.add.at(self._counts, sample_ids, 1)  # not `+= 1`, which would count a repeated id once

    def close_epoch(self) -> None:
        self.epochs += 1
        self.missing += int((self._counts == 0).sum())
        self.repeated += int(np.maximum(self._counts - 1, 0).sum())
        self._counts[:] = 0


def touch(array: NDArray[Any]) -> int:
    """Return the sum of one byte per page, read like a trial that uses its data; ValueError unless in C order."""
    if not array.flags.c_contiguous:
        raise ValueError("a row must deliver its arrays in C order")
    return int(array.reshape(-1).view(np.uint8)[::PAGE_BYTES].sum())


def read(array: NDArray[Any]) -> int:
    """Read every byte, like a trial that computes with all of its data; return the largest."""
    return int(array.reshape(-1).view(np.uint8).max(initial=0))


def touch_on_gpu(tensor: Any) -> int:
    """Wait for the GPU."""
    return int(tensor.reshape(-1)[::PAGE_BYTES].sum())


def read_on_gpu(tensor: Any) -> int:
    """Wait for the GPU."""
    return int(tensor.max())


def run_trial(spec: RowSpec, gate: Gate, host: Any) -> None:
    """Run a trial in its process; send `WarmedUp` and then `TrialResult`, or `TrialFailure`, to ``host``."""
    connection: Connection[Message, None] = host
    try:
        on_host, on_gpu = (read, read_on_gpu) if spec.reads_all else (touch, touch_on_gpu)
        with open_loader(spec) as epoch:
            ledger = Ledger(len(spec.samples().files), on_gpu if spec.gpu else on_host)
            consume(epoch, ledger, spec.window, gate, connection)
    except Exception:  # from any library: without a message, the host would wait
        connection.send(TrialFailure(f"trial {spec.trial}: {traceback.format_exc()}"))


def consume(epoch: Epoch, ledger: Ledger, window: Window, gate: Gate, host: Connection[Message, None]) -> None:
    """Warm up, measure, and continue until all other trials are done."""
    gate.start.wait()  # together: a single trial would warm up with the machine to itself
    _measure(epoch, ledger, window)
    host.send(WarmedUp())
    host.send(_measure(epoch, ledger, window))
    while not gate.stop.is_set():
        ledger.take(_until(gate.stop, epoch()))


def _measure(epoch: Epoch, ledger: Ledger, window: Window) -> TrialResult:
    samples = epochs = 0
    began, began_cpu = time.monotonic(), time.process_time()
    # whole epochs, so that the cost between two epochs is included, and every epoch is checked
    while not window.is_over(epochs, time.monotonic() - began):
        samples += ledger.take(epoch())
        ledger.close_epoch()
        epochs += 1
    seconds, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    return TrialResult(samples, seconds, cpu_s, ledger.epochs, ledger.missing, ledger.repeated)


def _until(stop: Event, minibatches: Iterator[Any]) -> Iterator[Any]:
    for minibatch in minibatches:
        yield minibatch
        del minibatch
        if stop.is_set():
            return
