"""Row "memory": every trial reads one minibatch in shared memory, again and again.

Nothing is prepared or moved, and the pages are mapped in every trial from the first epoch on. What a trial does with a
minibatch is what it does in any row, so this is the least that a delivered sample can cost on the machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np

from mbaas.bench.rows import Minibatch, TrialSpec


class Service:
    """Keeps a block of random bytes in memory that trials map. See `mbaas.bench.rows.Service`."""

    def __init__(self, spec: TrialSpec, trials: int) -> None:  # noqa: ARG002
        self._spec = spec
        self.address = ""

    def __enter__(self) -> Service:
        # memory without a name: nothing is left of it, however this process ends
        self._memory = os.memfd_create("mbaas-minibatch")
        self.address = f"/proc/{os.getpid()}/fd/{self._memory}"
        values = np.random.default_rng(self._spec.seed).bytes(math.prod(_shape(self._spec)) * _itemsize(self._spec))
        with open(self._memory, "wb", closefd=False) as file:
            file.write(values)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._memory)

    def spilled_bytes(self) -> int:
        """Return 0: it keeps memory only."""
        return 0


def _shape(spec: TrialSpec) -> tuple[int, ...]:
    made = spec.task.made.empty(0)
    return (spec.batch, *made.shape[1:])


def _itemsize(spec: TrialSpec) -> int:
    return np.dtype(spec.task.made.dtype).itemsize


class SharedMinibatch:
    """One minibatch, under the ids of all. See `mbaas.bench.rows.EpochLoader`."""

    def __init__(self, spec: TrialSpec) -> None:
        self.samples, self._batch = len(spec.samples().files), spec.batch
        self._values = np.memmap(spec.address, spec.task.made.dtype, "r", shape=_shape(spec))

    def epoch(self) -> Iterator[Minibatch]:
        for first in range(0, self.samples, self._batch):
            ids = np.arange(first, min(first + self._batch, self.samples))
            yield [np.asarray(self._values)[: len(ids)]], ids

    def close(self) -> None:
        del self._values


def open_loader(spec: TrialSpec) -> SharedMinibatch:
    """Open the loader of one trial."""
    return SharedMinibatch(spec)
