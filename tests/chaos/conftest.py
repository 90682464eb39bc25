"""Feeds with many small blocks and little staging, so that a dead or hanging process is noticed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic

BATCH_SIZE = 20
SAMPLE_BYTES = 8 * 8 * 3 + 16


@pytest.fixture
def serve_small(ray_clean: None, feed_name: str) -> Callable[..., mbaas.Feed]:
    """Serve ``samples`` computed images in blocks of 20; eight blocks fill the budget."""

    def serve(samples: int, *transforms: T.Map, **options: Any) -> mbaas.Feed:
        budget = 8 * BATCH_SIZE * SAMPLE_BYTES
        pipeline = T.Pipeline([T.DecodeImage(), *transforms])
        return mbaas.serve(
            feed_name, synthetic(samples), pipeline, batch_size=BATCH_SIZE, staging_bytes=budget, **options
        )

    return serve
