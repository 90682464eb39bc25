"""Row "memory": every trial repeatedly reads the same minibatches in shared memory.

Nothing is prepared or moved, and after a few epochs all pages are mapped in every trial. So this is the minimum cost of
a delivered sample. The minibatches take about as much memory as a feed's. A single one would stay in a core's caches,
which do not contain a minibatch that was just prepared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np

from mbaas.tools.bench.rows import Minibatch, TrialSpec

STAGED_BYTES = 1 << 29
"""Much more than a core's caches, and half of a feed's default staging."""


class Service:
    """Random bytes in memory that trials map. See `mbaas.tools.bench.rows.Service`."""

    def __init__(self, spec: TrialSpec, trials: int) -> None:  # noqa: ARG002
        self._spec = spec
        self.address = ""

    def __enter__(self) -> Service:
        # anonymous memory: it is released however this process ends
        self._memory = os.memfd_create("mbaas-minibatches")
        self.address = f"/proc/{os.getpid()}/fd/{self._memory}"
        count, *shape = _shape(self._spec)
        values = np.random.default_rng(self._spec.seed).bytes(math.prod(shape) * _itemsize(self._spec))
        with open(self._memory, "wb", closefd=False) as file:
            file.writelines(values for _ in range(count))
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._memory)

    def spilled_bytes(self) -> int:
        """Return 0: the service uses memory only."""
        return 0


def _shape(spec: TrialSpec) -> tuple[int, ...]:
    """Return [minibatches, samples per minibatch, ...]."""
    made = spec.task.made
    return (max(1, STAGED_BYTES // (spec.batch * made.nbytes)), spec.batch, *made.empty(0).shape[1:])


def _itemsize(spec: TrialSpec) -> int:
    return np.dtype(spec.task.made.dtype).itemsize


class SharedMinibatches:
    """Minibatches in shared memory, in turn, with the ids of all samples. See `mbaas.tools.bench.rows.EpochLoader`."""

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


def open_loader(spec: TrialSpec) -> SharedMinibatches:
    """Open the loader of one trial."""
    return SharedMinibatches(spec)
