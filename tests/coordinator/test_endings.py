"""A restarted coordinator ends its feed if the dataset is lost, and retries if it may be found."""

from __future__ import annotations

import asyncio

import pytest

from mbaas.coordinator import opening
from mbaas.coordinator.cache_pool import CachePool, FoundCache
from mbaas.coordinator.opening import adopt
from mbaas.core.cluster.events import FeedEnd
from mbaas.errors import FeedFailedError, ResourceError
from mbaas.settings import FeedSettings


def adopted(monkeypatch: pytest.MonkeyPatch, layout: object, found: dict[tuple[str, int], FoundCache]) -> None:
    """Take over a feed whose dataset was not stored, with the given layout and cache nodes."""

    async def caches(_feed: str) -> dict[tuple[str, int], FoundCache]:
        return found

    monkeypatch.setattr(opening.recovery, "recall", lambda _feed: (layout, None))
    monkeypatch.setattr(CachePool, "survivors", staticmethod(caches))
    settings = FeedSettings(name="train", batch_size=8, cache_bytes=0, staging_bytes=1 << 20, prep_workers=1)
    asyncio.run(adopt(settings, None))  # type: ignore[arg-type]  # no worker is started


@pytest.mark.parametrize(("layout", "end"), [(None, FeedEnd.NOT_KEPT), ("a layout", FeedEnd.DATASET_LOST)])
def test_a_feed_ends_when_nobody_knows_its_layout_or_its_dataset(
    monkeypatch: pytest.MonkeyPatch, layout: object, end: FeedEnd
) -> None:
    with pytest.raises(FeedFailedError) as told:
        adopted(monkeypatch, layout, {})
    assert str(told.value) == end.of("train")
    assert str(told.value).startswith("feed 'train' cannot continue: its coordinator died")


def test_a_feed_does_not_end_as_long_as_a_cache_node_may_know_its_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"waits for its 2 cache nodes to tell it, .* \(on 01234567\)"):
        adopted(
            monkeypatch,
            "a layout",
            {("0123456789", 3): FoundCache(None, False), ("0123456789", 4): FoundCache(None, False)},
        )
