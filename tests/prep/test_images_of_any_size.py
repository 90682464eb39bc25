"""Images that differ in size are prepared as if alone, and stored end to end in the memory of a block."""

from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engines import Batch, Prepared, make_engine
from mbaas.prep.geometry import moved_fields
from mbaas.samples.fields import Arrays, Field, Packed
from mbaas.wire.samples import EngineName

SIZES = [(40, 57), (33, 20), (1, 9), (64, 64), (20, 33)]
ENGINES = pytest.mark.parametrize("kind", ["cpu", "dali"])

PIPELINES: dict[str, list[T.Transform]] = {
    "mirror": [T.RandomHorizontalFlip()],
    "shorter side": [T.RandomHorizontalFlip(), T.Resize(24), T.ColorJitter(0.2)],
    "larger": [T.RandomZoomOut((1.0, 1.5), p=1.0)],
}


def image(number: int) -> Any:
    """Stripes, which reveal a misplaced pixel."""
    height, width = SIZES[number % len(SIZES)]
    return (np.arange(height * width * 3).reshape(height, width, 3) * (number + 1) % 251).astype(np.uint8)


def png(number: int) -> bytes:
    return cv2.imencode(".png", image(number)[:, :, ::-1])[1].tobytes()


def prepared(
    pipeline: T.Pipeline, files: list[bytes], *, kind: EngineName = "cpu", known: Any = None, **more: Any
) -> tuple[Packed, Prepared, Field]:
    """Images, result and field of the prepared files; the first must be good, and the memory is not zeroed."""
    engine = make_engine(kind, pipeline, seed=3, **more)
    known = known or {}
    try:
        field = engine.field(files[0], "first", {name: column[:1] for name, column in known.items()})
        out = field.empty(len(files))
        out.view(np.uint8)[...] = 77
        said = engine.prepare(Batch(files, np.arange(len(files)), 2, known), out)
    finally:
        engine.close()
    assert isinstance(said.made, Packed)
    assert np.shares_memory(said.made.values, out)
    return said.made, said, field


@ENGINES
@pytest.mark.parametrize("name", PIPELINES)
def test_an_image_is_what_it_is_alone_whatever_lies_beside_it(name: str, kind: EngineName) -> None:
    """Reference: the image alone, in a feed of images of its size, which is the oldest code path."""
    steps = [T.DecodeImage(max_pixels=20_000), *PIPELINES[name]]
    files = [png(number) for number in range(11)]
    made, said, field = prepared(T.Pipeline(steps), files, kind=kind, threads=2)
    assert (field, said.bad) == (Field("image", (None, None, 3), "uint8", longest=20_000), [])
    assert len(made.values) == made.bounds[-1] == sum(made.lengths)
    engine = make_engine(kind, T.Pipeline([T.DecodeImage(), *PIPELINES[name]]), seed=3)
    for number, file in enumerate(files):
        found = made.value(number)
        alone = np.empty((1, *found.shape), np.uint8)
        assert engine.prepare(Batch([file], np.array([number]), 2, {}), alone).bad == []
        np.testing.assert_array_equal(found, alone[0])
    engine.close()
    if name == "mirror":
        assert [made.value(number).shape[:2] for number in range(5)] == SIZES
        mirrored = [not (made.value(number) == image(number)).all() for number in range(11)]
        assert 0 < sum(mirrored) < 11


@ENGINES
def test_an_image_that_is_too_large_is_bad_and_takes_no_room(kind: EngineName) -> None:
    files = [png(1), png(0), png(2), b"text", png(3)[:200], png(4)]
    made, said, _ = prepared(T.Pipeline([T.DecodeImage(max_pixels=40 * 57 - 1)]), files, kind=kind)
    assert [bad.row for bad in said.bad] == [1, 3, 4]
    assert said.bad[0].reason == (
        "it is prepared to 57x40, which is 2,280 pixels, over the limit of 2,279 (DecodeImage's max_pixels); a Resize "
        "in the pipeline makes images smaller"
    )
    for row, number in ((0, 1), (2, 2), (5, 4)):
        np.testing.assert_array_equal(made.value(row), image(number))
    assert made.lengths[[1, 3]].tolist() == [0, 0]
    assert not made.value(4).any()
    exact = T.Pipeline([T.DecodeImage(max_pixels=40 * 57)])
    assert [bad.row for bad in prepared(exact, files, kind=kind)[1].bad] == [3, 4]


def grown(image: Any, rng: np.random.Generator) -> Any:
    """Return one float channel with a random number of zero rows added on top."""
    return np.pad(image[:, :, :1].astype(np.float32), ((int(rng.integers(0, 30)), 0), (0, 0), (0, 0)))


def test_what_a_map_returns_may_have_any_size() -> None:
    files = [png(number) for number in range(5)]
    made, said, field = prepared(T.Pipeline([T.DecodeImage(max_pixels=6500), T.Map(grown)]), files, threads=2)
    assert (field, said.bad) == (Field("image", (None, None, 1), "float32", longest=6500), [])
    heights = []
    for number in range(5):
        found, (height, width) = made.value(number), SIZES[number]
        np.testing.assert_array_equal(found[-height:, :, 0], image(number)[:, :, 0])
        assert (found.shape[1], found.dtype) == (width, np.float32)
        heights.append(len(found) - height)
    assert len(set(heights)) > 2
    assert len(made.values) == sum(made.lengths)


def flat(image: Any, rng: np.random.Generator) -> Any:
    return image.ravel()


def other(image: Any, rng: np.random.Generator) -> Any:
    if len(image) == 33:
        return image.astype(np.float64)
    return np.zeros((60, 60, 3), np.uint8) if len(image) == 1 else image


def test_what_a_map_returns_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"^samples may differ in height and width \(DecodeImage's max_pixels\), but"):
        prepared(T.Pipeline([T.DecodeImage(max_pixels=5000), T.Map(flat)]), [png(0)])
    files = [png(number) for number in range(3)]
    made, said, _ = prepared(T.Pipeline([T.DecodeImage(max_pixels=3000), T.Map(other)]), files)
    assert [bad.reason.partition(";")[0] for bad in said.bad] == [
        "it is prepared to float64 [33, 20, 3], but the samples of this feed are uint8 [height, width, 3]",
        "it is prepared to 60x60, which is 3,600 pixels, over the limit of 3,000 (DecodeImage's max_pixels)",
    ]
    np.testing.assert_array_equal(made.value(0), image(0))
    assert made.lengths.tolist() == [40 * 57, 0, 0]


@ENGINES
def test_boxes_points_and_masks_lie_on_images_of_any_size(kind: EngineName) -> None:
    """Each image has a white rectangle. One image is too large, and so would its masks be."""
    files, boxes, texts = [], [], []
    rng = np.random.default_rng(5)
    for height, width in [(60, 80), (90, 50), (300, 300), (70, 70), (61, 83)]:
        (top, left), (h, w) = rng.integers(3, 15, 2).tolist(), rng.integers(15, 30, 2).tolist()
        drawn = np.zeros((height, width, 3), np.uint8)
        drawn[top : top + h, left : left + w] = 255
        files.append(cv2.imencode(".png", drawn)[1].tobytes())
        boxes.append([left, top, left + w, top + h])
        corners = [left, top, left + w, top, left + w, top + h, left, top + h]
        texts.append(np.frombuffer(json.dumps([[corners]]).encode(), np.uint8))
    known: Arrays = {
        "boxes": np.array(boxes, np.float32)[:, None],
        "segmentation": Packed(np.concatenate(texts), np.cumsum([0, *map(len, texts)])),
        "keypoints": np.array([[[left, top]] for left, top, _, _ in boxes], np.float32),
    }
    pipeline = T.Pipeline(
        [T.DecodeImage(max_pixels=50_000), T.RandomIoUCrop(0.8), T.RandomHorizontalFlip()],
        boxes=T.Boxes(),
        keypoints=T.Keypoints(),
        masks=T.Masks(),
    )
    made, said, _ = prepared(pipeline, files, kind=kind, known=known)
    field = next(each for each in pipeline.known(fields_of(known)) if each.name == "masks")
    assert (field.shape, field.longest, field.text) == ((None,) * 3, 50_000, "masks: uint8 [k, h, w]")
    assert [bad.row for bad in said.bad] == [2], "its windows have at least 240x240 pixels"
    masks, points = said.known["masks"], said.known["keypoints"]
    for number, row in enumerate([0, 1, 3, 4]):
        white = made.value(row)[:, :, 0] > 127
        (mask,) = masks.value(number)
        assert mask.shape == white.shape
        assert (white & (mask > 0)).sum() > 0.9 * (white | (mask > 0)).sum()
        ys, xs = np.nonzero(white)
        edges = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert said.known["boxes"][number : number + 1].own()[0][0].tolist() == pytest.approx(edges, abs=1.0)
        assert points[number].shape == (1, 2)


def test_no_masks_are_drawn_of_a_sample_that_is_bad_already() -> None:
    """Its masks would take the memory that its image may not take."""
    text = np.frombuffer(json.dumps([[[1, 1, 5, 1, 5, 5]]]).encode(), np.uint8)
    known: Arrays = {
        "boxes": np.array([[[1, 1, 5, 5]]] * 2, np.float32),
        "segmentation": Packed(np.concatenate([text, text]), np.array([0, len(text), 2 * len(text)])),
    }
    pipeline = T.Pipeline([T.DecodeImage(max_pixels=100)], boxes=T.Boxes(), masks=T.Masks())
    made, bad = moved_fields(pipeline, known, np.array([[9000, 9000], [8, 9]]), [], np.array([True, False]))
    assert (len(made["masks"].values), bad) == (72, {})
    assert made["masks"].value(1).any()


def fields_of(known: Arrays) -> tuple[Field, ...]:
    return tuple(Field.of(name, column) for name, column in known.items())


def test_a_pipeline_that_makes_all_images_one_size_needs_no_limit() -> None:
    pipeline = T.Pipeline([T.DecodeImage(max_pixels=5), T.Resize((8, 9))])
    assert (pipeline.output_shape, pipeline.most_pixels) == ((8, 9, 3), None)
    engine = make_engine("cpu", pipeline, seed=0)
    assert engine.field(png(0), "a", {}) == Field("image", (8, 9, 3), "uint8")


def test_what_the_limit_must_be() -> None:
    for wrong in (0, 1.5, True, "many", 10**9):
        with pytest.raises(
            ConfigError, match=r"^DecodeImage's max_pixels must be a whole number in \[1, 100,000,000\]"
        ):
            T.DecodeImage(max_pixels=wrong)  # type: ignore[arg-type]
    assert eval(repr(T.DecodeImage(9)), {"DecodeImage": T.DecodeImage}) == T.DecodeImage(9) != T.DecodeImage()
    same = T.Pipeline([T.DecodeImage()]).fingerprint
    assert same != T.Pipeline([T.DecodeImage(9)]).fingerprint
    with pytest.raises(ConfigError, match=r"equally large, by a Resize .* or say how large they may be, by"):
        T.Pipeline([T.DecodeImage(), T.RandomIoUCrop()], boxes=T.Boxes())
