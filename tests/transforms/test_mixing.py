"""MixUp, CutMix and Mosaic: random numbers, labels, boxes, and errors. `prep/test_operations.py` has pixel values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import mbaas.transforms as T
from mbaas.errors import ConfigError

LABELS = np.array([2, 0, 4, 4, 1])


def chance(seed=0):
    return np.random.default_rng(seed)


def images(height=12, width=20):
    """Return float images [5, height, width, 3], each with one value of its own."""
    return np.broadcast_to(np.arange(5.0, dtype=np.float32)[:, None, None, None], (5, height, width, 3)).copy()


def test_labels_have_the_weights_of_the_pixels():
    """Each image keeps as much of its label as it keeps of its own pixels; the other part is the image before it."""
    for seed in range(50):
        for transform in (T.MixUp(alpha=0.4, num_classes=5), T.CutMix(alpha=2.0, num_classes=5)):
            unmixed = images()
            found = transform.apply({"image": unmixed, "label": LABELS, "sample_id": LABELS}, chance(seed))
            own, before = np.eye(5)[LABELS], np.eye(5)[np.roll(LABELS, 1)]
            weight = found["image"].mean(axis=(1, 2, 3))[1]  # a blend of the values 1 and 0
            np.testing.assert_allclose(found["label"], weight * own + (1 - weight) * before, atol=1e-5)
            assert found["label"].dtype == np.float32
            np.testing.assert_array_equal(found["sample_id"], LABELS)
            np.testing.assert_array_equal(unmixed, images(), err_msg="the given images are unchanged")


def test_weights_are_betas():
    weights = [
        T.MixUp(alpha=0.3, num_classes=5).apply({"image": images(), "label": LABELS}, chance(seed))["label"][0, 2]
        for seed in range(3000)
    ]
    assert np.mean(weights) == pytest.approx(0.5, abs=0.03)
    assert np.var(weights) == pytest.approx(1 / (4 * (2 * 0.3 + 1)), abs=0.01)  # of Beta(0.3, 0.3)


@pytest.mark.parametrize("kind", [T.MixUp, T.CutMix])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_get_the_values_of_arrays(kind, dtype):
    transform, pictures = kind(num_classes=5, image="x", label="y"), chance(1).random((5, 12, 20, 3), np.float32)
    array = transform.apply({"x": pictures, "y": LABELS}, chance())
    tensors = {"x": torch.from_numpy(pictures.transpose(0, 3, 1, 2)).to(dtype), "y": torch.from_numpy(LABELS).int()}
    tensor = transform.apply(tensors, chance())
    assert (tensor["x"].dtype, tensor["y"].dtype) == (dtype, torch.float32)
    near = {"atol": 1e-6 if dtype == torch.float32 else 0.02}
    np.testing.assert_allclose(tensor["x"].float().permute(0, 2, 3, 1).numpy(), array["x"], **near)
    np.testing.assert_allclose(tensor["y"].numpy(), array["y"], atol=1e-6)


def test_labels_may_be_rows_of_probabilities_already():
    rows = np.eye(5, dtype=np.float32)[LABELS]
    for labels in (rows, rows.astype(np.int64), torch.from_numpy(rows).long()):
        mixed = T.CutMix().apply({"image": images(), "label": labels}, chance())["label"]
        wanted = T.CutMix(num_classes=5).apply({"image": images(), "label": LABELS}, chance())["label"]
        np.testing.assert_allclose(np.asarray(mixed), wanted, atol=1e-6)
        assert "float32" in str(mixed.dtype)


@pytest.mark.parametrize(
    ("transform", "batch", "sentence"),
    [
        (T.MixUp(), {"image": images()}, "MixUp needs 'label', got a minibatch of 'image'"),
        (T.MixUp(), {"image": [images()[0]], "label": LABELS}, "MixUp needs 'image' of one size, got a list"),
        (T.MixUp(), {"image": images(), "label": LABELS}, "needs num_classes for .*such as MixUp\\(num_classes=10\\)"),
        (T.MixUp(num_classes=4), {"image": images(), "label": LABELS}, "labels must be in \\[0, 3\\], got 0 to 4"),
        (T.CutMix(num_classes=9), {"image": images(), "label": LABELS - 1}, "must be in \\[0, 8\\], got -1 to 3"),
        (
            T.CutMix(num_classes=9),
            {"image": images(), "label": np.zeros((5, 2, 2))},
            "CutMix needs labels \\[n\\] or \\[n, classes\\], got shape \\(5, 2, 2\\)",
        ),
        (
            T.MixUp(num_classes=5),
            {"image": images(), "label": LABELS / 2},
            "MixUp needs whole numbers as labels \\[n\\], got float64",
        ),
        (
            T.MixUp(num_classes=5),
            {"image": images().astype(np.uint8), "label": LABELS},
            "MixUp needs float images, got uint8: end the pipeline with Normalize or ToFloat",
        ),
        (T.CutMix(num_classes=5), {"image": images()[0], "label": LABELS}, "4 axes, got shape \\(12, 20, 3\\)"),
    ],
)
def test_a_minibatch_that_cannot_be_mixed_is_refused(transform, batch, sentence):
    with pytest.raises(ConfigError, match=sentence):
        transform.apply(batch, chance())


def test_bad_parameters_and_places_are_refused():
    with pytest.raises(ConfigError, match=r"^MixUp's alpha must be above 0, got 0.0$"):
        T.MixUp(alpha=0)
    with pytest.raises(ConfigError, match="CutMix's num_classes must be a whole number"):
        T.CutMix(num_classes=1.5)
    with pytest.raises(ConfigError, match=r"is MixUp.*; pass it as batch_fn to join or get_loader"):
        T.Pipeline([T.DecodeImage(), T.MixUp()])


# ---- mosaics ----

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
