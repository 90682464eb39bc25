"""Mosaics show the right pixels of four images, and their boxes at the right places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mbaas import ConfigError
from mbaas import transforms as T

HEIGHT, WIDTH = 20, 30


def batch_of(count: int, *, seed: int = 0) -> dict[str, Any]:
    """Images whose pixels name their image, row and column; each box has its image's number as label."""
    rng = np.random.default_rng(seed)
    images = np.empty((count, HEIGHT, WIDTH, 3), np.uint8)
    images[..., 0] = np.arange(count)[:, None, None]
    images[..., 1], images[..., 2] = np.arange(HEIGHT)[None, :, None], np.arange(WIDTH)[None, None, :]
    boxes, labels = [], []
    for number in range(count):
        k = int(rng.integers(0, 5))
        corners = np.sort(rng.random((k, 2, 2)) * (WIDTH, HEIGHT), axis=1)
        boxes.append(corners.reshape(k, 4).astype(np.float32))
        labels.append(np.full(k, number, np.int64))
    return {"image": images, "boxes": boxes, "labels": labels, "sample_id": np.arange(count)}


WITH_LABELS = T.Boxes(beside=("labels",))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_each_pixel_and_box_lies_where_its_image_is_shown(seed: int, count: int) -> None:
    batch = batch_of(count, seed=seed)
    made = T.Mosaic(boxes=WITH_LABELS).apply(batch, np.random.default_rng(seed))
    for row in range(count):
        image = made["image"][row]
        # Within a tile, one image is shown, and its rows and columns go on without a gap.
        shift = image[..., 1].astype(int) - np.arange(HEIGHT)[:, None], image[..., 2].astype(int) - np.arange(WIDTH)
        tiles = {*zip(image[..., 0].ravel().tolist(), *(each.ravel().tolist() for each in shift), strict=True)}
        assert len(tiles) <= 4
        assert all((down <= 0 or right <= 0 or image_number == row) for image_number, down, right in tiles)
        for box, label in zip(made["boxes"][row], made["labels"][row], strict=True):
            left, top, right, bottom = box
            assert 0 <= left < right <= WIDTH
            assert 0 <= top < bottom <= HEIGHT
            x, y = int((left + right) / 2), int((top + bottom) / 2)
            source, its_row, its_column = image[y, x].tolist()
            assert source == label, "the middle of the box shows its image"
            middle = its_column + 0.5, its_row + 0.5
            assert any(_holds(own, middle) for own in batch["boxes"][label])


def _holds(box: NDArray[Any], point: tuple[float, float]) -> bool:
    return bool((box[:2] <= np.add(point, 1)).all() and (np.subtract(point, 1) <= box[2:]).all())


def test_a_whole_box_moves_with_its_image_and_one_that_is_hidden_is_dropped() -> None:
    """The point is drawn for each image; here the same two images are in all tiles."""
    images = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    images[0, 8:12, 10:16] = 255
    batch = {"image": images, "boxes": [np.array([[10, 8, 16, 12]], np.float32)], "labels": [np.array([7])]}
    for seed in range(40):
        made = T.Mosaic(boxes=WITH_LABELS, min_visible=1.0).apply(batch, np.random.default_rng(seed))
        for left, top, right, bottom in made["boxes"][0].astype(int).tolist():
            assert (right - left, bottom - top) == (6, 4)
            assert (made["image"][0, top:bottom, left:right] == 255).all()
        assert made["labels"][0].tolist() == [7] * len(made["boxes"][0])


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_boxes_keep_their_format_and_torch_gives_what_numpy_gives(format: Any) -> None:
    batch = batch_of(5)
    edges = [np.asarray(boxes, np.float64) for boxes in batch["boxes"]]
    batch["boxes"] = [np.asarray(T.on_image.boxes_of(each, format), np.float32) for each in edges]
    mosaic = T.Mosaic(boxes=T.Boxes(format=format, beside=("labels",)))
    there = {
        "image": torch.from_numpy(batch["image"]).permute(0, 3, 1, 2),
        **{name: [torch.from_numpy(value) for value in batch[name]] for name in ("boxes", "labels")},
    }
    here, other = (mosaic.apply(each, np.random.default_rng(3)) for each in (batch, there))
    assert np.array_equal(here["image"], other["image"].permute(0, 2, 3, 1).numpy())
    plain = T.Mosaic(boxes=WITH_LABELS).apply({**batch, "boxes": edges}, np.random.default_rng(3))
    for row in range(5):
        assert np.array_equal(here["boxes"][row], other["boxes"][row].numpy())
        assert np.array_equal(here["labels"][row], other["labels"][row].numpy())
        assert here["boxes"][row].dtype == np.float32
        assert other["labels"][row].dtype == torch.int64
        assert np.allclose(T.on_image.edges_of(here["boxes"][row], format), plain["boxes"][row], atol=1e-4)


def test_the_minibatch_itself_does_not_change_and_equal_draws_give_equal_mosaics() -> None:
    batch = batch_of(4)
    before = {name: [np.array(value) for value in batch[name]] for name in batch}
    first, again = (T.Mosaic(boxes=WITH_LABELS).apply(batch, np.random.default_rng(1)) for _ in range(2))
    for name in batch:
        assert all(np.array_equal(old, new) for old, new in zip(before[name], batch[name], strict=True))
        assert all(np.array_equal(one, other) for one, other in zip(first[name], again[name], strict=True))


def test_without_chance_nothing_changes() -> None:
    batch = batch_of(4)
    made = T.Mosaic(boxes=WITH_LABELS, p=0.0).apply(batch, np.random.default_rng(1))
    assert np.array_equal(made["image"], batch["image"])
    assert all(np.array_equal(one, other) for one, other in zip(made["boxes"], batch["boxes"], strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"boxes": None}, "needs 'boxes', got a minibatch of 'image', 'labels'"),
        ({"image": [np.zeros((2, 2, 3))]}, "of one size, with 4 axes, got a list of different sizes"),
        ({"image": np.zeros((4, 5))}, r"got shape \(4, 5\)"),
        ({"labels": [np.zeros(9)] * 4}, "needs a value of 'labels' for each box, got 9 for"),
    ],
)
def test_minibatches_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    batch = {name: value for name, value in {**batch_of(4), **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        T.Mosaic(boxes=WITH_LABELS).apply(batch, np.random.default_rng(1))


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="boxes must be Boxes"):
        T.Mosaic(boxes="boxes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="p"):
        T.Mosaic(p=1.5)
