"""The rows: where a trial's minibatches come from, and the one face that all of them share.

Each row is a module here, imported only by the processes that run it, so that none pays for the libraries of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import BadSampleError
from mbaas.prep.engine import BadRow
from mbaas.transforms import DecodeImage, Pipeline, RandomHorizontalFlip, RandomResizedCrop

Pixels = NDArray[np.uint8]
"""uint8[n, 224, 224, 3] in C order, whatever view of it a row's trial would get."""

Minibatch = tuple[Pixels, NDArray[np.int64]]
"""Pixels and the ids of their samples. They are valid until the next minibatch is taken."""

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
IMAGE_SIZE = 224
SAMPLE_BYTES = IMAGE_SIZE * IMAGE_SIZE * 3


@dataclass(frozen=True)
class TrialSpec:
    """Everything that a trial's process needs to open its source; picklable.

    Attributes:
        row: one of `mbaas.bench.report.ROWS`.
        trial: number of the trial, from 0.
        trials: how many of them run at once.
        folder: the samples, in a folder for each class.
        batch: samples in a minibatch.
        cores: CPUs that prep may use, all trials together.
        seed: order and transforms follow from it.
        workers: worker processes of a DataLoader.
        array: what an mbaas trial asks for, "torch" or "numpy".
        address: of the Ray cluster that serves the feed, or "" in rows without one.
    """

    row: str
    trial: int
    trials: int
    folder: Path
    batch: int
    cores: int
    seed: int
    workers: int = 0
    array: str = "numpy"
    address: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """The samples of ``folder``; a sample's id is its index."""
        return find_files(self.folder)


class EpochLoader(Protocol):
    """What gives a trial its epochs. Each holds every sample once: that is what the benchmark checks."""

    samples: int
    """Samples in an epoch."""

    def epoch(self) -> Iterator[Minibatch]:
        """Yield the minibatches of the next epoch."""

    def close(self) -> None:
        """Stop processes and threads; may be called in the middle of an epoch."""


_MODULES = {
    "prep": "mbaas.bench.rows.prep",
    "dataloader": "mbaas.bench.rows.dataloader",
    "dali": "mbaas.bench.rows.dali",
    "mbaas": "mbaas.bench.rows.feed",
}


def find_files(folder: Path) -> tuple[Path, ...]:
    """List the images of a class-per-folder tree, sorted; leave out hidden ones, as `mbaas.read_images`."""

    def is_sample(path: Path) -> bool:
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        return path.suffix.lower() in EXTENSIONS and not is_hidden

    return tuple(sorted(filter(is_sample, folder.glob("*/**/*"))))


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


def pipeline() -> Pipeline:
    """Make the pipeline of all rows but DALI's, which has an equivalent: random-resized-crop to 224 and flip."""
    return Pipeline([DecodeImage(), RandomResizedCrop(IMAGE_SIZE), RandomHorizontalFlip()])
