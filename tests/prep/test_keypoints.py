"""Keypoints move as in torchvision v2: compared with its kernels for one image, and with white squares on black."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engines import Batch, make_engine
from mbaas.prep.geometry import move_keypoints, plan
from mbaas.samples.fields import Arrays, Field, Packed
from mbaas.transforms.base import Flips, Step, Windows
from mbaas.wire.samples import EngineName

SAMPLES = 30
SWAPS = ((0, 2), (3, 4))


def torchvision_moved(points: np.ndarray, size: list[int], steps: list[Step], row: int) -> np.ndarray:
    """torchvision's ``crop_keypoints``, ``resize_keypoints``, ``horizontal_flip_keypoints``, with COCO visibility."""
    x, y, seen = points[..., 0].copy(), points[..., 1].copy(), np.ones(points.shape[:-1], bool)
    for step in steps:
        if isinstance(step, Windows):
            top, left, height, width = step.boxes[row].tolist()
            x, y = x - left, y - top
            seen &= (x >= 0) & (x < width) & (y >= 0) & (y < height)
            x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
            x, y = x * (step.sizes[row, 1] / width), y * (step.sizes[row, 0] / height)
            size = step.sizes[row].tolist()
        elif isinstance(step, Flips) and step.which[row]:
            x = -(x - (size[1] - 1))
            x, y, seen = (each[..., [2, 1, 0, 4, 3]] for each in (x, y, seen))
            points = points[..., [2, 1, 0, 4, 3], :]
    if points.shape[-1] == 2:
        return np.stack([x, y], axis=-1)
    kept = seen & (points[..., 2] > 0)
    return np.stack([x, y, points[..., 2]], axis=-1) * kept[..., None]


@pytest.mark.parametrize("values", [2, 3])
@pytest.mark.parametrize("of_objects", [False, True])
def test_points_are_where_torchvision_has_them(values: int, of_objects: bool) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 90, (SAMPLES, 2))
    counts = rng.integers(0, 4, SAMPLES) if of_objects else np.ones(SAMPLES, int)
    points = (
        rng.random((counts.sum(), 5, values))
        * np.repeat(sizes[:, ::-1], counts, axis=0)[:, None].repeat(5, 1)[..., [0, 1, 0][:values]]
    )
    if values == 3:
        points[..., 2] = rng.integers(0, 3, points.shape[:-1])
        points[points[..., 2] == 0] = 0
    bounds = np.concatenate([[0], np.cumsum(counts)])
    column: Any = Packed(points, bounds) if of_objects else points
    stages = [(1, T.RandomResizedCrop((30, 40))), (2, T.RandomHorizontalFlip()), (3, T.CenterCrop((36, 20)))]
    steps = plan(stages, 0, 0, np.arange(SAMPLES), sizes)
    found = move_keypoints(T.Keypoints(swaps=SWAPS), column, sizes, steps)
    moved = found.own()[0] if isinstance(found, Packed) else found
    marked = 0
    for row in range(SAMPLES):
        own = slice(bounds[row], bounds[row + 1])
        expected = torchvision_moved(points[own], sizes[row].tolist(), steps, row)
        np.testing.assert_allclose(moved[own], expected, atol=1e-9)
        marked += int((expected[..., -1] == 0).sum())
    assert values == 2 or marked > (points[..., 2] == 0).sum()


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        ("cpu", [T.RandomHorizontalFlip()]),
        ("dali", [T.RandomHorizontalFlip()]),
        ("cpu", [T.RandomVerticalFlip()]),
        ("dali", [T.RandomVerticalFlip()]),
        ("cpu", [T.RandomRotation(180), T.RandomVerticalFlip()]),
        ("cpu", [T.RandomAffine(20, (0.1, 0.1), (0.9, 1.1), 9)]),
        ("cpu", [T.RandomPerspective(0.3, p=0.7)]),
    ],
)
def test_a_point_is_where_its_pixels_are_and_goes_with_its_box(engine: EngineName, steps: list[T.Transform]) -> None:
    rng, encoded, boxes, points = np.random.default_rng(3), [], [], []
    for _ in range(SAMPLES):
        image = np.zeros((80, 100, 3), np.uint8)
        top, left = rng.integers(5, 70, 2).tolist()
        image[top : top + 7, left : left + 7] = 255
        encoded.append(cv2.imencode(".png", image)[1].tobytes())
        boxes.append([[left, top, left + 7, top + 7], [0, 0, 0, 0]])
        points.append([[[left + 3, top + 3, 2]], [[1, 1, 1]]])
    known: Arrays = {"boxes": np.array(boxes, np.float32), "keypoints": np.array(points, np.float32)}
    transforms = [T.DecodeImage(), T.RandomResizedCrop(96, scale=(0.4, 1.0)), *steps]
    pipeline = T.Pipeline(transforms, boxes=T.Boxes(beside=("keypoints",), min_size=3), keypoints=T.Keypoints())
    made, out = make_engine(engine, pipeline, seed=1), np.empty((SAMPLES, 96, 96, 3), np.uint8)
    moved = made.prepare(Batch(encoded, np.arange(SAMPLES), 0, known), out).known["keypoints"]
    made.close()
    seen = 0
    for row in range(SAMPLES):
        own = moved[row : row + 1].own()[0]
        ys, xs = np.nonzero(out[row, :, :, 0] > 127)
        assert len(own) == 1 or not len(xs) or min(np.ptp(xs), np.ptp(ys)) <= 3
        if len(own) and own[0, 0, 2] and min(xs.min(), ys.min()) > 0 and max(xs.max(), ys.max()) < 95:
            assert own[0, 0].tolist() == pytest.approx([xs.mean(), ys.mean(), 2], abs=1.5)
            seen += 1
    assert seen > SAMPLES / 3


def test_points_outside_their_image_are_marked_or_set_to_its_edge_whatever_is_done_to_it() -> None:
    points = np.array([[[-1.0, 3.0, 2.0], [9.5, 7.0, 1.0], [10.0, 3.0, 2.0], [4.0, 8.0, 2.0]]])
    sizes = np.array([[8, 10]])
    seen = move_keypoints(T.Keypoints(), points, sizes, [])
    assert seen.tolist() == [[[0, 0, 0], [9, 7, 1], [0, 0, 0], [0, 0, 0]]]  # type: ignore[union-attr]
    plain = move_keypoints(T.Keypoints(), points[..., :2], sizes, [])
    assert plain.tolist() == [[[0, 3], [9, 7], [9, 3], [4, 7]]]  # type: ignore[union-attr]


def test_points_of_samples_without_objects() -> None:
    column = Packed(np.zeros((0, 17, 3), np.float32), np.zeros(3, np.int64))
    found = move_keypoints(T.Keypoints(), column, np.array([[8, 8]] * 2), [Flips(np.ones(2, bool))])
    assert isinstance(found, Packed)
    assert (len(found), found.values.shape, found.dtype) == (2, (0, 17, 3), np.float32)


FIELDS = (Field("keypoints", (None, 17, 3), "float32", 4), Field("label", (), "int64"), Field("marks", (5, 2), "int64"))


@pytest.mark.parametrize(
    ("keypoints", "told"),
    [
        (T.Keypoints("points"), r"^Keypoints names the field 'points', but samples have keypoints, label, marks$"),
        (T.Keypoints("label"), r"^field 'label' must have key points, float \[..., points, 2 or 3\], got int64$"),
        (T.Keypoints("marks"), r"^field 'marks' must have key points, .*, got int64 \[5, 2\]$"),
        (T.Keypoints(swaps=((3, 17),)), r"^Keypoints swaps point 17, but field 'keypoints' has 17 points$"),
    ],
)
def test_fields_that_are_no_points_are_named(keypoints: T.Keypoints, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        T.Pipeline([T.DecodeImage()], keypoints=keypoints).known(FIELDS)
    assert T.Pipeline([T.DecodeImage()], keypoints=T.Keypoints(swaps=((1, 16),))).known(FIELDS) == FIELDS


@pytest.mark.parametrize("swaps", [((0, 0),), ((0, 1), (1, 2)), ((-1, 0),), (1, 2), ((1,),), "ab"])
def test_swaps_that_cannot_be_are_named(swaps: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Keypoints's swaps must be pairs of points"):
        T.Keypoints(swaps=swaps)
