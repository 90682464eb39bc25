"""Row "memory": every trial repeatedly reads the same minibatches in shared memory.

Nothing is prepared or moved, and after a few epochs all pages are mapped in every trial. So this is the minimum cost of
a delivered sample. The minibatches take about as much memory as a feed's. A single one would stay in a core's caches,
which do not contain a minibatch that was just prepared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from mbaas.tools.bench.rows import MemoryService, Minibatch, TrialSpec

STAGED_BYTES = 1 << 29
"""Much more than a core's caches, and half of a feed's default staging."""


class Service(MemoryService):
    """Random bytes."""

    def _write(self, file: BinaryIO) -> None:
        count, *shape = _shape(self._spec)
        itemsize = np.dtype(self._spec.task.made.dtype).itemsize
        values = np.random.default_rng(self._spec.seed).bytes(math.prod(shape) * itemsize)
        file.writelines(values for _ in range(count))


def _shape(spec: TrialSpec) -> tuple[int, ...]:
    """Return [minibatches, samples per minibatch, ...]."""
    made = spec.task.made
    return (max(1, STAGED_BYTES // (spec.batch * made.nbytes)), spec.batch, *made.empty(0).shape[1:])


class Loader:
    """Minibatches in shared memory, in turn, with the ids of all samples."""

    def __init__(self, spec: TrialSpec) -> None:
        self.samples, self._batch = len(spec.samples().files), spec.batch
        self._values = np.memmap(spec.address, spec.task.made.dtype, "r", shape=_shape(spec))
        self._next = 0

    def epoch(self) -> Iterator[Minibatch]:
        for first in range(0, self.samples, self._batch):
            ids = np.arange(first, min(first + self._batch, self.samples))
            yield [np.asarray(self._values[self._next])[: len(ids)]], ids
            self._next = (self._next + 1) % len(self._values)

    def close(self) -> None:
        del self._values
