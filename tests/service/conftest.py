"""Feeds that many tests share, because to serve one takes seconds. Tests use consumers of their own names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from service_feeds import MEAN, SAMPLES, STAGING_BYTES, STD, augmented

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from support.feeds import through_objects, warm


@pytest.fixture(scope="module")
def photos_data() -> mbaas.Dataset:
    """1,003 computed images of 32x32 pixels."""
    return synthetic(SAMPLES, height=32, width=32)


@pytest.fixture(scope="module")
def plain(ray_session: None, photos_data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """Seed 0, batches of 64, two workers; blocks lie in the object store."""
    with mbaas.serve(
        "plain", photos_data, augmented(), batch_size=64, prep_workers=2, staging_bytes=STAGING_BYTES
    ) as feed:
        yield warm(through_objects(feed))


@pytest.fixture(scope="module")
def slotted(ray_session: None, photos_data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """As `plain`, with one worker, in whose slots blocks lie."""
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES}
    with mbaas.serve("slotted", photos_data, augmented(), **options) as feed:
        yield warm(feed)


@pytest.fixture(scope="module")
def reseeded(ray_session: None, photos_data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """As `plain`, but seed 1, drop_last, one worker."""
    options = {"batch_size": 64, "seed": 1, "drop_last": True, "prep_workers": 1}
    with mbaas.serve("reseeded", photos_data, augmented(), staging_bytes=STAGING_BYTES, **options) as feed:
        yield warm(feed)


@pytest.fixture(scope="module")
def tiny(ray_session: None) -> Iterator[mbaas.Feed]:
    """Images of 8x8 pixels, to be normalized: blocks of 37 KB, which Ray sends inside of messages."""
    pipeline = T.Pipeline([T.DecodeImage(), T.Normalize(MEAN, STD)])
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": 300_000, "staging": mbaas.Staging(ahead_blocks=16)}
    with mbaas.serve("tiny", synthetic(SAMPLES), pipeline, **options) as feed:
        yield warm(through_objects(feed))
