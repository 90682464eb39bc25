"""The rows: where a trial's minibatches come from, and the one face that all of them share.

Each row is a module here, imported only by the processes that run it, so that none pays for the libraries of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mbaas.bench.tasks.base import Data, Samples, Task
from mbaas.errors import BadSampleError
from mbaas.fields import Arrays, Packed
from mbaas.prep.engine import BadRow

Values: TypeAlias = Sequence[Any]
"""All arrays of a minibatch that a trial reads, each in C order: what is made of the samples, [n, *shape], whatever
view of it a row's trial would get; and of fields that differ in length the array of each sample. On a GPU they are
tensors there.
"""

Minibatch: TypeAlias = tuple[Values, NDArray[np.int64]]
"""Values and the ids of their samples. They are valid until the next minibatch is taken."""


@dataclass(frozen=True)
class TrialSpec:
    """Everything that a trial's process needs to open its source; picklable.

    Attributes:
        row: one of `mbaas.bench.report.ROWS`.
        trial: number of the trial, from 0.
        trials: how many of them run at once.
        task: what is done to samples.
        data: where they are.
        batch: samples in a minibatch.
        cores: CPUs that prep may use, all trials together.
        seed: order and transforms follow from it.
        workers: worker processes of a DataLoader.
        array: what an mbaas trial asks for, "torch" or "numpy".
        reads_all: whether a trial reads every byte of a minibatch, or one of each page.
        gpu: whether it is prepared on the first GPU, as far as the row can, and wanted there.
        address: where trials find what serves the row, or "" in rows that need nothing served.
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
        """List the samples; a sample's id is its index."""
        return self.task.samples(self.data)


class EpochLoader(Protocol):
    """What gives a trial its epochs. Each holds every sample once: that is what the benchmark checks."""

    samples: int
    """Samples in an epoch."""

    def epoch(self) -> Iterator[Minibatch]:
        """Yield the minibatches of the next epoch."""

    def close(self) -> None:
        """Stop processes and threads; may be called in the middle of an epoch."""


class Service(Protocol):
    """What serves all trials of a row; a context manager, and all of its processes are below the one that enters it."""

    address: str
    """Where trials find it, once it was entered."""

    def __enter__(self) -> Service:
        """Start it."""

    def __exit__(self, *exc_info: object) -> None:
        """Stop it."""

    def spilled_bytes(self) -> int:
        """Return the bytes that it wrote to disk because memory was full."""


_MODULES = {
    "prep": "mbaas.bench.rows.prep",
    "prep-decoded": "mbaas.bench.rows.prep",
    "memory": "mbaas.bench.rows.memory",
    "dataloader": "mbaas.bench.rows.dataloader",
    "dali": "mbaas.bench.rows.dali",
    "mbaas": "mbaas.bench.rows.feed",
    "mbaas-decoded": "mbaas.bench.rows.feed",
    "tensorsocket": "mbaas.bench.rows.tensor_socket",
    "tf-data": "mbaas.bench.rows.tf_data",
    "ray-data": "mbaas.bench.rows.ray_data",
}

_SERVED = frozenset(["prep-decoded", "memory", "mbaas", "mbaas-decoded", "tensorsocket", "tf-data", "ray-data"])
"""Rows whose modules have a `Service`."""


def open_service(spec: TrialSpec, trials: int) -> AbstractContextManager[Service | None]:
    """Return what ``trials`` trials of ``spec.row`` need served; a context of None where they need nothing."""
    if spec.row not in _SERVED:
        return nullcontext()  # and nothing is imported, whose memory would count
    service: AbstractContextManager[Service] = import_module(_MODULES[spec.row]).Service(spec, trials)
    return service


def open_loader(spec: TrialSpec) -> EpochLoader:
    """Open the loader of ``spec.row``. Only that row's libraries are imported."""
    opener: Callable[[TrialSpec], EpochLoader] = import_module(_MODULES[spec.row]).open_loader
    return opener(spec)


def refuse_bad(bad: Sequence[BadRow], sample_ids: NDArray[np.int64], files: Sequence[Path]) -> None:
    """Stop at a sample that cannot be prepared, as mbaas and DALI do by default: else rows could not be compared.

    Raises:
        BadSampleError: names the first one.
    """
    if bad:
        raise BadSampleError(str(files[sample_ids[bad[0].row]]), bad[0].reason)


def known_of(samples: Samples, sample_ids: NDArray[np.int64]) -> Arrays:
    """Return what is known of some samples, for an engine."""
    return {name: column[sample_ids] for name, column in samples.known.items()}


def listed(column: Packed) -> list[NDArray[Any]]:
    """Return the values of each sample as views."""
    values, bounds = column.own()
    return [values[start:stop] for start, stop in pairwise(bounds.tolist())]
