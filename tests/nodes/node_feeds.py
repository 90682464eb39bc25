"""Pipelines for the feeds of the node tests, and digests of their deliveries."""

from __future__ import annotations

from typing import Any

import mbaas
from mbaas import transforms as T
from support.trials import record_epoch

SAMPLES, BATCH = 1003, 64
OPTIONS = {"batch_size": BATCH, "staging_bytes": 4 << 20}


def augmented() -> T.Pipeline:
    """A random pipeline without resampling, so that prep workers need not import torch."""
    return T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.4), T.RandomHorizontalFlip()])


def digests(feed: mbaas.Feed, epochs: int, consumer: str = "me", **options: Any) -> list[str]:
    """Hash of all bytes of each epoch, which must be exact."""
    with mbaas.join(feed.name, consumer=consumer, format="numpy", **options) as loader:
        records = [record_epoch(loader) for _ in range(epochs)]
    assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * epochs
    return [record.row_digest for record in records]
