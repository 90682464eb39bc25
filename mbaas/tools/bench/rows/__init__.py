"""The rows: sources of a trial's minibatches, with a common interface.

Each row is a module, imported only by the processes that run it, so that they load no other row's libraries.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import BadSampleError
from mbaas.prep.engines import BadRow
from mbaas.samples.fields import Arrays, Packed
from mbaas.tools.bench.tasks.base import Data, Samples, Task

Values: TypeAlias = Sequence[Any]
"""Arrays of a minibatch that a trial reads, in C order; tensors on a GPU. They are the prepared samples [n, *shape], as
the row's trial gets them, and one array per sample for fields of varying length.
"""

Minibatch: TypeAlias = tuple[Values, NDArray[np.int64]]
"""Values and the ids of their samples, valid until the next minibatch is taken."""


@dataclass(frozen=True)
class TrialSpec:
    """Everything that a trial's process needs to open its source; picklable.

    Attributes:
        row: one of `mbaas.tools.bench.report.ROWS`.
        trial, trials: number of the trial, from 0, and number of concurrent trials.
        task, data: the task, and location of the samples.
        batch: samples per minibatch.
        cores: CPUs available for prep, for all trials together.
        seed: seeds order and transforms.
        workers: worker processes of a DataLoader.
        array: format of an mbaas trial, "torch" or "numpy".
        reads_all: True if a trial reads every byte of a minibatch, False for one byte per page.
        gpu: True to deliver on the first GPU, and to prepare there if the row can.
        address: address of the row's service, or "" for rows without one.
    """

    row: str
    trial: int
    trials: int
    task: Task
    data: Data
    batch: int
    cores: int
    seed: int
    workers: int = 0
    array: str = "numpy"
    reads_all: bool = False
    gpu: bool = False
    address: str = ""

    def samples(self) -> Samples:
        return self.task.samples(self.data)


class EpochLoader(Protocol):
    """Source of a trial's epochs. Each epoch must contain every sample once; the benchmark checks this."""

    samples: int
    """Samples per epoch."""

    def epoch(self) -> Iterator[Minibatch]:
        """Yield the minibatches of the next epoch."""

    def close(self) -> None:
        """Stop processes and threads; may be called in the middle of an epoch."""


class RowService(ABC):
    """Serves all trials of a row; a context manager. All its processes are descendants of the one that enters it."""

    address = ""
    """Address for the trials, valid after entering."""

    def __init__(self, spec: TrialSpec, trials: int) -> None:
        self._spec, self._trials = spec, trials

    @abstractmethod
    def __enter__(self) -> RowService: ...

    @abstractmethod
    def __exit__(self, *exc_info: object) -> None: ...

    def spilled_bytes(self) -> int:
        """Return the bytes written to disk because memory was full."""
        return 0


class MemoryService(RowService):
    """Bytes that trials map from `address`, in anonymous memory: it is released however this process ends."""

    def __enter__(self) -> MemoryService:
        self._memory = os.memfd_create("mbaas-bench")
        self.address = f"/proc/{os.getpid()}/fd/{self._memory}"
        with open(self._memory, "wb", closefd=False) as file:
            self._write(file)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._memory)

    @abstractmethod
    def _write(self, file: BinaryIO) -> None:
        """Write the bytes."""


_MODULES = {
    "prep": "mbaas.tools.bench.rows.prep",
    "prep-decoded": "mbaas.tools.bench.rows.prep",
    "memory": "mbaas.tools.bench.rows.memory",
    "dataloader": "mbaas.tools.bench.rows.dataloader",
    "dali": "mbaas.tools.bench.rows.dali",
    "mbaas": "mbaas.tools.bench.rows.feed",
    "mbaas-decoded": "mbaas.tools.bench.rows.feed",
    "tensorsocket": "mbaas.tools.bench.rows.tensor_socket",
    "tf-data": "mbaas.tools.bench.rows.tf_data",
    "ray-data": "mbaas.tools.bench.rows.ray_data",
}

_SERVED = frozenset(["prep-decoded", "memory", "mbaas", "mbaas-decoded", "tensorsocket", "tf-data", "ray-data"])
"""Rows whose modules have a `Service`, a `RowService`. Each module also has a `Loader`, an `EpochLoader`."""


def open_service(spec: TrialSpec, trials: int) -> AbstractContextManager[RowService | None]:
    """Return the service of ``spec.row`` for ``trials`` trials; a context of None for rows without one."""
    if spec.row not in _SERVED:
        return nullcontext()  # import nothing, since its memory would count
    service: RowService = import_module(_MODULES[spec.row]).Service(spec, trials)
    return service


def open_loader(spec: TrialSpec) -> EpochLoader:
    """Open the loader of ``spec.row``, importing only that row's libraries."""
    loader: EpochLoader = import_module(_MODULES[spec.row]).Loader(spec)
    return loader


def refuse_bad(bad: Sequence[BadRow], sample_ids: NDArray[np.int64], files: Sequence[Path]) -> None:
    """Raise BadSampleError for the first bad sample, as mbaas and DALI do by default, so that rows are comparable."""
    if bad:
        raise BadSampleError(str(files[sample_ids[bad[0].row]]), bad[0].reason)


def known_of(samples: Samples, sample_ids: NDArray[np.int64]) -> Arrays:
    return {name: column[sample_ids] for name, column in samples.known.items()}


def listed(column: Packed) -> list[NDArray[Any]]:
    """Return each sample's values as views."""
    values, bounds = column.own()
    return [values[start:stop] for start, stop in pairwise(bounds.tolist())]
