"""Datasets: lists of samples with their known fields, and readers of their bytes."""

from typing import TYPE_CHECKING

from mbaas.base.imports import imported_late
from mbaas.dataset.base import Dataset, SampleReader
from mbaas.dataset.readers.synthetic import synthetic
from mbaas.samples.fields import Field, Packed

if TYPE_CHECKING:
    from mbaas.dataset.concatenation import concat
    from mbaas.dataset.readers.coco import read_coco
    from mbaas.dataset.readers.folders import (
        ARRAY_EXTENSIONS,
        AUDIO_EXTENSIONS,
        IMAGE_EXTENSIONS,
        read_arrays,
        read_audio,
        read_images,
    )
    from mbaas.dataset.readers.huggingface import read_huggingface
    from mbaas.dataset.readers.manifest import read_manifest
    from mbaas.dataset.readers.parquet import read_parquet
    from mbaas.dataset.readers.tfrecord import read_tfrecord
    from mbaas.dataset.readers.webdataset import read_webdataset

__all__ = [
    "ARRAY_EXTENSIONS",
    "AUDIO_EXTENSIONS",
    "IMAGE_EXTENSIONS",
    "Dataset",
    "Field",
    "Packed",
    "SampleReader",
    "concat",
    "read_arrays",
    "read_audio",
    "read_coco",
    "read_huggingface",
    "read_images",
    "read_manifest",
    "read_parquet",
    "read_tfrecord",
    "read_webdataset",
    "synthetic",
]

_OF_FOLDERS = ("ARRAY_EXTENSIONS", "AUDIO_EXTENSIONS", "IMAGE_EXTENSIONS", "read_arrays", "read_audio", "read_images")
_FORMATS = ("coco", "huggingface", "manifest", "parquet", "tfrecord", "webdataset")

# The reading functions need much of Arrow. They are imported on first use, because no actor of a feed needs them.
__getattr__ = imported_late(
    __name__,
    {
        "concat": "mbaas.dataset.concatenation",
        **dict.fromkeys(_OF_FOLDERS, "mbaas.dataset.readers.folders"),
        **{f"read_{name}": f"mbaas.dataset.readers.{name}" for name in _FORMATS},
    },
)
