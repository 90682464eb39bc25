"""Masks match pycocotools, torch's nearest-neighbour resizing, and the pixels of the image."""

from __future__ import annotations

import json
import sys
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as coco
from torch.nn.functional import interpolate

from mbaas import transforms as T
from mbaas.errors import ConfigError, ResourceError
from mbaas.prep.engines import BadRow, Batch, Prepared, make_engine
from mbaas.prep.geometry import make_masks, plan, stages_of
from mbaas.samples.fields import Arrays, Field, Packed
from mbaas.transforms.base import Flips, Windows
from mbaas.wire.samples import EngineName

SAMPLES = 24

# pycocotools was built for NumPy 1 and runs with NumPy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")


def drawn(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Result of pycocotools' ``COCO.annToMask``."""
    if isinstance(segmentation, list):
        runs = coco.merge(coco.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        runs = coco.frPyObjects(segmentation, height, width)
    else:
        runs = segmentation
    return coco.decode(runs)


def texts_of(segmentations: list[Any]) -> Packed:
    """Segmentations of samples as a dataset stores them."""
    texts = [json.dumps(each).encode() for each in segmentations]
    return Packed(np.frombuffer(b"".join(texts), np.uint8), np.concatenate([[0], np.cumsum([*map(len, texts)])]))


def blob(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth random shape, which may touch the edges."""
    noise = cv2.resize(rng.random((4, 4)), (width, height), interpolation=cv2.INTER_CUBIC)
    return np.asfortranarray((noise > 0.5).astype(np.uint8))


def written(shape: np.ndarray, form: str) -> Any:
    """Segmentation of a shape as polygons, compressed runs or run lengths."""
    height, width = shape.shape
    if form == "polygons":
        outlines, _ = cv2.findContours(np.ascontiguousarray(shape), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        return [outline.ravel().astype(float).tolist() for outline in outlines]
    if form == "compressed":
        runs = coco.encode(shape)
        return {"size": [height, width], "counts": runs["counts"].decode()}
    flat = shape.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff(np.concatenate([[0], changes, [len(flat)]])).tolist()
    return {"size": [height, width], "counts": [0, *counts] if flat[0] else counts}


@pytest.mark.parametrize("form", ["compressed", "run lengths", "polygons"])
def test_masks_are_those_of_pycocotools(form: str) -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([[40, 57], [33, 20], [1, 9]])
    counts = [3, 2, 1]
    shapes = [[blob(rng, *size) for _ in range(count)] for size, count in zip(sizes.tolist(), counts, strict=True)]
    shapes[2][0][:] = 1
    segmentations = [[written(shape, form) for shape in of_image] for of_image in shapes]
    for row in range(3):
        kept = np.zeros(6, bool)
        bounds = np.array([0, 3, 5, 6])
        kept[bounds[row] : bounds[row + 1]] = True
        masks, bad = make_masks(texts_of(segmentations), kept, bounds, sizes, [], tuple(sizes[row].tolist()))
        assert bad == {}
        assert masks.lengths.tolist() == [count if number == row else 0 for number, count in enumerate(counts)]
        expected = [drawn(each, *sizes[row].tolist()) for each in segmentations[row]]
        np.testing.assert_array_equal(masks.own()[0], expected)
        if form != "polygons":  # polygons run through the middle of pixels
            np.testing.assert_array_equal(masks.own()[0], shapes[row])


def test_masks_take_the_nearest_pixels_as_torch_does() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(30, 120, (SAMPLES, 2))
    shapes = [blob(rng, *size) for size in sizes.tolist()]
    transforms = [T.DecodeImage(), T.RandomZoomOut((1.0, 2.0)), T.RandomResizedCrop((48, 64)), T.RandomHorizontalFlip()]
    pipeline = T.Pipeline([*transforms, T.Resize((40, 40)), T.CenterCrop((50, 32))])
    (stages,) = stages_of(pipeline.prep)
    steps = plan(stages, 0, 0, np.arange(SAMPLES), sizes)
    texts = texts_of([[written(shape, "run lengths")] for shape in shapes])
    masks, bad = make_masks(texts, np.ones(SAMPLES, bool), np.arange(SAMPLES + 1), sizes, steps, (50, 32))
    assert bad == {}
    for row, shape in enumerate(shapes):
        found = torch.from_numpy(np.ascontiguousarray(shape))[None, None].float()
        for step in steps:
            if isinstance(step, Windows):
                top, left, height, width = step.boxes[row].tolist()
                padded = torch.nn.functional.pad(found, (200, 200, 200, 200))
                found = padded[:, :, top + 200 : top + 200 + height, left + 200 : left + 200 + width]
                found = interpolate(found, size=step.sizes[row].tolist(), mode="nearest")
            elif isinstance(step, Flips) and step.which[row]:
                found = found.flip(3)
        # torch computes offsets in float32, which may be one pixel off at whole numbers.
        assert np.mean(masks.own()[0][row] != found[0, 0].numpy()) < 0.005, row


def prepared(
    pipeline: T.Pipeline, segmentations: list[Any], encoded: list[bytes], boxes: Any, engine: EngineName = "cpu"
) -> tuple[np.ndarray, Prepared]:
    known: Arrays = {"boxes": boxes, "segmentation": texts_of(segmentations), "image_id": np.arange(len(encoded))}
    assert pipeline.output_shape is not None
    out = np.full((len(encoded), *pipeline.output_shape), 7, np.uint8)
    made = make_engine(engine, pipeline, seed=4)
    found = made.prepare(Batch(encoded, np.arange(len(encoded)), 1, known), out)
    made.close()
    return out, found


FLIPS = [T.RandomHorizontalFlip(), T.RandomVerticalFlip()]


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("cpu", FLIPS),
        ("dali", FLIPS),
        ("cpu", [T.RandomRotation(90), *FLIPS]),
        ("cpu", [T.RandomPerspective(0.4, p=0.7), T.RandomCrop((64, 72), padding=6)]),
    ],
)
def test_a_mask_is_where_its_pixels_are_and_goes_with_its_box(engine: EngineName, more: list[T.Transform]) -> None:
    rng, encoded, boxes, segmentations = np.random.default_rng(2), [], [], []
    for _ in range(SAMPLES):
        image = np.zeros((90, 110, 3), np.uint8)
        (top, left), (height, width) = rng.integers(5, 30, 2).tolist(), rng.integers(20, 50, 2).tolist()
        corners = [left, top, left + width, top, left + width // 2, top + height]
        image[coco.decode(coco.frPyObjects([corners], 90, 110))[:, :, 0] == 1] = 255
        encoded.append(cv2.imencode(".png", image)[1].tobytes())
        boxes.append([[0, 0, 0, 0], [left, top, left + width, top + height]])
        segmentations.append([[[0, 0, 1, 0, 0, 1]], [list(map(float, corners))]])
    lying = {"boxes": T.Boxes(), "masks": T.Masks()}
    crops = [T.RandomZoomOut((1, 1.5)), T.RandomIoUCrop(), T.Resize((64, 72)), *more]
    pipeline = T.Pipeline([T.DecodeImage(), *crops], **lying)  # type: ignore[arg-type]
    out, found = prepared(pipeline, segmentations, encoded, np.array(boxes, np.float32), engine)
    assert found.bad == []
    masks = found.known["masks"]
    assert list(found.known) == ["boxes", "masks", "image_id"]
    assert masks.lengths.tolist() == found.known["boxes"].lengths.tolist()
    assert masks.values.shape[1:] == (64, 72)
    overlaps = []
    for row in np.flatnonzero(masks.lengths).tolist():
        seen, (mask,) = out[row, :, :, 0] > 127, masks[row : row + 1].own()[0] > 0
        overlaps.append((seen & mask).sum() / max(1, (seen | mask).sum()))
    assert len(overlaps) > SAMPLES * 0.8
    assert np.mean(overlaps) > 0.87  # nearest-pixel masks of small shapes
    assert min(overlaps) > 0.7


NEITHER = "a segmentation is neither polygons nor run lengths: "
ENDS = NEITHER + "ValueError('compressed run lengths that end within a number"
DAMAGED: dict[str, tuple[Any, str]] = {
    "none": (None, "one of its boxes has no segmentation"),
    "no polygon": ([], "one of its boxes has no segmentation"),
    "odd": ([[1, 2, 3]], "a polygon must be a list of x, y, x, y, ..., got 3 values"),
    "nested": ([[[1, 2], [3, 4], [5, 6]]], "a polygon must be a list of x, y, x, y, ..., got 3 values"),
    "text": ([["a", "b"]], NEITHER + "ValueError("),
    "far": ([[1, 2, 3, 4, 1e9, 6]], "a polygon reaches far out of the image of 30x20"),
    "not a number": ([[1, 2, 3, 4, float("nan"), 6]], "a polygon reaches far out of the image of 30x20"),
    "other size": (
        {"size": [30, 20], "counts": [600]},
        "a segmentation is of an image of [30, 20], and this",
    ),
    "too few": ({"size": [20, 30], "counts": [500]}, "run lengths must add up to the 600 pixels of the image, got 500"),
    "too many": (
        {"size": [20, 30], "counts": [500, 200]},
        "run lengths must add up to the 600 pixels",
    ),
    "beyond 64 bits together": (
        {"size": [20, 30], "counts": [2**62] * 4 + [600]},
        "run lengths must add up to the 600 pixels of the image, got 18446744073709552216",
    ),
    "beyond 64 bits": ({"size": [20, 30], "counts": [2**70]}, "run lengths must be whole numbers, at least 0"),
    "negative": ({"size": [20, 30], "counts": [700, -100]}, "run lengths must be whole numbers, at least 0"),
    "fractions": ({"size": [20, 30], "counts": [0.5, 599.5]}, "run lengths must be whole numbers, at least 0"),
    "empty": ({"size": [20, 30], "counts": ""}, ENDS),
    "short": ({"size": [20, 30], "counts": "0"}, "run lengths must add up to the 600 pixels of the image, got 0"),
    "cut": ({"size": [20, 30], "counts": "h"}, ENDS),
    "characters": ({"size": [20, 30], "counts": "é"}, NEITHER + "UnicodeEncodeError("),
    "long": (
        {"size": [20, 30], "counts": "ooooooooooooo0"},
        NEITHER + "ValueError('a compressed run",
    ),
    "keys": ({"counts": [600]}, NEITHER + "KeyError('size')"),
    "kind": (7, NEITHER + "TypeError("),
    "counts": ({"size": [20, 30], "counts": 7}, NEITHER + "AttributeError("),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_sample_whose_segmentation_makes_no_mask_is_a_bad_one(name: str) -> None:
    segmentation, reason = DAMAGED[name]
    image = cv2.imencode(".png", np.full((20, 30, 3), 9, np.uint8))[1].tobytes()
    good = {"size": [20, 30], "counts": [0, 600]}
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((20, 30))], boxes=T.Boxes(), masks=T.Masks("segmentation", "m"))
    boxes = np.array([[[0, 0, 9, 9]]] * 3, np.float32)
    out, found = prepared(pipeline, [[good], [segmentation], [good]], [image] * 3, boxes)
    (bad,) = found.bad
    assert bad.row == 1
    assert bad.reason.startswith(reason)
    assert out[:, 0, 0, 0].tolist() == [9, 0, 9]
    assert found.known["image_id"].tolist() == [0, 2]
    assert found.known["m"].own()[0].mean() == 1
    assert len(found.known["m"]) == len(found.known["boxes"]) == 2


def test_an_image_that_is_bad_is_told_once_and_a_text_must_fit_its_boxes() -> None:
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((20, 30))], boxes=T.Boxes(), masks=T.Masks())
    image = cv2.imencode(".png", np.full((20, 30, 3), 9, np.uint8))[1].tobytes()
    at = image.index(b"IDAT") - 4
    broken = image[:at] + image[at + 12 + int.from_bytes(image[at : at + 4], "big") :]
    boxes = np.array([[[0, 0, 9, 9]]] * 3, np.float32)
    _, found = prepared(pipeline, [[None], [None], []], [b"", broken, image], boxes)
    assert [bad.row for bad in found.bad] == [0, 1, 2]
    assert found.bad[2] == BadRow(2, "it must have a segmentation for each of its 1 boxes, got 0")
    assert len(found.known["masks"]) == 0
    texts = Packed(np.frombuffer(b"[1,{}7", np.uint8), np.array([0, 3, 5, 6]))
    _, bad = make_masks(texts, np.ones(3, bool), np.arange(4), np.array([[9, 9]] * 3), [], (9, 9))
    assert [reason.partition(":")[0] for reason in bad.values()] == [
        "its segmentations are no JSON",
        "it must have a segmentation for each of its 1 boxes, got no list",
        "it must have a segmentation for each of its 1 boxes, got no list",
    ]


def test_a_polygon_without_area_adds_nothing() -> None:
    """pycocotools would take the line's four numbers for a box."""
    line, triangle = [1.0, 1.0, 8.0, 8.0], [1.0, 1.0, 8.0, 1.0, 1.0, 8.0]
    sizes, rows = np.array([[9, 9]] * 3), np.ones(3, bool)
    texts = texts_of([[[line]], [[line, triangle]], [[triangle]]])
    masks, bad = make_masks(texts, rows, np.arange(4), sizes, [], (9, 9))
    assert bad == {}
    values = masks.own()[0]
    assert values[0].sum() == 0 < values[2].sum()
    np.testing.assert_array_equal(values[1], values[2])


FIELDS = (
    Field("boxes", (None, 4), "float32", 9),
    Field("segmentation", (None,), "uint8", 800),
    Field("masks", (), "int64"),
)


def test_what_is_delivered_has_masks_in_place_of_texts() -> None:
    transforms = [T.DecodeImage(), T.Resize((8, 6))]
    known = T.Pipeline(transforms, boxes=T.Boxes(), masks=T.Masks()).known(FIELDS[:2])
    assert known == (FIELDS[0], Field("masks", (None, 8, 6), "uint8", 9))
    with pytest.raises(ConfigError, match=r"^Masks makes the field 'masks', which samples have already$"):
        T.Pipeline(transforms, boxes=T.Boxes(), masks=T.Masks()).known(FIELDS)
    with pytest.raises(
        ConfigError, match=r"^Masks names the field 'rle', but samples have boxes, segmentation, masks$"
    ):
        T.Pipeline(transforms, boxes=T.Boxes(), masks=T.Masks("rle")).known(FIELDS)
    with pytest.raises(ConfigError, match=r"^field 'masks' must have segmentations as text, .*, got int64$"):
        T.Pipeline(transforms, boxes=T.Boxes(), masks=T.Masks("masks")).known(FIELDS)
    with pytest.raises(ConfigError, match=r"^Masks\(.*\) goes by boxes: say in Pipeline's boxes which field has them$"):
        T.Pipeline(transforms, masks=T.Masks())
    with pytest.raises(ConfigError, match=r"^a pipeline with Masks\(.*\) must make all images equally large, by "):
        T.Pipeline([T.DecodeImage()], boxes=T.Boxes(), masks=T.Masks())


def test_a_node_without_pycocotools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    texts, sizes = texts_of([[[[1, 1, 8, 1, 1, 8]]]]), np.array([[9, 9]])
    with pytest.raises(ResourceError, match=r"^prep workers draw masks with pycocotools: pip install"):
        make_masks(texts, np.ones(1, bool), np.arange(2), sizes, [], (9, 9))


def test_without_pycocotools_masks_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^Masks needs pycocotools: pip install pycocotools$"):
        T.Masks()
