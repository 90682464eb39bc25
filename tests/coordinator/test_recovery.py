"""A feed's layout and dataset are stored in the key-value store of a real cluster and found again."""

from __future__ import annotations

import numpy as np
import pytest
from ray.experimental import internal_kv

import mbaas
from mbaas.coordinator import recovery
from mbaas.core.layout import Layout
from mbaas.samples.fields import LABEL, Field
from mbaas.samples.order import SampleOrder
from mbaas.wire.samples import SampleSpec


@pytest.fixture
def layout(small_images: mbaas.Dataset) -> Layout:
    return Layout(
        SampleOrder(len(small_images), 0, 64), SampleSpec(Field("image", (8, 8, 3), "uint8"), (LABEL,)), 2, 1000
    )


def keys(feed: str) -> list[bytes]:
    return sorted(internal_kv._internal_kv_list(f"mbaas:feed:{feed}:".encode()))


def test_a_dataset_comes_back_from_several_pieces(ray_session, small_images, layout, feed_name, monkeypatch):
    """1,003 rows are packed in steps of 1,000 bytes into pieces of 500."""
    monkeypatch.setattr(recovery, "PIECE_BYTES", 500)
    monkeypatch.setattr(recovery, "STEP_BYTES", 1000)
    recovery.remember(feed_name, layout, small_images)
    assert len(keys(feed_name)) > 5
    found, dataset = recovery.recall(feed_name)
    assert found == layout
    assert dataset.fingerprint == small_images.fingerprint
    ids = np.arange(len(small_images))
    assert np.array_equal(dataset.lengths(ids), small_images.lengths(ids))
    assert [dataset.uri(i) for i in ids] == [small_images.uri(i) for i in ids]
    monkeypatch.setattr(recovery, "PIECE_BYTES", 10**6)
    recovery.remember(feed_name, layout, small_images)
    assert len(keys(feed_name)) == 2, "pieces that are not needed any more are gone"
    recovery.forget(feed_name)
    assert keys(feed_name) == []
    assert recovery.recall(feed_name) == (None, None)


@pytest.mark.parametrize("most", [0, 1500])
def test_of_a_dataset_that_is_too_large_when_packed_only_the_layout_is_kept(
    ray_session, small_images, layout, feed_name, monkeypatch, most
):
    """The limit is exceeded before the first piece is stored, or after some."""
    recovery.remember(feed_name, layout, small_images)
    monkeypatch.setattr(recovery, "PIECE_BYTES", 500)
    monkeypatch.setattr(recovery, "STEP_BYTES", 1000)
    monkeypatch.setattr(recovery, "MAX_PACKED_BYTES", most)
    recovery.remember(feed_name, layout, small_images)
    assert recovery.recall(feed_name) == (layout, None)
    assert [key.decode().rpartition(":")[2] for key in keys(feed_name)] == ["layout"]
    recovery.forget(feed_name)
