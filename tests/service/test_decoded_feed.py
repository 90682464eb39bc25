"""Minibatches have the same bytes if no samples, some or all are cached decoded."""

from __future__ import annotations

from typing import Any

import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.ray_cluster import actor_names
from support.trials import record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

DATA = synthetic(331, height=96, width=128)
"""331 images of 37 kB each when decoded."""

DECODED_BYTES = 331 * (96 * 128 * 3 + 128)


def augmented() -> T.Pipeline:
    return T.Pipeline([T.DecodeImage(), T.CenterCrop(90), T.RandomHorizontalFlip()])


def epochs(feed: mbaas.Feed, count: int) -> list[str]:
    with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        records = [record_epoch(loader) for _ in range(count)]
    assert all(record.ledger is not None and record.ledger.exact for record in records)
    return [record.row_digest for record in records]


@pytest.fixture(scope="module")
def plain(ray_session: None) -> list[str]:
    with mbaas.serve("plain", DATA, augmented(), batch_size=32, prep_workers=1, cache_decoded=False) as feed:
        digests = epochs(feed, 4)
        assert feed.status().decoded.samples == feed.status().fetched.decoded.samples == 0
    return digests


@pytest.mark.parametrize("share", [0.5, 1.2])
def test_the_same_bytes_come_with_some_and_with_all_samples_kept_decoded(
    share: float, plain: list[str], feed_name: str
) -> None:
    options: dict[str, Any] = {"cache_bytes": int(share * DECODED_BYTES), "prep_workers": 2}
    with mbaas.serve(feed_name, DATA, augmented(), batch_size=32, **options) as feed:
        assert epochs(feed, 4) == plain
        status = feed.status()
        assert 0 < status.fetched.decoded.samples <= status.fetched.all.samples
        assert status.cached_bytes <= options["cache_bytes"]
        if share > 1:  # samples left out in the first epochs follow in the next ones
            wait_until(lambda: bool(epochs(feed, 1)) and feed.status().decoded.samples == len(DATA), "all are decoded")
        else:
            assert 0 < status.decoded.samples < len(DATA)
        told = "samples are to be kept decoded in memory, in up to "
        wait_until(lambda: told in " ".join(feed.status().notes), "the feed says how many it keeps decoded")


def test_the_same_bytes_come_when_workers_and_the_cache_die_again_and_again(plain: list[str], feed_name: str) -> None:
    """Both die in each of three epochs, so decoded samples on their way to the cache are lost."""
    with mbaas.serve(feed_name, DATA, augmented(), batch_size=32, prep_workers=2) as feed:
        digests = []
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            for epoch in range(4):
                for actor in [*actor_names.children(feed.name, "cache").values()] if epoch else []:
                    ray.kill(actor, no_restart=False)
                for actor in [*actor_names.children(feed.name, "prep").values()][:1] if epoch else []:
                    ray.kill(actor)
                digests.append(record_epoch(loader).row_digest)
        assert digests == plain
