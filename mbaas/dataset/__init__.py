"""Datasets: which samples exist, what is known of them, and how their bytes are read."""

import importlib
from typing import TYPE_CHECKING, Any

from mbaas.dataset.base import Dataset, SampleReader
from mbaas.dataset.synthetic import synthetic

if TYPE_CHECKING:
    from mbaas.dataset.coco import read_coco
    from mbaas.dataset.concatenated import concat
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
    from mbaas.dataset.webdataset import read_webdataset

__all__ = [
    "ARRAY_EXTENSIONS",
    "AUDIO_EXTENSIONS",
    "IMAGE_EXTENSIONS",
    "Dataset",
    "SampleReader",
    "concat",
    "read_arrays",
    "read_audio",
    "read_coco",
    "read_images",
    "read_manifest",
    "read_parquet",
    "read_webdataset",
    "synthetic",
]

_LAZY = {
    "ARRAY_EXTENSIONS": "mbaas.dataset.listing",
    "AUDIO_EXTENSIONS": "mbaas.dataset.listing",
    "IMAGE_EXTENSIONS": "mbaas.dataset.listing",
    "concat": "mbaas.dataset.concatenated",
    "read_arrays": "mbaas.dataset.listing",
    "read_audio": "mbaas.dataset.listing",
    "read_coco": "mbaas.dataset.coco",
    "read_images": "mbaas.dataset.listing",
    "read_manifest": "mbaas.dataset.manifest",
    "read_parquet": "mbaas.dataset.parquet",
    "read_webdataset": "mbaas.dataset.webdataset",
}


def __getattr__(name: str) -> Any:
    """Import how datasets are made, and with it much of Arrow, when it is first used: no actor of a feed needs it."""
    if name not in _LAZY:
        raise AttributeError(f"module 'mbaas.dataset' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
