"""Minibatch as a service on Ray: fetch and prepare each minibatch once, and deliver it to every trial.

::

    feed = mbaas.serve("train", mbaas.read_images("train/"), pipeline, batch_size=256)
    loader = mbaas.join("train")
    for batch in loader:
        batch["image"], batch["label"], batch["sample_id"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mbaas.base.imports import imported_late
from mbaas.errors import (
    BadSampleError,
    ConfigError,
    ConsumerRemovedError,
    DatasetError,
    FeedExistsError,
    FeedFailedError,
    FeedGoneError,
    FeedNotFoundError,
    FeedRestartingError,
    MbaasError,
    PrepFailedError,
    ResourceError,
    StateError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from mbaas.client.trainers import transformers_callback
    from mbaas.dataset import (
        Dataset,
        concat,
        read_arrays,
        read_audio,
        read_coco,
        read_huggingface,
        read_images,
        read_manifest,
        read_parquet,
        read_tfrecord,
        read_webdataset,
    )
    from mbaas.feed import Feed, announce, connect, feeds, join, stop
    from mbaas.loader import Loader
    from mbaas.serving import serve
    from mbaas.settings import Disk, Lending, Scaling, Staging, Threads, Timeouts

__version__ = "0.2.0"

__all__ = [
    "BadSampleError",
    "ConfigError",
    "ConsumerRemovedError",
    "Dataset",
    "DatasetError",
    "Disk",
    "Feed",
    "FeedExistsError",
    "FeedFailedError",
    "FeedGoneError",
    "FeedNotFoundError",
    "FeedRestartingError",
    "Lending",
    "Loader",
    "MbaasError",
    "PrepFailedError",
    "ResourceError",
    "Scaling",
    "Staging",
    "StateError",
    "Threads",
    "Timeouts",
    "WaitTimeoutError",
    "announce",
    "concat",
    "connect",
    "feeds",
    "join",
    "read_arrays",
    "read_audio",
    "read_coco",
    "read_huggingface",
    "read_images",
    "read_manifest",
    "read_parquet",
    "read_tfrecord",
    "read_webdataset",
    "serve",
    "stop",
    "transformers_callback",
]

_public = imported_late(
    __name__,
    {
        "Dataset": "mbaas.dataset",
        "concat": "mbaas.dataset",
        "read_arrays": "mbaas.dataset",
        "read_audio": "mbaas.dataset",
        "read_coco": "mbaas.dataset",
        "read_huggingface": "mbaas.dataset",
        "read_images": "mbaas.dataset",
        "read_manifest": "mbaas.dataset",
        "read_parquet": "mbaas.dataset",
        "read_tfrecord": "mbaas.dataset",
        "read_webdataset": "mbaas.dataset",
        "Feed": "mbaas.feed",
        "announce": "mbaas.feed",
        "connect": "mbaas.feed",
        "feeds": "mbaas.feed",
        "join": "mbaas.feed",
        "serve": "mbaas.serving",
        "stop": "mbaas.feed",
        "transformers_callback": "mbaas.client.trainers",
        "Loader": "mbaas.loader",
        "Disk": "mbaas.settings",
        "Lending": "mbaas.settings",
        "Scaling": "mbaas.settings",
        "Staging": "mbaas.settings",
        "Threads": "mbaas.settings",
        "Timeouts": "mbaas.settings",
    },
)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because ``mbaas --help`` needs neither Ray nor Arrow."""
    return _public(name)
