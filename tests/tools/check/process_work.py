"""The work of a check's processes. Each process imports this module, so it imports less than the tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mbaas import transforms as T
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.errors import ResourceError, StorageError
from mbaas.tools.check.pool import Stage, begin

# ---- functions of a pool ----


def double(ends_at: int, hangs_at: int, numbers: Sequence[int]) -> list[int]:
    if ends_at in numbers:
        os.kill(os.getpid(), signal.SIGSEGV)
    if hangs_at in numbers:
        time.sleep(60)
    return [2 * number for number in numbers]


def ready(ends_at: int, hangs_at: int) -> partial[list[int]]:
    return partial(double, ends_at, hangs_at)


def stuck() -> None:
    time.sleep(60)


def two_stages(number: int) -> int:
    """Both take most of their limit."""
    time.sleep(0.7)
    begin(Stage(1.0, "the second stage", in_storage=number == 9))
    time.sleep(9 if number >= 8 else 0.7)
    return number


def staged() -> Callable[[int], int]:
    return two_stages


def dies() -> None:
    os._exit(3)


def fails() -> None:
    raise ResourceError("no room")


# ---- pipelines and storage ----


def crop() -> T.Pipeline:
    return T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(8, scale=(0.01, 0.02))])


def crashing(content: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    from support import readers

    if (content[0, 0] == readers.picture(0)[0, 0]).all():
        os.kill(os.getpid(), signal.SIGSEGV)
    if (content[0, 0] == readers.picture(1)[0, 0]).all():
        time.sleep(60)
    return content


def crash() -> T.Pipeline:
    return T.Pipeline([T.DecodeImage(), T.Map(crashing)])


class Outage(SampleReader):
    def __init__(self, inner: SampleReader) -> None:
        self._inner = inner

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        if sample_id == 2:
            raise StorageError("file:2", "connection reset")
        if sample_id == 4:
            raise TimeoutError("no answer")  # a third-party reader's
        if sample_id == 6:
            raise StorageError("file:6", "the file is missing", is_missing=True)
        self._inner.read_into(sample_id, buffer)


@dataclass(frozen=True, eq=False, repr=False)
class FailingStorage(WrappedDataset):
    def reader(self) -> SampleReader:
        return Outage(self.inner.reader())


class NoStorage(SampleReader):
    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        raise StorageError(f"file:{sample_id}", "connection reset")


@dataclass(frozen=True, eq=False, repr=False)
class DeadStorage(WrappedDataset):
    def reader(self) -> SampleReader:
        return NoStorage()
