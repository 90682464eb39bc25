"""Feeds shared by many tests, because serving one takes seconds. Tests use distinct consumer names."""

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
    """Seed 0, minibatches of 64, two workers, blocks in the object store."""
    with mbaas.serve(
        "plain", photos_data, augmented(), batch_size=64, prep_workers=2, staging_bytes=STAGING_BYTES
    ) as feed:
        yield warm(through_objects(feed))


@pytest.fixture(scope="module")
def slotted(ray_session: None, photos_data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """Like `plain`, with one worker and blocks in its slots."""
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": STAGING_BYTES}
    with mbaas.serve("slotted", photos_data, augmented(), **options) as feed:
        yield warm(feed)


@pytest.fixture(scope="module")
def reseeded(ray_session: None, photos_data: mbaas.Dataset) -> Iterator[mbaas.Feed]:
    """Like `plain`, with seed 1, drop_last and one worker."""
    options = {"batch_size": 64, "seed": 1, "drop_last": True, "prep_workers": 1}
    with mbaas.serve("reseeded", photos_data, augmented(), staging_bytes=STAGING_BYTES, **options) as feed:
        yield warm(feed)


@pytest.fixture(scope="module")
def tiny(ray_session: None) -> Iterator[mbaas.Feed]:
    """Normalized images of 8x8 pixels: blocks of 37 KB, which Ray sends inside messages."""
    pipeline = T.Pipeline([T.DecodeImage(), T.Normalize(MEAN, STD)])
    options = {"batch_size": 64, "prep_workers": 1, "staging_bytes": 300_000, "staging": mbaas.Staging(ahead_blocks=16)}
    with mbaas.serve("tiny", synthetic(SAMPLES), pipeline, **options) as feed:
        yield warm(through_objects(feed))
