"""`mbaas show` draws the pixels of the first minibatch in the right cells, with boxes, classes and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from commandline import call
from numpy.typing import NDArray

import mbaas
from mbaas import transforms as T
from mbaas.cli import feed_file
from mbaas.errors import ConfigError
from mbaas.pictures import grid
from mbaas.pictures.grid import Cell, Layout
from mbaas.pictures.samples import MASK_COLOURS, cells_of, first_samples
from mbaas.ray_cluster import connection

SAMPLES, SIDE = 12, 40


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """A feed of images with one box each: a red rectangle."""
    rows = []
    for number in range(SAMPLES):
        image = np.full((60, 60, 3), 9 * number, np.uint8)
        image[20:40, 10:30] = (0, 0, 255)
        cv2.imwrite(str(tmp_path / f"{number}.png"), image)
        kind = "a $\\cat$ of\nmany" if number % 2 else "dog"
        rows.append(json.dumps({"uri": f"{number}.png", "label": kind, "boxes": [[10.0, 20.0, 30.0, 40.0]]}))
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    file = tmp_path / "feed.yaml"
    file.write_text(
        "name: train\ndata: {read_manifest: train.jsonl}\nbatch_size: 8\nseed: 3\nboxes: {field: boxes}\n"
        f"pipeline: [DecodeImage, RandomHorizontalFlip, RandomResizedCrop: {{size: {SIDE}}}]\n"
    )
    return file


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ensure_ray", lambda **_: pytest.fail("Ray was asked for"))


def picture(path: Path) -> NDArray[np.uint8]:
    return np.asarray(cv2.imread(str(path))[:, :, ::-1], np.uint8)


def test_a_picture_shows_what_the_minibatch_has(feed: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    said = call("show", feed, "--out", out, "--epoch", 2)
    assert (said.exit_code, said.stdout) == (
        0, f"{out}: the first 8 samples of epoch 2 of feed 'train', as every trial gets them\n"
    )  # fmt: skip
    wanted = feed_file.load(feed)
    found = first_samples(wanted.data.read(), wanted.pipeline, count=8, seed=3, epoch=2)
    # the picture enlarges each image three times: 3 x 40 = 120 is the first size of 96 or more
    layout = Layout.of(8, (SIDE, SIDE), title_lines=4, lines=2)
    assert layout.shown == (3 * SIDE, 3 * SIDE)
    drawn = picture(out)
    assert drawn.shape == (*layout.size, 3)
    for number, image in enumerate(found.samples):
        top, left = layout.corner(number)
        there = drawn[top : top + 3 * SIDE, left : left + 3 * SIDE]
        enlarged = image.repeat(3, axis=0).repeat(3, axis=1)
        differ = (there != enlarged).any(axis=2)
        box = found.known["boxes"][number : number + 1].own()[0][0] * 3
        ys, xs = np.nonzero(differ)  # only the frame of its box
        assert [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1] == pytest.approx(box.tolist(), abs=2)
        x0, y0, x1, y1 = np.rint(box).astype(int).tolist()
        assert not differ[y0 + 3 : y1 - 3, x0 + 3 : x1 - 3].any()


def test_images_of_different_sizes_lie_on_sheets_of_one(feed: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "3.png"), np.full((90, 30, 3), 200, np.uint8))
    text = feed.read_text().replace("[DecodeImage,", "[DecodeImage: {max_pixels: 3600},")
    feed.write_text(text.replace(f", RandomResizedCrop: {{size: {SIDE}}}", ""))
    wanted = feed_file.load(feed)
    data = wanted.data.read()
    cells = cells_of(data, wanted.pipeline, first_samples(data, wanted.pipeline, count=5, shuffle=False))
    assert {cell.image.shape for cell in cells} == {(90, 60, 3)}
    assert (cells[3].image[:, :30] == 200).all()
    assert (cells[3].image[:, 30:] == 255).all()
    assert (cells[4].image[60:] == 255).all()
    assert call("show", feed, "--out", tmp_path / "grid.png").exit_code == 0


def test_cells_say_class_and_number(feed: Path) -> None:
    wanted = feed_file.load(feed)
    data = wanted.data.read()
    cells = cells_of(data, wanted.pipeline, first_samples(data, wanted.pipeline, count=3, shuffle=False))
    assert [cell.lines for cell in cells] == [
        ("dog", "sample 0"), ("a $\\cat$ of\nmany", "sample 1"), ("dog", "sample 2")
    ]  # fmt: skip
    plain = T.Pipeline([T.DecodeImage()])
    for label, lines in (
        ("", ("sample 0",)),
        (', "label": 0.25', ("0.25", "sample 0")),
        (', "label": [1, 2]', ("sample 0",)),
    ):
        (feed.parent / "other.jsonl").write_text(f'{{"uri": "0.png"{label}}}\n')
        other = mbaas.read_manifest(feed.parent / "other.jsonl")
        (cell,) = cells_of(other, plain, first_samples(other, plain, count=1, shuffle=False))
        assert (cell.lines, len(cell.edges)) == (lines, 0)


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        ((8, 8), (96, 96)),
        ((40, 20), (120, 60)),
        ((96, 10), (96, 10)),
        ((224, 224), (224, 224)),
        ((640, 400), (320, 200)),
    ],
)
def test_small_images_are_shown_larger_and_large_ones_smaller(image: tuple[int, int], shown: tuple[int, int]) -> None:
    assert grid.shown_size(image) == shown


@pytest.mark.parametrize(("count", "size"), [(1, (20, 50)), (5, (20, 50)), (32, (20, 50)), (12, (90, 220))])
def test_no_two_images_meet_and_none_leaves_the_picture(count: int, size: tuple[int, int], tmp_path: Path) -> None:
    cells = [Cell(np.full((*size, 3), number, np.uint8), ("",)) for number in range(count)]
    layout = grid.draw(cells, tmp_path / "grid.png", title=["title"])
    drawn = picture(tmp_path / "grid.png")
    height, width = layout.shown
    for number in range(count):
        top, left = layout.corner(number)
        assert (drawn[top : top + height, left : left + width] == number).all()
    dark = (drawn == drawn[:, :, :1]).all(axis=2) & (drawn[:, :, 0] < count)
    assert dark.sum() == count * height * width


def test_bad_samples_are_told(feed: Path, tmp_path: Path) -> None:
    (tmp_path / "3.png").write_text("not an image")
    said = call("show", feed, "--out", tmp_path / "grid.png", "--count", 12)
    assert said.exit_code == 0
    assert "3.png cannot be prepared: it is not JPEG, PNG, WebP or BMP" in said.stderr
    assert "1 bad sample among the first of this epoch; each is an error in each trial, unless" in said.stderr
    assert "the first 11 samples" in said.stdout


def test_what_cannot_be_drawn_is_one_sentence(feed: Path, tmp_path: Path) -> None:
    assert "must end with .png, got 'grid.gif'" in call("show", feed, "--out", tmp_path / "grid.gif").stderr
    assert "the folder of a picture must exist" in call("show", feed, "--out", tmp_path / "none/grid.png").stderr
    (tmp_path / "flat.py").write_text("def flat(image, rng):\n    return image.mean(axis=2)\n")
    text = feed.read_text().replace("boxes: {field: boxes}\n", "").replace("RandomHorizontalFlip", "Map: flat:flat")
    feed.write_text(text.replace(f", RandomResizedCrop: {{size: {SIDE}}}", ""))
    said = call("show", feed, "--out", tmp_path / "grid.png")
    assert said.exit_code == 2
    assert "only images, uint8 [height, width, 3], can be drawn, but the pipeline makes float64 [60, 60]" in said.stderr


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "grid.png").mkdir()
    cell = Cell(np.zeros((8, 8, 3), np.uint8), ())
    with pytest.raises(ConfigError, match=r"cannot write .*grid\.png: Is a directory"):
        grid.draw([cell], tmp_path / "grid.png", title=[])


def test_what_is_no_image_is_refused_before_any_data_is_read(feed: Path, tmp_path: Path) -> None:
    feed.write_text(feed.read_text().partition("boxes:")[0] + "pipeline: [DecodeAudio: {max_s: 1}]\n")
    said = call("show", feed, "--out", tmp_path / "grid.png")
    assert said.exit_code != 0
    assert "only images can be drawn, but DecodeAudio(rate=16000, " in " ".join(said.stderr.split())


POINTS = [[[5.0, 30.0, 2.0], [0.0, 0.0, 0.0], [12.0, 8.0, 1.0]]]
"""Key points of one object; the second one is not labelled."""


def test_key_points_are_drawn_where_they_are_labelled(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "0.png"), np.full((40, 40, 3), 60, np.uint8))
    (tmp_path / "t.jsonl").write_text(json.dumps({"uri": "0.png", "keypoints": POINTS}) + "\n")
    data, pipeline = mbaas.read_manifest(tmp_path / "t.jsonl"), T.Pipeline([T.DecodeImage()], keypoints=T.Keypoints())
    cells = cells_of(data, pipeline, first_samples(data, pipeline, count=1))
    layout = grid.draw(cells, tmp_path / "grid.png", title=[])
    (top, left), (height, width) = layout.corner(0), layout.shown
    drawn = picture(tmp_path / "grid.png")[top : top + height, left : left + width]
    centres = cv2.connectedComponentsWithStats((drawn != 60).any(axis=2).astype(np.uint8))[3]
    enlarged = height / 40
    wanted = [[(x + 0.5) * enlarged - 0.5, (y + 0.5) * enlarged - 0.5] for x, y, seen in POINTS[0] if seen]
    assert np.array(sorted(centres[1:].tolist())) == pytest.approx(np.array(sorted(wanted)), abs=1)


def test_masks_lie_over_their_objects(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    cv2.imwrite(str(tmp_path / "0.png"), np.full((40, 40, 3), 60, np.uint8))
    corners = [[4, 4, 16, 4, 16, 20, 4, 20]], [[20, 8, 36, 8, 36, 12, 20, 12]]
    objects = [{"image_id": 0, "category_id": 1, "bbox": [4, 4, 12, 16], "segmentation": corner} for corner in corners]
    said = {"images": [{"id": 0, "file_name": "0.png"}], "annotations": objects, "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "a.json").write_text(json.dumps(said))
    data = mbaas.read_coco(tmp_path / "a.json", tmp_path, fields=["boxes", "segmentation"])
    pipeline = T.Pipeline([T.DecodeImage(), T.CenterCrop(40)], boxes=T.Boxes(), masks=T.Masks())
    (cell,) = cells_of(data, pipeline, first_samples(data, pipeline, count=1))
    wanted = np.full((40, 40, 3), 60.0)
    for (x0, y0, _, _, x1, y1, *_), colour in zip((corners[0][0], corners[1][0]), MASK_COLOURS[:2], strict=True):
        wanted[y0:y1, x0:x1] = (60 + colour) / 2
    assert np.abs(cell.image - wanted).max() <= 0.5
