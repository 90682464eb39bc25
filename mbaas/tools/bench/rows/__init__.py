"""The rows: sources of a trial's minibatches.

Each row is a module with a context manager `loader`, and a `service` if its trials share one. It
is imported only by the processes that run it, so that they load no other row's libraries.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from mbaas.base.validation import options
from mbaas.errors import BadSampleError, ConfigError
from mbaas.prep.engines import BadRow
from mbaas.samples.fields import Arrays, Packed
from mbaas.tools.bench import SAMPLES
from mbaas.tools.bench.peers import PEERS
from mbaas.tools.bench.tasks import TASKS
from mbaas.tools.bench.tasks.base import Data, Samples, Task
from mbaas.transforms import Pipeline

Values: TypeAlias = Sequence[Any]
"""Arrays of a minibatch that a trial reads, in C order; tensors on a GPU. They are the prepared samples [n, *shape], as
the row's trial gets them, and one array per sample for fields of varying length.
"""

Minibatch: TypeAlias = tuple[Values, NDArray[np.int64]]
"""Values and the ids of their samples, valid until the next minibatch is taken."""


Epoch: TypeAlias = Callable[[], Iterator[Minibatch]]
"""Returns the minibatches of the next epoch, which must contain every sample once; the benchmark checks this."""


ROWS = ("prep", "prep-decoded", "memory", "dataloader", "dali", *PEERS, "mbaas", "mbaas-decoded")
"""All rows in running order; "prep" is P, the reference for the others."""

PREP_ROWS = ("prep", "prep-decoded")
"""Rows that run one process per core, independent of the number of trials."""

READ_ROW = "memory"
"""Row of trials that only read: the limit of the machine if minibatches cost nothing."""

DECODED_ROWS = ("prep-decoded", "mbaas-decoded")
"""Rows that keep samples decoded. All others keep them encoded, and are comparable with older figures."""

GPU_ROWS = ("prep", "dataloader", "dali", "mbaas")
"""Rows that can run on a GPU."""

PIPELINE_ROWS = ("prep", "prep-decoded", "memory", "dataloader", "mbaas", "mbaas-decoded")
"""Rows whose trials may have different pipelines."""

USUAL_ROWS = tuple(row for row in ROWS if row not in PEERS)
"""Default rows: they need nothing but mbaas[bench]."""


def usable_cores() -> int:
    """Return the number of CPUs that this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0))


AtLeast1 = Annotated[int, Ge(1)]


@options()
class BenchSettings:
    """Options of `mbaas.tools.bench.runner.run`; options of `mbaas bench` have the same names.

    Attributes:
        task: one of `mbaas.tools.bench.tasks.TASKS`: "images", "detection" or "audio".
        data: the user's folder with one folder of images or audio files per class; for detection, a JSON file of COCO
            instances. None generates `samples` samples.
        image_folder: folder of the images of this JSON file.
        cache_dir: folder for generated data, which is kept.
        samples: number of photographs or audio files to generate.
        rows: rows to run, from `ROWS`. Shares of N x P require "prep".
        pipelines: different pipelines; trial number t has pipeline t modulo this. Above 1 only with images, on CPUs,
            and for `PIPELINE_ROWS`.
        trials, batch: numbers of trials N, and batch sizes; every combination is run.
        rounds: number of repetitions of all rows. Rows of a round run one after the other, so that other load on the
            machine affects all rows; results are medians over rounds.
        seconds: minimum length of each trial's timed window, in whole epochs, after a warm-up of the same length.
        epochs: exact number of epochs of the window, instead of ``seconds``.
        cores: CPUs available for prep: prep workers of P and mbaas, threads of DALI, workers of DataLoaders.
        gpu: True to prepare with DALI on the first GPU and deliver minibatches there; P has as many workers as a feed.
            DataLoaders prepare on CPUs, and copy. Only `GPU_ROWS`, with images.
        peers_python: interpreter of another environment, for peers that are not installed in this one.
        read: the part of a minibatch that trials read, in all rows: one byte per page ("pages"), or "all".
        seed: seeds order and transforms.
        timeout_s: time limit of a row; a row that exceeds it is reported as failed.

    Raises:
        ConfigError: an option is out of range.
    """

    task: str = "images"
    data: Path | None = None
    image_folder: Path | None = None
    cache_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "mbaas-bench")
    samples: AtLeast1 = SAMPLES
    rows: tuple[str, ...] = USUAL_ROWS
    trials: tuple[int, ...] = (1, 4, 8)
    batch: tuple[int, ...] = (64, 256)
    pipelines: Annotated[int, Ge(1), Le(8)] = 1
    rounds: AtLeast1 = 3
    seconds: float = 8.0
    epochs: AtLeast1 | None = None
    cores: AtLeast1 = field(default_factory=usable_cores)
    gpu: bool = False
    read: Literal["pages", "all"] = "pages"
    peers_python: Path | None = None
    seed: int = 0
    timeout_s: Annotated[float, Gt(0)] = 300.0

    def is_over(self, epochs: int, elapsed_s: float) -> bool:
        """Return whether a window has ended: after whole epochs, at least one and at least ``seconds`` long."""
        if self.epochs is not None:
            return epochs >= self.epochs
        return epochs >= 1 and elapsed_s >= self.seconds

    def __post_init__(self) -> None:
        for name, values in (("trials", self.trials), ("batch", self.batch)):
            if not values or min(values) < 1:
                raise ConfigError(f"{name} must be at least 1, got {', '.join(map(str, values)) or 'nothing'}")
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds must be at least 0 and finite, got {self.seconds}")
        if self.task not in TASKS:
            raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {self.task}")
        if self.task == "detection" and self.data is not None and self.image_folder is None:
            raise ConfigError(f"image_folder must name the folder of the images that {self.data} tells of, got nothing")
        if self.image_folder is not None and (self.task != "detection" or self.data is None):
            raise ConfigError("image_folder is for task detection, beside data, which names the file that tells of it")
        self._check_rows(ROWS, "")
        peers = [row for row in self.rows if row in PEERS]
        if peers and self.task != "images":
            raise ConfigError(f"task must be images where peers are run ({', '.join(peers)}), got {self.task}")
        if self.pipelines > 1:
            if self.task != "images" or self.gpu:
                raise ConfigError(f"pipelines must be 1 for anything but images on CPUs, got {self.pipelines}")
            self._check_rows(PIPELINE_ROWS, " with several pipelines")
        if self.gpu:
            if self.task != "images":
                raise ConfigError(f"task must be images on a GPU, got {self.task}")
            self._check_rows(GPU_ROWS, " on a GPU")
        if self.peers_python is not None and not os.access(self.peers_python, os.X_OK):
            raise ConfigError(
                f"peers_python must be a Python interpreter, got {self.peers_python}, which cannot be run"
            )

    def _check_rows(self, possible: Sequence[str], where: str) -> None:
        unknown = [row for row in self.rows if row not in possible]
        if unknown or not self.rows:
            raise ConfigError(f"rows must be among {', '.join(possible)}{where}, got {', '.join(unknown) or 'none'}")


@dataclass(frozen=True)
class RowSpec:
    """A row to run, and everything that one of its trials needs to open its source; picklable.

    Attributes:
        row: one of `ROWS`.
        trials: number of concurrent trials; for "prep", of P's processes.
        data: location of the samples.
        batch: samples per minibatch.
        trial: number of a trial, from 0.
        address: address of the row's service, or "" for rows without one.
        python: the row's interpreter, which must have mbaas and the row's libraries.
    """

    settings: BenchSettings
    row: str
    trials: int
    data: Data
    batch: int
    trial: int = 0
    address: str = ""
    python: str = sys.executable

    @property
    def task(self) -> Task:
        return TASKS[self.settings.task]

    def pipeline(self, number: int | None = None) -> Pipeline:
        """Return the pipeline of a trial, by default this one."""
        return self.task.pipeline((self.trial if number is None else number) % self.settings.pipelines)

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
