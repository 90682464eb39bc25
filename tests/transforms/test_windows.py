"""RandomResizedCrop, Resize and CenterCrop compute the windows and sizes of torchvision's formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mbaas import transforms as T
from mbaas.samples.order import uniforms
from mbaas.transforms.base import DrawInputs


def drawn(transform, heights, widths, seed=0):
    heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
    u = uniforms(seed, 0, np.arange(len(heights)), substream=1, draws=transform.draws)
    return DrawInputs(u, np.column_stack([heights, widths]))


def torchvision_crop(u, height, width, scale, ratio):
    """torchvision's ``RandomResizedCrop.get_params`` for one image, with the given random numbers."""
    areas, ratios, (anchor_y, anchor_x) = u[:10], u[10:20], u[20:]
    for k in range(10):
        target = height * width * (scale[0] + (scale[1] - scale[0]) * areas[k])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * ratios[k])
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [int(anchor_y * (height - h + 1)), int(anchor_x * (width - w + 1)), h, w]
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (0.1, 0.3))])
def test_random_resized_crop_is_torchvisions_for_each_image(scale, ratio):
    """Sizes include 1x1 and slivers: there all ten attempts fail, and the fallback decides."""
    rng = np.random.default_rng(0)
    heights, widths = rng.integers(1, 700, (2, 500))
    heights[:40], widths[20:60] = 1, 1
    crop = T.RandomResizedCrop((7, 9), scale=scale, ratio=ratio)
    block = drawn(crop, heights, widths)
    windows = crop.step(block)
    expected = [torchvision_crop(u, h, w, scale, ratio) for u, h, w in zip(block.u, heights, widths, strict=True)]
    assert windows.boxes.tolist() == expected
    assert (windows.sizes == [7, 9]).all()


def test_the_fallback_is_really_reached():
    crop = T.RandomResizedCrop(8)
    windows = crop.step(drawn(crop, [10, 1000], [1000, 10]))
    assert windows.boxes.tolist() == [[0, 493, 10, 13], [493, 0, 13, 10]]


def test_random_resized_crop_is_uniform_in_area_and_log_ratio():
    """Quartiles of area in [0.08, 0.5] and of log ratio, over 20,000 images of 1000x1000, within one per cent."""
    n = 20_000
    crop = T.RandomResizedCrop(8, scale=(0.08, 0.5))
    boxes = crop.step(drawn(crop, [1000] * n, [1000] * n)).boxes
    area = boxes[:, 2] * boxes[:, 3] / 1e6
    ratio = np.log(boxes[:, 3] / boxes[:, 2]) / math.log(4 / 3)
    assert np.quantile(area, [0.25, 0.5, 0.75]) == pytest.approx([0.185, 0.29, 0.395], abs=0.01)
    assert np.quantile(ratio, [0.25, 0.5, 0.75]) == pytest.approx([-0.5, 0.0, 0.5], abs=0.02)
    room = 1000 - boxes[:, 2:] + 1
    assert (boxes[:, :2] / room).mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.01)
    assert ((boxes[:, :2] >= 0) & (boxes[:, :2] < room)).all()


@pytest.mark.parametrize(
    ("size", "image", "result"),
    [
        (256, (400, 500), (256, 320)),
        (256, (500, 400), (320, 256)),
        (224, (333, 500), (224, 336)),
        (10, (3, 100), (10, 333)),
        (8, (5, 5), (8, 8)),
        ((7, 9), (400, 500), (7, 9)),
    ],
)
def test_resize_keeps_the_aspect_ratio_of_one_integer(size, image, result):
    resize = T.Resize(size)
    windows = resize.step(drawn(resize, [image[0]], [image[1]]))
    assert windows.boxes.tolist() == [[0, 0, *image]]
    assert windows.sizes.tolist() == [list(result)]


def torchvision_center(image, crop):
    """First pixel of torchvision's ``center_crop`` along one axis; negative if it pads."""
    return -((crop - image) // 2) if crop > image else round((image - crop) / 2.0)


def test_center_crop_is_torchvisions_for_small_odd_and_even_images():
    crop = T.CenterCrop((6, 9))
    heights, widths = np.meshgrid(np.arange(1, 25), np.arange(1, 25))
    windows = crop.step(drawn(crop, heights.ravel(), widths.ravel()))
    expected = [
        [torchvision_center(h, 6), torchvision_center(w, 9), 6, 9]
        for h, w in zip(heights.ravel().tolist(), widths.ravel().tolist(), strict=True)
    ]
    assert windows.boxes.tolist() == expected
    assert windows.sizes.tolist() == [[6, 9]] * len(expected)


def test_flips_have_their_probability():
    ids = np.arange(20_000)
    drawn = DrawInputs(uniforms(0, 0, ids, substream=2, draws=1), np.column_stack([ids + 1, ids + 1]))
    for flip in (T.RandomHorizontalFlip, T.RandomVerticalFlip):
        assert flip(0.3).step(drawn).which.mean() == pytest.approx(0.3, abs=0.01)
        assert not flip(0.0).step(drawn).which.any()
        assert flip(1.0).step(drawn).which.all()
