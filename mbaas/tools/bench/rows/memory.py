"""Row "memory": every trial repeatedly reads the same minibatches in shared memory.

Nothing is prepared or moved, and after a few epochs all pages are mapped in every trial. So this is the minimum cost of
a delivered sample. The minibatches take about as much memory as a feed's. A single one would stay in a core's caches,
which do not contain a minibatch that was just prepared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import BinaryIO

import numpy as np

from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec, in_shared_memory

STAGED_BYTES = 1 << 29
"""Much more than a core's caches, and half of a feed's default staging."""


@in_shared_memory
def service(spec: RowSpec, file: BinaryIO) -> None:
    """Write random bytes."""
    count, *shape = _shape(spec)
    itemsize = np.dtype(spec.task.made.dtype).itemsize
    values = np.random.default_rng(spec.settings.seed).bytes(math.prod(shape) * itemsize)
    file.writelines(values for _ in range(count))


def _shape(spec: RowSpec) -> tuple[int, ...]:
    """Return [minibatches, samples per minibatch, ...]."""
    made = spec.task.made
    return (max(1, STAGED_BYTES // (spec.batch * made.nbytes)), spec.batch, *made.empty(0).shape[1:])


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Map minibatches in shared memory, and yield them in turn, with the ids of all samples."""
    samples = len(spec.samples().files)
    turns = cycle(np.memmap(spec.address, spec.task.made.dtype, "r", shape=_shape(spec)))

    def epoch() -> Iterator[Minibatch]:
        for first in range(0, samples, spec.batch):
            ids = np.arange(first, min(first + spec.batch, samples))
            yield [np.asarray(next(turns))[: len(ids)]], ids

    yield epoch
