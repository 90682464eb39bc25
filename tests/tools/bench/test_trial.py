"""The consumer of all rows detects missing samples, repeated samples, and data that it would have to copy."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from itertools import count
from multiprocessing.synchronize import Event

import numpy as np
import pytest
from numpy.typing import NDArray

from mbaas.tools.bench.host import Gate, Ledger, TrialResult, WarmedUp, consume, read, touch
from mbaas.tools.bench.rows import BenchSettings, Epoch, Minibatch


def faulty(stop: Event) -> Epoch:
    """Seven samples in minibatches of three; epoch 1 lacks sample 4, epoch 2 has sample 5 three times.

    Closes the gate in the first epoch after the requested ones, as a host does.
    """
    numbers = count()

    def epoch() -> Iterator[Minibatch]:
        number = next(numbers)
        ids = {1: [0, 1, 2, 3, 5, 6], 2: [5, 0, 1, 2, 3, 4, 5, 6, 5]}.get(number, list(range(7)))
        if number >= 4:
            stop.set()
        for start in range(0, len(ids), 3):
            part: NDArray[np.int64] = np.array(ids[start : start + 3])
            yield [np.zeros((len(part), 2, 2, 3), np.uint8)], part

    return epoch


def test_missing_and_repeated_samples_are_counted() -> None:
    context = mp.get_context("spawn")
    gate = Gate(context.Barrier(1), context.Event())
    ours, theirs = context.Pipe(duplex=False)
    consume(faulty(gate.stop), Ledger(7), BenchSettings(seconds=0.0, epochs=2), gate, theirs)
    assert isinstance(ours.recv(), WarmedUp)
    result = ours.recv()
    assert isinstance(result, TrialResult)
    assert (result.samples, result.epochs) == (9 + 7, 4), "the two epochs of warm-up are checked, but not in the window"
    assert (result.missing, result.repeated) == (1, 2)
    assert result.seconds > 0


def test_ledger_starts_every_epoch_afresh() -> None:
    ledger = Ledger(3)
    for ids in ([0, 1, 2], [2, 1, 0], [0, 0, 1]):
        ledger.add(np.array(ids))
        ledger.close_epoch()
    assert (ledger.epochs, ledger.missing, ledger.repeated) == (3, 1, 1)


def test_read_reads_every_byte() -> None:
    pixels = np.zeros((5, 7, 3), np.uint8)
    assert read(pixels) == 0
    pixels[4, 6, 2] = 7  # not the first byte of its page, which is all that `touch` reads
    assert (read(pixels), touch(pixels)) == (7, 0)
    assert read(np.array([0.0, -1.0], np.float32)) == 0xBF
    assert read(np.zeros((0, 4))) == 0


def test_touch_reads_each_page_and_copies_nothing() -> None:
    pixels = np.zeros((4, 64, 64, 3), np.uint8)  # 12 pages
    pixels.reshape(-1)[::4096] = 1
    assert touch(pixels) == 12
    decibels = np.zeros((4, 4096), np.float32)  # 16 pages
    decibels.view(np.uint8).reshape(-1)[::4096] = 1
    assert touch(decibels) == 16
    assert touch(np.zeros((0, 4), np.float32)) == 0, "an image without boxes"
    with pytest.raises(ValueError, match="C order"):
        touch(pixels.transpose(0, 3, 1, 2))


def test_window_is_whole_epochs() -> None:
    assert not BenchSettings(seconds=5.0).is_over(3, 4.9)
    assert BenchSettings(seconds=5.0).is_over(3, 5.0)
    assert not BenchSettings(seconds=0.0).is_over(0, 1.0), "at least one epoch"
    assert not BenchSettings(seconds=5.0, epochs=2).is_over(1, 99.0)
    assert BenchSettings(seconds=5.0, epochs=2).is_over(2, 0.1)
