"""A custom reader: images in a ZIP archive, in one folder per class.

::

    data = read_zip("photos.zip")
    feed = mbaas.serve("photos", data, pipeline, batch_size=256)

A dataset lists the samples and their fields, and its reader reads their bytes. mbaas adds the rest: order, caches,
retries, splits and resuming. All nodes must be able to read the archive.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mbaas
from mbaas.dataset import IMAGE_EXTENSIONS, Field, SampleReader


def read_zip(path: str | Path, *, years: bool = False) -> mbaas.Dataset:
    """List the images in a ZIP archive without reading them.

    Args:
        path: path of the archive. Its images are named ``class/name.jpg``.
        years: add the field ``year``, the year of each image's date.

    Raises:
        DatasetError: the archive cannot be read, or has no images in folders.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info for info in archive.infolist() if info.filename.lower().endswith(IMAGE_EXTENSIONS)]
    except (OSError, zipfile.BadZipFile) as error:
        raise mbaas.DatasetError(f"cannot read {path}: {error}") from error
    images = sorted((info for info in found if "/" in info.filename), key=lambda info: info.filename)
    if not images:
        raise mbaas.DatasetError(f"{path} has no images in folders, such as cat/1.jpg")
    classes = [info.filename.partition("/")[0] for info in images]
    class_names = tuple(sorted({*classes}))
    # Feeds rely on it: equal fingerprints mean the same samples with the same labels in the same order.
    content = [(info.filename, info.file_size, info.CRC, info.date_time[0] if years else 0) for info in images]
    known: dict[str, NDArray[Any]] = {"label": np.array([class_names.index(name) for name in classes], np.int64)}
    if years:
        known["year"] = np.array([info.date_time[0] for info in images], np.int16)
    return ZipDataset(
        root=str(Path(path).absolute()),
        class_names=class_names,
        fingerprint=hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest(),
        names=tuple(info.filename for info in images),
        sizes=np.array([info.file_size for info in images], np.int64),
        known=known,
    )


@dataclass(frozen=True, eq=False, repr=False)
class ZipDataset(mbaas.Dataset):
    """Images in a ZIP archive; see `read_zip`.

    Attributes:
        names: names of the images in the archive.
        sizes: int64[n], uncompressed bytes of each image.
        known: fields of the samples by name, [n] each.
    """

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    known: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(Field.of(name, values) for name, values in self.known.items())

    def values(self, sample_ids: NDArray[np.int64]) -> dict[str, Any]:
        return {name: values[sample_ids] for name, values in self.known.items()}

    def lengths(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.sizes[sample_ids]

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    def uri(self, sample_id: int) -> str:
        return f"{self.root}/{self.names[sample_id]}"

    def reader(self) -> SampleReader:
        return ZipReader(self)


class ZipReader(SampleReader):
    """Reads images of an archive. One per process; threads share it, as `zipfile.ZipFile` allows."""

    def __init__(self, dataset: ZipDataset) -> None:
        self._dataset, self._archive = dataset, zipfile.ZipFile(dataset.root)

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        uri = self._dataset.uri(sample_id)
        try:
            content = self._archive.read(self._dataset.names[sample_id])
        except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise mbaas.BadSampleError(uri, str(error)) from error
        if len(content) != len(buffer):
            raise mbaas.BadSampleError(uri, f"it has {len(content)} bytes now, {len(buffer)} when it was listed")
        memoryview(buffer)[:] = content
