"""The rows: sources of a trial's minibatches.

Each row is a module with a context manager `loader`, and a `service` if its trials share one. It
is imported only by the processes that run it, so that they load no other row's libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

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


Epoch: TypeAlias = Callable[[], Iterator[Minibatch]]
"""Returns the minibatches of the next epoch, which must contain every sample once; the benchmark checks this."""


@dataclass(frozen=True)
class Window:
    """Length of the window: whole epochs, at least one and at least ``seconds``; or exactly ``epochs``."""

    seconds: float = 0.0
    epochs: int | None = None

    def is_over(self, epochs: int, elapsed_s: float) -> bool:
        if self.epochs is not None:
            return epochs >= self.epochs
        return epochs >= 1 and elapsed_s >= self.seconds


@dataclass(frozen=True)
class RowSpec:
    """A row to run, and everything that one of its trials needs to open its source; picklable.

    Attributes:
        row: one of `mbaas.tools.bench.report.ROWS`.
        trials: number of concurrent trials; for "prep", of P's processes.
        task, data: the task, and location of the samples.
        batch: samples per minibatch.
        cores: CPUs available for prep, for all trials together.
        seed: seeds order and transforms.
        trial: number of a trial, from 0.
        workers: worker processes of a DataLoader.
        array: format of an mbaas trial, "torch" or "numpy".
        reads_all: True if a trial reads every byte of a minibatch, False for one byte per page.
        gpu: True to deliver on the first GPU, and to prepare there if the row can.
        address: address of the row's service, or "" for rows without one.
        window: length of each measurement.
        timeout_s: time limit of the row.
        python: the row's interpreter, which must have mbaas and the row's libraries.
    """

    row: str
    trials: int
    task: Task
    data: Data
    batch: int
    cores: int
    seed: int
    trial: int = 0
    workers: int = 0
    array: str = "numpy"
    reads_all: bool = False
    gpu: bool = False
    address: str = ""
    window: Window = Window()
    timeout_s: float = 300.0
    python: str = sys.executable

    def samples(self) -> Samples:
        return self.task.samples(self.data)


_MODULES = {"prep-decoded": "prep", "mbaas": "feed", "mbaas-decoded": "feed"}
"""Modules of rows, if these are not named like the row."""

_SERVED = frozenset(["prep-decoded", "memory", "mbaas", "mbaas-decoded", "tensorsocket", "tf-data", "ray-data"])
"""Rows whose modules have a `service`."""


def _module(row: str) -> Any:
    return import_module(f"{__name__}.{_MODULES.get(row, row.replace('-', '_'))}")


def open_service(spec: RowSpec) -> AbstractContextManager[str]:
    """Return a context with the address of the service for all trials of a row; "" for rows without one.

    All its processes are descendants of the one that enters it.
    """
    if spec.row not in _SERVED:
        return nullcontext("")  # import nothing, since its memory would count
    service: AbstractContextManager[str] = _module(spec.row).service(spec)
    return service


def open_loader(spec: RowSpec) -> AbstractContextManager[Epoch]:
    """Return a context with the epochs of a trial of ``spec.row``, importing only that row's libraries.

    It may be left in the middle of an epoch, and stops processes and threads.
    """
    loader: AbstractContextManager[Epoch] = _module(spec.row).loader(spec)
    return loader


def spilled_bytes(row: str) -> int:
    """Return the bytes that the service of a row wrote to disk because memory was full."""
    if row not in ("mbaas", "mbaas-decoded", "ray-data"):
        return 0
    from mbaas.ray_cluster import resources

    return resources.spilled_bytes()


def in_shared_memory(write: Callable[[RowSpec, BinaryIO], None]) -> Callable[[RowSpec], AbstractContextManager[str]]:
    """Turn a function that writes bytes into a service that yields the path under which trials map them."""

    @contextmanager
    def service(spec: RowSpec) -> Iterator[str]:
        memory = os.memfd_create("mbaas-bench")  # anonymous: it is released however this process ends
        try:
            with open(memory, "wb", closefd=False) as file:
                write(spec, file)
            yield f"/proc/{os.getpid()}/fd/{memory}"
        finally:
            os.close(memory)

    return service


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
