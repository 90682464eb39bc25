"""Datasets: lists of samples with their known fields, and readers of their bytes."""

from typing import TYPE_CHECKING

from mbaas.dataset.base import Dataset, SampleReader
from mbaas.dataset.synthetic import synthetic
from mbaas.fields import Field, Packed
from mbaas.late import imported_late

if TYPE_CHECKING:
    from mbaas.dataset.coco import read_coco
    from mbaas.dataset.concatenated import concat
    from mbaas.dataset.huggingface import read_huggingface
    from mbaas.dataset.listing import (
        ARRAY_EXTENSIONS,
        AUDIO_EXTENSIONS,
        IMAGE_EXTENSIONS,
        read_arrays,
        read_audio,
        read_images,
    )
    from mbaas.dataset.manifest import read_manifest
    from mbaas.dataset.parquet import read_parquet
    from mbaas.dataset.tfrecord import read_tfrecord
    from mbaas.dataset.webdataset import read_webdataset

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

# The reading functions need much of Arrow. They are imported on first use, because no actor of a feed needs them.
__getattr__ = imported_late(
    __name__,
    {
        "ARRAY_EXTENSIONS": "mbaas.dataset.listing",
        "AUDIO_EXTENSIONS": "mbaas.dataset.listing",
        "IMAGE_EXTENSIONS": "mbaas.dataset.listing",
        "concat": "mbaas.dataset.concatenated",
        "read_arrays": "mbaas.dataset.listing",
        "read_audio": "mbaas.dataset.listing",
        "read_coco": "mbaas.dataset.coco",
        "read_huggingface": "mbaas.dataset.huggingface",
        "read_images": "mbaas.dataset.listing",
        "read_manifest": "mbaas.dataset.manifest",
        "read_parquet": "mbaas.dataset.parquet",
        "read_tfrecord": "mbaas.dataset.tfrecord",
        "read_webdataset": "mbaas.dataset.webdataset",
    },
)
