"""Base class for tasks of the benchmark: the samples, their pipeline, and the fields that a trial reads.

Only the row with a feed reads samples through `mbaas.dataset`. Other rows use file paths, like a program without mbaas,
and have no extra cost.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mbaas.errors import DatasetError
from mbaas.samples.fields import Arrays, Field
from mbaas.transforms import Pipeline

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

WriteFile = Callable[[Path, int, np.random.Generator], object]
"""Writes the file at a path without its suffix, given its number and random generator."""

Report = Callable[[str], None]
"""Called with one line per progress message."""


@dataclass(frozen=True)
class Data:
    """Folder of the samples, and a COCO JSON file with the objects in the images, if there is one."""

    folder: Path
    annotations: Path | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """Files of all samples (a sample's id is its index), and fields that are not in the files: name -> values."""

    files: Sequence[Path]
    known: Arrays = field(default_factory=dict)


class Task(ABC):
    """The data side of a training task. Picklable."""

    name: ClassVar[str]
    things: ClassVar[str]
    """Plural noun for the samples, for messages: "images"."""
    work: ClassVar[str]
    """Description of the pipeline, for messages."""
    made: ClassVar[Field]
    """Field prepared from a sample's bytes."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Further dataset fields that a trial reads; they vary in length, and a trial gets lists of arrays."""

    @abstractmethod
    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        """Generate ``count`` samples in ``cache_dir``, or find those generated earlier with the same arguments.

        Raises:
            DatasetError: a package for generating them is missing.
        """

    @abstractmethod
    def find(self, data: Path, image_folder: Path | None) -> Data:
        """Find a user's own samples in ``data``; if it is a file, it lists the images of ``image_folder``.

        Raises:
            DatasetError: ``data`` has no samples for this task.
        """

    @abstractmethod
    def samples(self, data: Data) -> Samples:
        """Return the samples, as a program without mbaas would list them."""

    @abstractmethod
    def dataset(self, data: Data) -> Dataset:
        """Return the same samples, in any order, as a dataset for a feed."""

    @abstractmethod
    def pipeline(self, variant: int = 0) -> Pipeline:
        """Return the pipeline. Row "dali" does the same with DALI's operators.

        Only images have a ``variant`` above 0, with other random parameters.
        """


class FolderTask(Task):
    """A task whose samples are files in one folder per class."""

    extensions: ClassVar[tuple[str, ...]]
    kinds: ClassVar[str]
    """The file formats, for messages: "JPEG or PNG files"."""

    def find(self, data: Path, image_folder: Path | None) -> Data:  # noqa: ARG002
        folder = checked_folder(data, f"data must be a folder with a folder of {self.things} for each class")
        if not files_below(folder, self.extensions):
            raise DatasetError(f"no {self.kinds} below the class folders of {folder}")
        return Data(folder)

    def samples(self, data: Data) -> Samples:
        return Samples(files_below(data.folder, self.extensions))


def files_below(folder: Path, extensions: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of a class-per-folder tree, sorted, without hidden ones, like the readers of mbaas."""

    def is_sample(path: Path) -> bool:
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        return path.suffix.lower() in extensions and not is_hidden

    return tuple(sorted(filter(is_sample, folder.glob("*/**/*"))))


def checked_folder(path: Path, wanted: str) -> Path:
    """Return ``path``; raise DatasetError, which ends with ``wanted``, if it is not a folder."""
    if not path.is_dir():
        raise DatasetError(f"{path} {'is no folder' if path.exists() else 'does not exist'}; {wanted}")
    return path


def write_files(folder: Path, count: int, seed: int, classes: Sequence[str], write: WriteFile) -> None:
    """Write ``count`` files in one folder per class, in turns, each with its own random generator."""
    for name in classes:
        (folder / name).mkdir(parents=True)

    def one(index: int) -> None:
        # one generator per file, so that samples do not depend on threads
        name = classes[index % len(classes)]
        write(folder / name / f"{index:06d}", index, np.random.default_rng([seed, index]))

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(one, range(count)):  # consume the results, so that errors are raised
            pass


def made_once(path: Path, write: Callable[[Path], None], what: str, report: Report) -> Path:
    """Return ``path``, a file or folder, which is generated if it does not exist.

    Its name must contain everything that the content depends on. It gets this name only when it is complete, so
    interrupted data is generated again. ``report`` gets one line about ``what`` is generated.
    """
    if path.exists():
        return path
    report(f"making {what} in {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}-{os.getpid()}"
    try:
        write(unfinished)
        unfinished.rename(path)
    except OSError:
        if not path.exists():  # another process may have generated the same data meanwhile, which is fine
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if unfinished.is_file():
            unfinished.unlink()
    return path
