"""Operations on pixels give torchvision's values, which `record_torchvision.py` recorded."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from torchvision_cases import (
    AFFINES,
    BLURS,
    BOXES,
    CORNERS,
    EXPANDED,
    HEIGHT,
    LEVELS,
    MIXED_LABELS,
    MIXTURES,
    MOVES,
    WIDTH,
    minibatch,
    photograph,
)

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep import pixels
from mbaas.prep.engines import Batch, make_engine
from mbaas.prep.geometry import boxes_after
from mbaas.prep.pixels import operate, warp
from mbaas.transforms.arrays import UnfitError
from mbaas.transforms.base import Blur, BoxState, DrawInputs, Operation, Padding, Warps
from mbaas.transforms.warps import between_centres, inverse_affine, perspective

SIZES = np.array([[HEIGHT, WIDTH]])


@pytest.fixture(scope="module")
def results():
    """torchvision's results by case."""
    return np.load(Path(__file__).with_name("torchvision_results.npz"))


def operated(*chain, nearest=True, fill=None):
    image = photograph()
    operate(image, chain, nearest=nearest, fill=fill)
    return image


def is_close(found, wanted):
    """Return whether at most 2 % of the values differ, and by at most one level."""
    error = np.abs(found.astype(int) - wanted)
    return error.max() <= 1 and (error > 0).mean() < 0.02


@pytest.mark.parametrize("case", LEVELS)
def test_changes_of_levels_are_torchvisions(case, results):
    np.testing.assert_array_equal(operated(Operation(*LEVELS[case])), results[case])


@pytest.mark.parametrize("nearest", [True, False])
def test_images_that_are_too_long_to_be_moved_are_bad_samples(nearest):
    with pytest.raises(UnfitError, match=r"sides below 32,767, got 4x32767"):
        warp(np.zeros((32_767, 4, 3), np.uint8), np.eye(3), (10, 4), nearest=nearest, fill=None)


@pytest.mark.parametrize("case", MIXTURES)
def test_mixed_minibatches_are_torchvisions(case, results):
    (weight, *middle), transform = MIXTURES[case], getattr(T, case.split()[0])(num_classes=5)
    chance = mock.Mock(**{"beta.return_value": weight, "integers.side_effect": middle})
    mixed = transform.apply({"image": minibatch(), "label": np.array(MIXED_LABELS)}, chance)
    np.testing.assert_allclose(mixed["image"], results[case], atol=1e-6)
    np.testing.assert_allclose(mixed["label"], results[f"{case}, labels"], atol=1e-6)


@pytest.mark.parametrize("case", BLURS)
def test_blurs_are_torchvisions(case, results):
    assert is_close(operated(Blur(*BLURS[case])), results[case])


@pytest.mark.parametrize("case", MOVES)
def test_moved_pixels_are_torchvisions(case, results):
    name, value, nearest, fill = MOVES[case]
    moved = operated(Operation(name, value), nearest=nearest, fill=fill)
    assert np.array_equal(moved, results[case]) if nearest else is_close(moved, results[case])


def check_warp(case, to_source, size, results, *, nearest=True, within=1e-3):
    """Compare an image and its boxes with torchvision's."""
    found = warp(photograph(), to_source, size, nearest=nearest, fill=(0.0, 0.0, 0.0))
    assert np.array_equal(found, results[case]) if nearest else is_close(found, results[case])
    step = Warps(np.ones(1, bool), to_source[None], np.array([size]), nearest, (0.0, 0.0, 0.0))
    before = BoxState(np.array(BOXES), np.zeros(len(BOXES), np.int64), np.ones(len(BOXES), bool))
    np.testing.assert_allclose(boxes_after(before, SIZES, step).edges, results[f"{case}, boxes"], atol=within)


@pytest.mark.parametrize("case", AFFINES)
def test_affine_maps_are_torchvisions(case, results):
    given = dict(AFFINES[case])
    about = np.array(given.pop("center") or (WIDTH / 2, HEIGHT / 2)) - (WIDTH / 2, HEIGHT / 2)
    angle, scale = (np.array([given.pop(name)]) for name in ("angle", "scale"))
    matrices = inverse_affine(angle, scale=scale, center=about, **given)
    check_warp(case, between_centres(matrices, SIZES, SIZES)[0], (HEIGHT, WIDTH), results)


@pytest.mark.parametrize("angle", EXPANDED)
def test_expanded_rotations_are_torchvisions(angle, results):
    u = np.zeros((1, 1))
    step = T.RandomRotation((angle, angle), expand=True).step(DrawInputs(u, SIZES))
    case = f"expanded {angle:g}"
    assert step.sizes[0].tolist() == list(results[case].shape[:2])
    # torchvision moves boxes to the corner of the larger image, which is rounded up to whole pixels.
    check_warp(case, step.to_source[0], step.sizes[0].tolist(), results, within=1.0)


def test_a_perspective_is_torchvisions(results):
    sources = np.array([[[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]]], np.float64)
    to_source = perspective(np.array([CORNERS], np.float64), sources)[0]
    check_warp("perspective", to_source, (HEIGHT, WIDTH), results, nearest=False)


@pytest.mark.parametrize(("mode", "numpys"), [("edge", "edge"), ("reflect", "reflect"), ("symmetric", "symmetric")])
def test_padding_modes_are_those_of_numpy(mode, numpys):
    image = photograph()[:5, :7]
    padded = np.pad(image, ((11, 9), (13, 16), (0, 0)), mode=numpys)
    for top, left, height, width in ((-11, -13, 25, 36), (-3, 2, 6, 4), (-9, -9, 3, 2)):
        into = np.empty((height, width, 3), np.uint8)
        pixels.cut(image, (top, left, height, width), into, pixels.Scratch(), Padding(mode))
        np.testing.assert_array_equal(into, padded[top + 11 :, left + 13 :][:height, :width])


def test_a_pipeline_of_operations_is_a_pure_function_of_the_sample(jpegs):
    """Other samples and the number of threads have no influence; decoded samples give the same result."""
    steps = [T.RandomResizedCrop(64), T.RandAugment(), T.RandomErasing(p=0.9, value=9), T.GaussianBlur(3), T.AugMix()]
    pipeline = T.Pipeline([T.DecodeImage(), *steps, T.RandomRotation(20, "bilinear"), T.RandomGrayscale(0.5)])

    def prepared(ids, threads):
        engine = make_engine("cpu", pipeline, seed=3, threads=threads)
        out = np.empty((len(ids), 64, 64, 3), np.uint8)
        assert engine.prepare(Batch([jpegs[i] for i in ids], np.array(ids), 5, {}), out).bad == []
        engine.close()
        return out

    together, alone = prepared([0, 1, 2, 3, 4], 1), prepared([3], 1)
    np.testing.assert_array_equal(together[3], alone[0])
    np.testing.assert_array_equal(prepared([4, 3, 2, 1, 0], 3)[::-1], together)


@pytest.mark.parametrize("transform", [T.RandAugment(), T.AugMix(), T.Pad(3, padding_mode="reflect")])
def test_what_boxes_cannot_follow_is_refused_with_them(transform):
    with pytest.raises(ConfigError, match=f"^{type(transform).__name__}.* in ways that boxes do not follow"):
        T.Pipeline([T.DecodeImage(), T.Resize((8, 8)), transform], boxes=T.Boxes())


def test_levels_become_floats_in_the_consumer():
    scale = T.ToFloat()
    images = np.array([[[[0, 51, 255]]]], np.uint8)
    np.testing.assert_allclose(scale.apply_numpy(images), [[[[0, 0.2, 1]]]], rtol=1e-6)
    assert T.Pipeline([T.DecodeImage(), scale]).normalize == scale
