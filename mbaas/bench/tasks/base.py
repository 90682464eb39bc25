"""What a task of the benchmark is: the samples, what is made of each, and what a trial reads of a minibatch.

Rows differ in how minibatches come to a trial; a task says which these are. Only the row with a feed reads samples
through `mbaas.dataset`: others have the paths of files, as a program without mbaas has, and pay for no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mbaas.errors import DatasetError
from mbaas.fields import Arrays, Field
from mbaas.transforms import Pipeline

if TYPE_CHECKING:
    from mbaas.dataset import Dataset

Report = Callable[[str], None]
"""A function that is told a line about what is done."""


@dataclass(frozen=True)
class Data:
    """Where the samples are.

    Attributes:
        folder: that of the files.
        annotations: the JSON file that says which objects are on them, as COCO has it; None if files are all there is.
    """

    folder: Path
    annotations: Path | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples; the id of each is its index.

    Attributes:
        files: one for each.
        known: what is known of them without their files, such as boxes: field -> its values.
    """

    files: Sequence[Path]
    known: Arrays = field(default_factory=dict)


class Task(ABC):
    """What trials are trained for, as far as it concerns their data. Picklable."""

    name: ClassVar[str]
    things: ClassVar[str]
    """What samples are, for messages: "images"."""
    work: ClassVar[str]
    """What is done to each, for messages."""
    made: ClassVar[Field]
    """What an engine makes of a sample's bytes."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Which fields of the dataset a trial reads as well: these differ in length, and a trial gets lists of arrays."""

    @abstractmethod
    def make(self, cache_dir: Path, count: int, *, seed: int, report: Report) -> Data:
        """Make ``count`` samples in ``cache_dir``, or find those that were made there with the same arguments.

        Raises:
            DatasetError: a package that they are made of is not installed.
        """

    @abstractmethod
    def find(self, data: Path, image_folder: Path | None) -> Data:
        """Find a user's own samples.

        Args:
            data: what the user named.
            image_folder: where the images are that ``data`` tells of, if it is a file.

        Raises:
            DatasetError: ``data`` has no samples of this task.
        """

    @abstractmethod
    def samples(self, data: Data) -> Samples:
        """List the samples, as a program without mbaas does."""

    @abstractmethod
    def dataset(self, data: Data) -> Dataset:
        """List the same samples, in any order, for a feed."""

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return what is done to each sample. DALI's row does the same by operators of its own."""


def files_below(folder: Path, extensions: Sequence[str]) -> tuple[Path, ...]:
    """List the files of a class-per-folder tree, sorted; leave out hidden ones, as mbaas's readers do."""

    def is_sample(path: Path) -> bool:
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        return path.suffix.lower() in extensions and not is_hidden

    return tuple(sorted(filter(is_sample, folder.glob("*/**/*"))))


def checked_folder(path: Path, wanted: str) -> Path:
    """Return ``path``, which must be a folder.

    Raises:
        DatasetError: it is none; ``wanted`` says what was to be named, and what that must be.
    """
    if not path.is_dir():
        raise DatasetError(f"{path} {'is no folder' if path.exists() else 'does not exist'}; {wanted}")
    return path
