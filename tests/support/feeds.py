"""Feeds that many tests share."""

from __future__ import annotations

import mbaas
from support.trials import record_epoch

EPOCHS = 40
"""What is decoded anyway is kept as it goes: a few epochs are enough unless something keeps the caches from it."""


def warm(feed: mbaas.Feed) -> mbaas.Feed:
    """Run epochs until the caches are full, with all samples in one form, so that no test changes what they hold."""
    with mbaas.join(feed.name, consumer="warm", format="numpy", wait_timeout_s=60) as loader:
        kept = -1
        for _ in range(EPOCHS):
            record_epoch(loader)
            status = feed.status()
            whole = status.samples - len({sample.sample_id for sample in status.skipped})
            if status.cached_bytes == kept and status.decoded.samples in (0, whole):
                return feed
            kept = status.cached_bytes
    raise AssertionError(f"the cache of {feed.name} still changes after {EPOCHS} epochs: {feed.status()}")
