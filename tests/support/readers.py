"""Every dataset reader; each writes the same images in its own format and reads them back.

Tests are generated from `READERS`, so that all readers pass the same tests.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

import mbaas
from examples.read_zip import read_zip

if TYPE_CHECKING:
    import datasets

CLASSES = ("ant", "bee", "cat")
SAMPLES, BAD = 31, 7
"""Images in each format, and the index of the invalid one."""

SHAPE = (8, 10, 3)

FileSystem: TypeAlias = pyarrow.fs.FileSystem | None


@dataclass(frozen=True)
class Images:
    """Images to write.

    Attributes:
        encoded: PNG files, including an invalid one.
        labels: class numbers, ascending.
    """

    encoded: list[bytes]
    labels: list[int]

    @property
    def names(self) -> list[str]:
        """The classes as strings."""
        return [CLASSES[label] for label in self.labels]

    def in_folders(self, top: Path) -> list[str]:
        """Write one file per image and return their names relative to ``top``."""
        names = [f"{kind}/{number:03}.png" for number, kind in enumerate(self.names)]
        for name, content in zip(names, self.encoded, strict=True):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_bytes(content)
        return names


def picture(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 255, SHAPE, np.uint8)


def images(samples: int = SAMPLES, bad: int | None = BAD) -> Images:
    encoded = [cv2.imencode(".png", picture(number)[:, :, ::-1])[1].tobytes() for number in range(samples)]
    if bad is not None:
        encoded[bad] = b"no image"
    return Images(encoded, [number * len(CLASSES) // samples for number in range(samples)])


def folders(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    images.in_folders(top)
    return mbaas.read_images(top, filesystem=filesystem)


def manifest(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    table = pa.table({"uri": images.in_folders(top), "label": images.names})
    pq.write_table(table, top / "table.parquet")
    return mbaas.read_manifest(top / "table.parquet", filesystem=filesystem)


def tar_shards(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    """Two shards of different sizes."""
    rows = [*enumerate(zip(images.encoded, images.names, strict=True))]
    for shard, some in (("0.tar", rows[:9]), ("1.tar", rows[9:])):
        with tarfile.open(top / shard, "w") as tar:
            for number, (content, kind) in some:
                for ending, member in (("png", content), ("json", json.dumps({"kind": kind}).encode())):
                    info = tarfile.TarInfo(f"{number:03}.{ending}")
                    info.size = len(member)
                    tar.addfile(info, io.BytesIO(member))
    return mbaas.read_webdataset(f"{top}/{{0..1}}.tar", label_column="kind", filesystem=filesystem)


def parquet_files(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    """Two files of different sizes, in row groups of five."""
    for file, rows in (("0.parquet", slice(0, 9)), ("1.parquet", slice(9, None))):
        table = pa.table({"image": images.encoded[rows], "label": images.names[rows]})
        pq.write_table(table, top / file, row_group_size=5)
    return mbaas.read_parquet(f"{top}/{{0..1}}.parquet", unpacked=top / "unpacked", filesystem=filesystem)


def records(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    """TFRecord, in two files of different sizes."""
    from tfrecord import TFRecordWriter  # not above, because it imports torch, and processes that import this need not

    rows = [*zip(images.encoded, images.names, strict=True)]
    for shard, some in (("0.tfrecord", rows[:9]), ("1.tfrecord", rows[9:])):
        writer = TFRecordWriter(str(top / shard))
        for content, kind in some:
            writer.write({"image": (content, "byte"), "kind": (kind.encode(), "byte")})
        writer.close()
    return mbaas.read_tfrecord(
        f"{top}/{{0..1}}.tfrecord", image_column="image", label_column="kind", filesystem=filesystem
    )


def _huggingface(images: Sequence[bytes | str], labels: list[int]) -> datasets.Dataset:
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=[*CLASSES])}
    )
    rows = [
        {"bytes": None, "path": each} if isinstance(each, str) else {"bytes": each, "path": None} for each in images
    ]
    return datasets.Dataset.from_dict({"image": rows, "label": labels}, features=features)


def arrow_files(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    """Two files written by Hugging Face datasets."""
    _huggingface(images.encoded, images.labels).save_to_disk(top, num_shards=2)
    return mbaas.read_huggingface(top, filesystem=filesystem)


def arrow_objects(top: Path, images: Images, _: FileSystem) -> mbaas.Dataset:
    """An open Hugging Face dataset whose rows are in another order than in its files."""
    import datasets

    turned = _huggingface(images.encoded[::-1], images.labels[::-1])
    turned.save_to_disk(top)
    return mbaas.read_huggingface(datasets.load_from_disk(top).select(range(len(turned) - 1, -1, -1)))


def arrow_paths(top: Path, images: Images, _: FileSystem) -> mbaas.Dataset:
    """A Hugging Face dataset that contains file names."""
    names = [str(top / name) for name in images.in_folders(top)]
    return mbaas.read_huggingface(_huggingface(names, images.labels))


def in_memory(top: Path, images: Images, _: FileSystem) -> mbaas.Dataset:
    """A Hugging Face dataset in memory, without files."""
    return mbaas.read_huggingface(_huggingface(images.encoded, images.labels), unpacked=top / "unpacked")


def own(top: Path, images: Images, _: FileSystem) -> mbaas.Dataset:
    """A user-defined reader."""
    with zipfile.ZipFile(top / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (content, kind) in enumerate(zip(images.encoded, images.names, strict=True)):
            archive.writestr(f"{kind}/{number:03}.png", content)
    return read_zip(top / "images.zip")


def parts(top: Path, images: Images, filesystem: FileSystem) -> mbaas.Dataset:
    """Two parts of a dataset, joined again."""
    whole = folders(top, images, filesystem)
    half = np.arange(len(whole) // 2)
    return mbaas.concat([whole.select(half), whole.select(np.arange(len(half), len(whole)))])


READERS: dict[str, Callable[[Path, Images, FileSystem], mbaas.Dataset]] = {
    reader.__name__: reader
    for reader in (
        folders, manifest, tar_shards, records, parquet_files, arrow_files, arrow_objects, arrow_paths, in_memory, own,
        parts
    )
}  # fmt: skip
"""Name -> function that writes images below a folder and reads them in their order, on a file system if it takes one.
"""
