"""What the feeds of these tests are made of."""

from __future__ import annotations

import mbaas
from mbaas import transforms as T
from support.trials import record_epoch

SAMPLES = 1003
STAGING_BYTES = 8 << 20
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def augmented() -> T.Pipeline:
    """A pipeline with chance in it, and without resampling, for which each prep worker would import torch."""
    return T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.4), T.RandomHorizontalFlip()])


def warm(feed: mbaas.Feed) -> mbaas.Feed:
    """Run epochs until the cache is full, with all samples in one form, so that no test changes what it holds."""
    with mbaas.join(feed.name, consumer="warm", format="numpy") as loader:
        kept = -1
        for _ in range(40):
            record_epoch(loader)
            status = feed.status()
            if status.cached_bytes == kept and status.decoded.samples in (0, status.samples):
                return feed
            kept = status.cached_bytes
    raise AssertionError(f"the cache of {feed.name} still changes after 40 epochs: {feed.status()}")
