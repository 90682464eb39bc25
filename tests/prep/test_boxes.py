"""Boxes move with the pixels under them: a white rectangle on black shows the expected position."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from mbaas import transforms as T
from mbaas.errors import ConfigError, DatasetError
from mbaas.prep.engines import Batch, make_engine
from mbaas.prep.geometry import move_boxes
from mbaas.samples.fields import ANNOTATED_SIZE, Arrays, Field, Packed
from mbaas.transforms.base import Flips, Windows
from mbaas.wire.samples import EngineName
from support.orientation import oriented

SEED, SAMPLES = 7, 40

PIPELINES = {
    "crop": [T.RandomResizedCrop(48, scale=(0.3, 1.0))],
    "crop, mirror, colour": [T.RandomResizedCrop((40, 56)), T.RandomHorizontalFlip(), T.ColorJitter(0.1)],
    "mirror, resize, crop": [T.RandomHorizontalFlip(), T.Resize(50), T.CenterCrop(44)],
    "padded": [T.CenterCrop((120, 130)), T.RandomHorizontalFlip(p=1.0)],
    "crop by boxes": [T.RandomIoUCrop(sampler_options=(0.1, 0.3)), T.Resize((60, 50)), T.RandomHorizontalFlip()],
    "zoomed out": [T.RandomZoomOut((1.0, 2.5), p=0.9), T.RandomHorizontalFlip(), T.Resize((90, 96))],
    "all": [
        T.RandomZoomOut((1.0, 1.5)),
        T.RandomHorizontalFlip(),
        T.RandomIoUCrop(),
        T.ColorJitter(0.1),
        T.Resize((64, 64)),
    ],
    "upside down": [T.RandomVerticalFlip(), T.CenterCrop((120, 130)), T.RandomVerticalFlip(), T.RandomHorizontalFlip()],
    "padded, cropped": [T.Pad((5, 9)), T.RandomCrop((70, 80), padding=4)],
    "jittered in size": [T.ScaleJitter((70, 90), (0.7, 1.5)), T.RandomCrop((80, 80))],
    "rotated": [T.CenterCrop((150, 150)), T.RandomRotation(180)],
    "affine": [T.CenterCrop((170, 180)), T.RandomAffine(30, (0.1, 0.1), (0.8, 1.1), shear=(-9, 9, -5, 5))],
    "in perspective": [T.CenterCrop((140, 150)), T.RandomPerspective(0.4, p=0.8), T.RandomHorizontalFlip()],
    "two crops": [T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.RandomResizedCrop(32, scale=(0.5, 1.0))],
}


def rectangles() -> tuple[list[bytes], np.ndarray]:
    """PNGs of different sizes with one rectangle each, and the edges of the rectangles."""
    rng, encoded, edges = np.random.default_rng(1), [], []
    for _ in range(SAMPLES):
        height, width = rng.integers(60, 100, 2).tolist()
        top, left = rng.integers(0, 30, 2).tolist()
        bottom, right = top + int(rng.integers(15, 30)), left + int(rng.integers(15, 30))
        image = np.zeros((height, width, 3), np.uint8)
        image[top:bottom, left:right] = 255
        encoded.append(cv2.imencode(".png", image)[1].tobytes())
        edges.append((left, top, right, bottom))
    return encoded, np.array(edges, np.float32)


def written(edges: np.ndarray, format: str) -> np.ndarray:
    left, top, right, bottom = edges.T
    if format == "xywh":
        return np.stack([left, top, right - left, bottom - top], axis=1)
    if format == "cxcywh":
        return np.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], axis=1)
    return edges


@pytest.mark.parametrize("engine", ["cpu", "dali"])
@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_box_is_where_its_pixels_are(name: str, format: Any, engine: EngineName) -> None:
    encoded, edges = rectangles()
    boxes = T.Boxes(format=format, beside=("classes",), min_size=3.0)
    pipeline = T.Pipeline([T.DecodeImage(), *PIPELINES[name]], boxes=boxes)
    ids, epoch, shape = np.arange(SAMPLES), 3, pipeline.output_shape
    assert shape is not None
    images = np.empty((SAMPLES, *shape), np.uint8)
    # The second box of each sample has no size and is never delivered.
    values = np.repeat(written(edges, format), 2, axis=0)
    values[1::2] = written(np.repeat(edges[:, :2], 2, axis=0).reshape(-1, 4), format)
    known: Arrays = {
        "boxes": Packed(values, 2 * np.arange(SAMPLES + 1)),
        "classes": np.stack([ids, ids + 100], axis=1),
        "age": ids,
    }
    made = make_engine(engine, pipeline, seed=SEED)
    prepared = made.prepare(Batch(encoded, ids, epoch, known), images)
    made.close()
    assert prepared.bad == []
    moved = prepared.known
    assert moved["age"] is ids
    found, dropped = moved["boxes"], 0
    assert found.dtype == np.float32
    for row in range(SAMPLES):
        ys, xs = np.nonzero(images[row, :, :, 0] > 127)
        box = found[row : row + 1].own()[0]
        if not len(box):
            dropped += 1
            # RandomIoUCrop also drops boxes whose centre is outside the crop.
            by_boxes = any(isinstance(each, T.RandomIoUCrop) for each in pipeline.transforms)
            assert by_boxes or not len(xs) or min(np.ptp(xs), np.ptp(ys)) <= 3
            continue
        (values_of_box,) = box
        assert written(np.array([[xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]]), format)[0] == pytest.approx(
            values_of_box, abs=2
        )
        assert moved["classes"][row : row + 1].own()[0].tolist() == [row]
    assert dropped < SAMPLES / 2


@pytest.mark.parametrize("engine", ["cpu", "dali"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_as_it_was_when_boxes_were_drawn_on_it(orientation: int, engine: EngineName) -> None:
    """Four times the same stored pixels; annotated size: as shown, as stored, another image's, unknown.

    If the shown and the stored size are equal, the annotation is ambiguous, and the image is shown as EXIF specifies.
    """
    upright = np.zeros((60, 90, 3), np.uint8)
    upright[8:24, 48:80] = 255
    stored = oriented(upright, orientation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(stored).save(file, "JPEG", quality=95, subsampling=0, exif=exif)
    is_turned = stored.shape != upright.shape
    ys, xs = np.nonzero((stored if is_turned else upright)[:, :, 0])
    drawn = [[48, 8, 80, 24], [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]]
    known: Arrays = {
        "boxes": np.array([*drawn, drawn[0], drawn[0]], np.float32)[:, None],
        ANNOTATED_SIZE: np.array([(60, 90), stored.shape[:2], (30, 45), (0, 0)], np.int32),
    }
    pipeline = T.Pipeline([T.DecodeImage(), T.CenterCrop(100)], boxes=T.Boxes())
    out = np.empty((4, 100, 100, 3), np.uint8)
    made = make_engine(engine, pipeline, seed=SEED)
    prepared = made.prepare(Batch([file.getvalue()] * 4, np.arange(4), 0, known), out)
    made.close()
    assert [(bad.row, bad.reason) for bad in prepared.bad] == [
        (2, "its boxes are of an image of 45 x 30 pixels (width x height), and it has 90 x 60")
    ]
    moved = prepared.known["boxes"].own()[0].astype(int).tolist()
    for row, (left, top, right, bottom) in zip((0, 1, 3), moved, strict=True):
        inside = out[row, top:bottom, left:right]
        assert inside.mean() > 250, "the object is in its box"
        assert out[row].sum() - inside.sum() < 0.1 * inside.sum(), "and nowhere else"
    assert moved[0] == moved[2]
    assert (moved[0] != moved[1]) == is_turned


@pytest.mark.parametrize("boxes", [T.Boxes(beside=("classes",)), None])
@pytest.mark.parametrize("engine", ["cpu", "dali"])
def test_good_samples_keep_their_own_fields_beside_bad_ones(engine: EngineName, boxes: T.Boxes | None) -> None:
    """Sample 2 has a broken header; sample 4 has a valid header, but its pixels cannot be decompressed."""
    encoded, edges = rectangles()
    encoded[2], at = encoded[2][:40], encoded[4].index(b"IDAT")
    content = bytes(20)
    (length,) = struct.unpack(">I", encoded[4][at - 4 : at])
    chunk = struct.pack(">I", 20) + b"IDAT" + content + struct.pack(">I", zlib.crc32(b"IDAT" + content))
    encoded[4] = encoded[4][: at - 4] + chunk + encoded[4][at + 8 + length :]
    pipeline, ids = T.Pipeline([T.DecodeImage(), T.CenterCrop(100)], boxes=boxes), np.arange(SAMPLES)
    known: Arrays = {"boxes": edges[:, None], "classes": Packed(ids, np.arange(SAMPLES + 1)), "age": ids}
    made = make_engine(engine, pipeline, seed=SEED)
    out = np.ones((SAMPLES, 100, 100, 3), np.uint8)
    prepared = made.prepare(Batch(encoded, ids, 0, known), out)
    made.close()
    assert [bad.row for bad in prepared.bad] == [2, 4]
    assert not out[[2, 4]].any()
    good = np.delete(ids, [2, 4])
    assert prepared.known["age"].tolist() == good.tolist()
    assert prepared.known["classes"].own()[0].tolist() == good.tolist()
    assert len(prepared.known["boxes"]) == len(good)
    if boxes is None:
        assert (prepared.known["boxes"] == edges[good][:, None]).all()
        return
    for row, box in zip(good.tolist(), prepared.known["boxes"].own()[0].astype(int).tolist(), strict=True):
        left, top, right, bottom = box
        assert out[row, top:bottom, left:right].all()
        assert out[row].sum() == 255 * 3 * (bottom - top) * (right - left)


def test_boxes_are_clipped_and_dropped_if_little_is_left() -> None:
    """The image is 10 wide. A window of 4x4 at (3, 2) is scaled by 2; then one of two samples is mirrored."""
    boxes = T.Boxes(min_size=2.0)
    values = np.array([[0, 0, 10, 10], [6.5, 0, 20, 3], [0, 0, 2, 2], [4, 3, 5, 4.75], [4, 3, 4.5, 5]], np.float64)
    known: Arrays = {"boxes": Packed(np.concatenate([values, values]), np.array([0, 5, 10]))}
    sizes = np.array([[8, 10], [8, 10]])
    window = Windows(np.array([[2, 3, 4, 4]] * 2), np.array([[8, 8]] * 2))
    moved = move_boxes(boxes, known, sizes, [window, Flips(np.array([False, True]))])[0]["boxes"]
    assert moved[0:1].own()[0].tolist() == [[0, 0, 8, 8], [2, 2, 4, 5.5]]
    assert moved[1:2].own()[0].tolist() == [[0, 0, 8, 8], [4, 2, 6, 5.5]]


def test_boxes_that_reach_over_the_edge_are_clipped_whatever_is_done_to_the_image() -> None:
    known: Arrays = {"boxes": Packed(np.array([[-3.0, 2.0, 15.0, 9.0]]), np.array([0, 1]))}
    moved, kept = move_boxes(T.Boxes(), known, np.array([[8, 10]]), [])
    assert moved["boxes"].values.tolist() == [[0, 2, 10, 8]]
    assert kept.tolist() == [True]


def test_boxes_that_a_step_drops_do_not_come_back() -> None:
    known: Arrays = {"boxes": Packed(np.array([[1.0, 1.0, 5.0, 5.0]] * 3), np.array([0, 2, 3]))}
    sizes, whole = np.array([[8, 10]] * 2), np.array([[0, 0, 8, 10]] * 2)
    steps = [Windows(whole, sizes, np.array(kept)) for kept in ([True, False, True], [True, True, False])]
    moved, kept = move_boxes(T.Boxes(), known, sizes, steps)
    assert kept.tolist() == [True, False, False]
    assert moved["boxes"].lengths.tolist() == [1, 0]


def test_a_sample_without_boxes_stays_one() -> None:
    known: Arrays = {"boxes": Packed(np.zeros((0, 4), np.float32), np.zeros(3, np.int64))}
    moved = move_boxes(T.Boxes(), known, np.array([[8, 8]] * 2), [])[0]["boxes"]
    assert (len(moved), moved.lengths.tolist()) == (2, [0, 0])


def test_values_that_are_not_one_for_each_box_are_named() -> None:
    known: Arrays = {"boxes": Packed(np.zeros((3, 4)), np.array([0, 1, 3])), "classes": np.zeros((2, 1), np.int64)}
    with pytest.raises(DatasetError, match=r"^field 'classes' must .* but one has 2 boxes and 1 values$"):
        move_boxes(T.Boxes(beside=("classes",)), known, np.array([[8, 8]] * 2), [])


FIELDS = (Field("boxes", (None, 4), "float32", 9), Field("fixed", (3, 4), "float64"), Field("label", (), "int64"))


def test_what_is_delivered_may_be_fewer_boxes_than_the_dataset_has() -> None:
    assert T.Pipeline([T.DecodeImage()]).known(FIELDS) == FIELDS
    fixed = T.Pipeline([T.DecodeImage()], boxes=T.Boxes("fixed", beside=("boxes",))).known(FIELDS)
    assert fixed == (FIELDS[0], Field("fixed", (None, 4), "float64", 3), FIELDS[2])


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        (T.Boxes("bboxes"), r"^Boxes names the field 'bboxes', but samples have boxes, fixed, label$"),
        (T.Boxes("label"), r"^field 'label' must have a value for each box, but has one for each sample$"),
        (T.Boxes(beside=("label",)), r"^field 'label' must have a value for each box, but has one for each sample$"),
    ],
)
def test_fields_that_are_no_boxes_are_named(boxes: T.Boxes, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        boxes.moved(FIELDS)
    with pytest.raises(ConfigError, match=r"^field 'b' must have boxes, \[k, 4\], got int64 \[k, 3\]$"):
        T.Boxes("b").moved((Field("b", (None, 3), "int64", 2),))


def test_boxes_of_whole_numbers_are_delivered_as_floats() -> None:
    """Rounding half a pixel away would move the box."""
    boxes, whole = T.Boxes("b"), Packed(np.array([[1, 2, 4, 7]], np.int16), np.array([0, 1]))
    assert boxes.moved((Field("b", (None, 4), "int16", 2),)) == (Field("b", (None, 4), "float32", 2),)
    halved = Windows(boxes=np.array([[0, 0, 10, 10]]), sizes=np.array([[5, 5]]))
    found, _ = move_boxes(boxes, {"b": whole}, np.array([[10, 10]]), [halved])
    assert (found["b"].dtype, found["b"].own()[0].tolist()) == (np.float32, [[0.5, 1.0, 2.0, 3.5]])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: T.Boxes(format="yxyx"), r"^Boxes's format must be .*, got 'yxyx'$"),  # type: ignore[arg-type]
        (lambda: T.Boxes(beside="classes"), r"^Boxes's beside must hold names"),  # type: ignore[arg-type]
        (lambda: T.Boxes(min_size=-1), r"^Boxes's min_size must be at least 0, got -1$"),
        (lambda: T.Pipeline([T.DecodeImage()], boxes="boxes"), r"boxes must be a Boxes, got 'boxes'$"),  # type: ignore[arg-type]
        (
            lambda: T.Pipeline([T.DecodeImage(), T.RandomIoUCrop(), T.Resize((8, 8))]),
            r"^RandomIoUCrop\(.*\) goes by boxes: say in Pipeline's boxes which field has them$",
        ),
        (
            lambda: T.Pipeline([T.DecodeImage(), T.RandomIoUCrop(), T.Resize(8)], boxes=T.Boxes()),
            r"^a pipeline with RandomIoUCrop\(.*\) must make all images equally large, by a Resize to \(height",
        ),
        (
            lambda: T.Pipeline(
                [T.DecodeImage(), T.Map(np.flip), T.Resize((8, 8))],  # type: ignore[arg-type]
                boxes=T.Boxes(),
                masks=T.Masks(),
            ),
            r"may move pixels in any way, and masks are made .* so a pipeline with it cannot have Masks\(",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_images_are_the_same_with_and_without_boxes_and_the_fingerprint_is_another() -> None:
    """Random numbers depend on a transform's position in the pipeline, and boxes take no position."""
    transforms = [T.DecodeImage(), T.RandomHorizontalFlip()]
    plain, boxed = T.Pipeline(transforms), T.Pipeline(transforms, boxes=T.Boxes())
    assert plain.transforms == boxed.transforms
    assert plain.fingerprint != boxed.fingerprint
    assert eval(repr(boxed), vars(T)) == boxed
