"""RandomIoUCrop and RandomZoomOut match torchvision's algorithms, written out for one image."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.geometry import plan
from mbaas.samples.order import uniforms
from mbaas.transforms.base import BoxState, DrawInputs, Windows

IMAGES = 150


def torchvision_iou_crop(crop: T.RandomIoUCrop, u: Any, height: int, width: int, boxes: np.ndarray) -> Any:
    """torchvision's ``RandomIoUCrop.make_params`` for one image, with random numbers from ``u(first, count)``.

    Returns (top, left, height, width) and a mask of the boxes whose centre is inside, all if the image is unchanged.
    """
    trials, at = crop.trials, 0
    while at < 64 * (1 + 4 * trials):
        chance, at = u(at, 1 + 4 * trials), at + 1 + 4 * trials
        least = crop.sampler_options[int(chance[0] * len(crop.sampler_options))]
        if least >= 1.0:
            break
        for number in range(trials):
            r0, r1, r2, r3 = chance[1:].reshape(4, trials)[:, number]
            new_w = int(width * (crop.min_scale + (crop.max_scale - crop.min_scale) * r0))
            new_h = int(height * (crop.min_scale + (crop.max_scale - crop.min_scale) * r1))
            if not new_h or not crop.min_aspect_ratio <= new_w / new_h <= crop.max_aspect_ratio:
                continue
            left, top = int((width - new_w) * r2), int((height - new_h) * r3)
            right, bottom = left + new_w, top + new_h
            if left == right or top == bottom:
                continue
            cx, cy = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
            within = (left < cx) & (cx < right) & (top < cy) & (cy < bottom)
            if not within.any():
                continue
            if max(iou(box, (left, top, right, bottom)) for box in boxes[within].tolist()) < least:
                continue
            return [top, left, new_h, new_w], within
    return [0, 0, height, width], np.ones(len(boxes), bool)


def iou(a: Any, b: Any) -> float:
    across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(across, 0) * max(down, 0)
    return float(shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared))


def images_with_boxes() -> tuple[np.ndarray, BoxState]:
    """Images from 1x1 with up to nine boxes: large ones, small ones, and some already dropped."""
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 300, (IMAGES, 2))
    counts = rng.integers(0, 10, IMAGES)
    owner = np.repeat(np.arange(IMAGES), counts)
    corners = np.sort(rng.random((len(owner), 2, 2)) ** rng.choice([0.5, 1, 2], (len(owner), 1, 1)), axis=1)
    edges = (corners * sizes[owner][:, None, ::-1]).reshape(-1, 4)
    return sizes, BoxState(edges, owner, rng.random(len(owner)) < 0.9)


@pytest.mark.parametrize(
    "crop",
    [
        T.RandomIoUCrop(),
        T.RandomIoUCrop(0.1, 0.6, 0.8, 1.5, sampler_options=(0.5, 0.0, 0.9), trials=7),
        T.RandomIoUCrop(sampler_options=(2,)),
    ],
)
def test_random_iou_crop_is_torchvisions_for_each_image(crop: T.RandomIoUCrop) -> None:
    sizes, boxes = images_with_boxes()
    ids, changed = np.arange(IMAGES) * 7, 0
    (step,) = plan([(3, crop)], 5, 2, ids, sizes, boxes)
    assert isinstance(step, Windows)
    assert step.kept is not None
    assert step.sizes.tolist() == step.boxes[:, 2:].tolist()
    for row, (height, width) in enumerate(sizes.tolist()):
        there = (boxes.owner == row) & boxes.kept

        def u(first: int, count: int, row: int = row) -> np.ndarray:
            return uniforms(5, 2, ids[row : row + 1], substream=3, draws=first + count)[0, first:]

        window, within = torchvision_iou_crop(crop, u, height, width, boxes.edges[there])
        assert step.boxes[row].tolist() == window
        assert step.kept[there].tolist() == within.tolist()
        changed += window != [0, 0, height, width]
    assert not step.kept[~boxes.kept].any(), "dropped boxes stay dropped"
    assert changed == 0 if crop.sampler_options == (2,) else changed > IMAGES / 4


def test_a_crop_goes_by_the_boxes_where_they_are_then() -> None:
    """The only box is at the right once mirrored, and so is any window with an IoU of at least 0.6."""
    boxes = BoxState(np.array([[0.0, 0.0, 40.0, 100.0]] * 50), np.arange(50), np.ones(50, bool))
    crop = T.RandomIoUCrop(0.35, 1.0, 0.3, 1.0, sampler_options=(0.6,), trials=100)
    stages = [(1, T.RandomHorizontalFlip(1.0)), (2, crop)]
    _, step = plan(stages, 1, 0, np.arange(50), np.array([[100, 100]] * 50), boxes)
    assert isinstance(step, Windows)
    _, left, _, width = step.boxes.T
    assert (left >= 20).all()
    assert (left + width > 80).all()


def test_a_sample_draws_the_same_window_in_any_company() -> None:
    sizes, boxes = images_with_boxes()
    crop, ids = T.RandomIoUCrop(), np.arange(IMAGES)
    (whole,) = plan([(1, crop)], 0, 0, ids, sizes, boxes)
    for row in range(0, IMAGES, 20):
        own = boxes.owner == row
        alone = BoxState(boxes.edges[own], np.zeros(own.sum(), np.int64), boxes.kept[own])
        (step,) = plan([(1, crop)], 0, 0, ids[row : row + 1], sizes[row : row + 1], alone)
        assert isinstance(step, Windows)
        assert isinstance(whole, Windows)
        assert step.boxes[0].tolist() == whole.boxes[row].tolist()


def test_random_zoom_out_is_torchvisions() -> None:
    sizes = np.array([[50, 80], [33, 21], [1, 1]] * 40)
    u = uniforms(0, 0, np.arange(120), substream=1, draws=4)
    zoom = T.RandomZoomOut((1.5, 4), p=0.6)
    windows = zoom.step(DrawInputs(u, sizes))
    assert windows.sizes.tolist() == windows.boxes[:, 2:].tolist()
    zoomed = 0
    for (chance, r, r0, r1), (h, w), window in zip(u.tolist(), sizes.tolist(), windows.boxes.tolist(), strict=True):
        if chance >= 0.6:
            assert window == [0, 0, h, w]
            continue
        height, width = (int(side * (1.5 + 2.5 * r)) for side in (h, w))
        assert window == [-int((height - h) * r1), -int((width - w) * r0), height, width]
        zoomed += 1
    assert 50 < zoomed < 90


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            partial(T.RandomIoUCrop, 0.5, 0.4),
            r"^RandomIoUCrop's min_scale, max_scale must be \(low, high\) .*, got \(0.5, 0.4\)$",
        ),
        (partial(T.RandomIoUCrop, 0.0), r"^RandomIoUCrop's min_scale, max_scale must be above 0, got"),
        (partial(T.RandomIoUCrop, max_scale=1.5), r"^RandomIoUCrop's min_scale, max_scale must not exceed 1, got"),
        (
            partial(T.RandomIoUCrop, max_aspect_ratio=0.1),
            r"^RandomIoUCrop's min_aspect_ratio, max_aspect_ratio must be \(low, high\)",
        ),
        (
            partial(T.RandomIoUCrop, sampler_options=()),
            r"^RandomIoUCrop's sampler_options must be a list of numbers, at least one, got \(\)$",
        ),
        (
            partial(T.RandomIoUCrop, sampler_options=("x",)),
            r"^RandomIoUCrop's sampler_options must be a finite number, got 'x'$",
        ),
        (partial(T.RandomIoUCrop, trials=0), r"^RandomIoUCrop's trials must be a whole number in \[1, 1,000\], got 0$"),
        (partial(T.RandomZoomOut, (0.5, 2)), r"^RandomZoomOut's side_range must be at least 1, got \(0.5, 2\)$"),
        (partial(T.RandomZoomOut, p=2), r"^RandomZoomOut's p must be in \[0, 1\], got 2"),
    ],
)
def test_settings_that_cannot_be_are_named(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_their_reprs_make_equal_ones() -> None:
    for transform in (T.RandomIoUCrop(trials=3, sampler_options=[0.5]), T.RandomZoomOut((1, 2))):  # type: ignore[arg-type]
        assert eval(repr(transform), vars(T)) == transform
