"""A Map combined with boxes and keypoints works before, between and after geometry, which uses its results."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.prep.engines import Batch, Prepared, make_engine
from mbaas.samples.fields import Arrays, Packed

SAMPLES = 24


def rectangles() -> tuple[list[bytes], Arrays]:
    """PNGs of different sizes with one white rectangle each, and their fields; sample 0 has no object."""
    rng, encoded, edges, points = np.random.default_rng(1), [], [], []
    for number in range(SAMPLES):
        height, width = rng.integers(60, 100, 2).tolist()
        top, left = rng.integers(5, 20, 2).tolist()
        bottom, right = top + int(rng.integers(20, 35)), left + int(rng.integers(20, 35))
        image = np.zeros((height, width, 3), np.uint8)
        if number:
            image[top:bottom, left:right] = 255
            edges.append([left, top, right, bottom])
            points.append([[left, top, 2], [right - 1, bottom - 1, 2]])
        encoded.append(cv2.imencode(".png", image)[1].tobytes())
    bounds = np.array([0, *range(SAMPLES)])
    return encoded, {
        "boxes": Packed(np.array(edges, np.float32), bounds),
        "kinds": Packed(np.arange(1, SAMPLES), bounds),
        "keypoints": Packed(np.array(points, np.float32), bounds),
        "age": np.arange(SAMPLES),
    }


def prepared(steps: list[T.Transform], known: Arrays | None = None, threads: int = 2) -> tuple[Any, Prepared]:
    """Prepared images, of any size if needed, and the engine's result."""
    encoded, there = rectangles()
    pipeline = T.Pipeline(
        [T.DecodeImage(max_pixels=40_000), *steps],
        boxes=T.Boxes(beside=("kinds", "keypoints"), min_size=2.0),
        keypoints=T.Keypoints(swaps=((0, 1),)),
    )
    engine = make_engine("cpu", pipeline, seed=4, threads=threads)
    known = there if known is None else known
    field = engine.field(encoded[1], "x", {name: column[1:2] for name, column in known.items()})
    result = engine.prepare(Batch(encoded, np.arange(SAMPLES), 3, known), field.empty(SAMPLES))
    engine.close()
    made = [result.made.value(row) if isinstance(result.made, Packed) else result.made[row] for row in range(SAMPLES)]
    return made, result


def check_places(images: list[Any], known: Arrays, rows: Any, tolerance: float = 1.5) -> int:
    """Check that each box frames the white area of its image; return the number of boxes."""
    count = 0
    for number, row in enumerate(rows):
        boxes, kinds = known["boxes"].value(number), known["kinds"].value(number)
        ys, xs = np.nonzero(images[row][:, :, 0] > 127)
        assert len(boxes) == len(kinds) == len(known["keypoints"].value(number))
        for box, kind in zip(boxes, kinds.tolist(), strict=True):
            assert kind == row
            assert box.tolist() == pytest.approx([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], abs=tolerance)
        count += len(boxes)
    return count


def same(image: Any, rng: np.random.Generator) -> Any:
    return image


GEOMETRY: list[T.Transform] = [
    T.RandomZoomOut((1.0, 1.6)),
    T.RandomIoUCrop(0.6),
    T.RandomHorizontalFlip(),
    T.Resize((70, 80)),
]


@pytest.mark.parametrize("place", range(len(GEOMETRY) + 1))
def test_a_map_that_leaves_the_image_as_it_is_changes_nothing(place: int) -> None:
    """It replaces a transform without effect, because a transform's position determines its random numbers."""
    images, said = prepared([*GEOMETRY[:place], T.ColorJitter(), *GEOMETRY[place:]])
    mapped, found = prepared([*GEOMETRY[:place], T.Map(same), *GEOMETRY[place:]])
    assert said.bad == found.bad == []
    np.testing.assert_array_equal(images, mapped)
    for name in ("boxes", "keypoints"):
        np.testing.assert_allclose(said.known[name].values, found.known[name].values, atol=1e-3)
    assert said.known["kinds"].values.tolist() == found.known["kinds"].values.tolist()
    assert found.known["age"].tolist() == list(range(SAMPLES))
    assert check_places(images, found.known, range(SAMPLES)) > SAMPLES // 2


def framed(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Paste the image into a larger one at a random offset, and shift its boxes and keypoints."""
    top, left = rng.integers(0, 30, 2).tolist()
    image = np.pad(sample["image"], ((top, 5), (left, 0), (0, 0)))
    boxes, points = sample["boxes"], sample["keypoints"]
    boxes += [left, top, left, top]
    points += np.array([left, top, 0], np.float32)
    return {"image": image, "boxes": boxes, "keypoints": points}


@pytest.mark.parametrize(
    "after",
    [
        [],
        [T.RandomHorizontalFlip(1.0)],
        [T.RandomIoUCrop(0.5, sampler_options=(0.1,)), T.Resize((90, 100))],
        [T.Resize(40)],
    ],
)
def test_geometry_sees_the_size_and_the_boxes_that_a_map_gives(after: list[T.Transform]) -> None:
    function = T.Map(framed, fields=["boxes", "keypoints"])
    for threads in (1, 3):
        images, said = prepared([T.RandomHorizontalFlip(), function, *after], threads=threads)
        assert said.bad == []
        assert check_places(images, said.known, range(SAMPLES)) > SAMPLES * 0.8
        for number in range(1, SAMPLES):
            boxes, points = said.known["boxes"].value(number), said.known["keypoints"].value(number)
            if len(boxes) and (points[0, :, 2] == 2).all():
                left, top, right, bottom = boxes[0].tolist()
                assert points[0, :, 0].tolist() == pytest.approx([left, right - 1], abs=1.5)
                # The number of mirrorings decides which point is above.
                assert sorted(points[0, :, 1].tolist()) == pytest.approx([top, bottom - 1], abs=1.5)


@pytest.mark.parametrize("min_size", [0.0, 12.0])
def test_a_map_sees_boxes_that_are_small_but_none_of_which_nothing_is_left(min_size: float) -> None:
    """Empty boxes pass only with min_size 0. The minimum applies at the end, when the boxes are large again."""
    seen = []

    def look(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        seen.append(sample["boxes"])
        return {}

    encoded, known = rectangles()
    steps = [T.CenterCrop(30), T.Resize((6, 6)), T.Map(look, fields=["boxes"]), T.Resize((90, 90))]
    pipeline = T.Pipeline([T.DecodeImage(), *steps], boxes=T.Boxes(min_size=min_size))
    engine, out = make_engine("cpu", pipeline, seed=4), np.empty((SAMPLES, 90, 90, 3), np.uint8)
    # The second box of each image is in the upper left corner, outside the crop.
    boxes = np.repeat(known["boxes"].values, 2, axis=0)
    boxes[1::2] = [0, 0, 3, 3]
    two_each = {**known, "boxes": Packed(boxes, 2 * known["boxes"].bounds)}
    said = engine.prepare(Batch(encoded, np.arange(SAMPLES), 3, two_each), out)
    engine.close()
    lengths = np.concatenate(seen)[:, 2:] - np.concatenate(seen)[:, :2]
    assert (lengths > 0).all() == bool(min_size)
    assert 0 < lengths[lengths > 0].min() < 12
    left = said.known["boxes"].values
    if not min_size:
        assert len(left) == len(boxes)
    else:
        assert SAMPLES // 2 < len(left) < SAMPLES
        assert (left[:, 2:] - left[:, :2]).min() >= 12


def two(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Replace all objects by two small ones and one without a size."""
    image = np.zeros((50, 60, 3), np.uint8)
    image[10:20, 10:30] = image[30:40, 40:55] = 255
    boxes = [[10, 10, 30, 20], [40, 30, 55, 40], [5, 5, 5, 9]]
    return {"image": image, "boxes": boxes, "kinds": [1, 2, 3], "keypoints": np.ones((3, 2, 3))}


def test_a_map_may_give_more_boxes_which_others_then_choose_by() -> None:
    function = T.Map(two, fields=["boxes", "kinds", "keypoints"], longest=3)
    images, said = prepared([function, T.RandomIoUCrop(0.3, sampler_options=(0.5,)), T.RandomHorizontalFlip()])
    assert said.bad == []
    counts = said.known["boxes"].lengths.tolist()
    assert {1} <= set(counts) <= {1, 2}, "a window shows most of an object, and so hardly both"
    for row in range(SAMPLES):
        for left, top, right, bottom in np.rint(said.known["boxes"].value(row)).astype(int).tolist():
            assert (images[row][top:bottom, left:right] == 255).all()
    too_many = T.Map(two, fields=["boxes", "kinds", "keypoints"], longest=2)
    with pytest.raises(Exception, match=r"field 'boxes' must be float32 \[2, 4\], or shorter, got int64 \[3, 4\]"):
        prepared([too_many])


def sometimes_wrong(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Remove only the boxes of sample 3; for sample 5, remove everything and return an invalid image."""
    number = sample["kinds"][0] if len(sample["kinds"]) else 0
    if number == 5:
        return {"boxes": [], "kinds": [], "keypoints": [], "image": [1]}
    return {"boxes": []} if number == 3 else {}


def test_boxes_without_what_goes_beside_them_are_a_bad_sample_alone() -> None:
    function = T.Map(sometimes_wrong, fields=["boxes", "kinds", "keypoints"])
    images, said = prepared([T.RandomHorizontalFlip(), function, T.Resize((64, 64))])
    assert [bad.row for bad in said.bad] == [3, 5]
    assert said.bad[0].reason == "field 'kinds' must have a value for each of its 0 boxes, got 1"
    assert "must return a NumPy array, got list" in said.bad[1].reason
    good = [row for row in range(SAMPLES) if row not in (3, 5)]
    assert said.known["age"].tolist() == good
    assert check_places(images, said.known, good) == SAMPLES - 3


def floats(image: Any, rng: np.random.Generator) -> Any:
    return np.moveaxis(image, 2, 0).astype(np.float32) / 255


def test_what_lies_on_an_image_stays_where_a_map_makes_something_else_of_it() -> None:
    """Geometry cannot use channels-first floats: the height and width of the image before the Map count."""
    encoded, known = rectangles()
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((60, 75)), T.Map(floats)], boxes=T.Boxes())
    engine = make_engine("cpu", pipeline, seed=4)
    field = engine.field(encoded[0], "x", {name: column[:1] for name, column in known.items()})
    assert field.shape == (3, 60, 75)
    out = field.empty(SAMPLES)
    said = engine.prepare(Batch(encoded, np.arange(SAMPLES), 3, known), out)
    engine.close()
    assert said.bad == []
    for row in range(1, SAMPLES):
        ys, xs = np.nonzero(out[row, 0] > 0.5)
        edges = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert said.known["boxes"].value(row)[0].tolist() == pytest.approx(edges, abs=1.5)
