"""Pipelines refuse invalid transforms, have readable representations, and are identified by fingerprints."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.transforms import *  # noqa: F403  # the names that a repr evaluates with

IMAGENET = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def full() -> T.Pipeline:
    return T.Pipeline(
        [
            T.DecodeImage(),
            T.RandomResizedCrop(224, scale=(0.2, 1)),
            T.RandomHorizontalFlip(0.25),
            T.ColorJitter(0.4, (0.5, 1.5), 0.2, 0.1),
            T.Resize(96),
            T.CenterCrop((80, 72)),
            IMAGENET,
        ]
    )


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: T.Pipeline(T.DecodeImage()), r"takes a list of transforms, got DecodeImage\(\); write \[DecodeImage"),
        (lambda: T.Pipeline([]), "first transform must be DecodeImage, DecodeAudio or DecodeArray, got no transform"),
        (
            lambda: T.Pipeline([T.Resize(8)]),
            "first transform must be DecodeImage, DecodeAudio or DecodeArray, got Resize",
        ),
        (lambda: T.Pipeline([T.Resize(8), T.DecodeImage()]), "got Resize, DecodeImage"),
        (lambda: T.Pipeline([T.DecodeImage(), T.DecodeImage()]), "one decoder, got 2: DecodeImage, DecodeImage"),
        (
            lambda: T.Pipeline([T.DecodeImage(), IMAGENET, T.Resize(8)]),
            "last transform, once, got DecodeImage, Norm",
        ),
        (
            lambda: T.Pipeline([T.DecodeImage(), IMAGENET, IMAGENET]),
            "Normalize or ToFloat must be the last transform, once",
        ),
        (
            lambda: T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip]),
            r"number 1 is .*write RandomHorizontalFlip\(\)",
        ),
        (
            lambda: T.Pipeline([T.DecodeImage(), abs]),
            r"number 1 is <built-in function abs>; put it into Map\(\.\.\.\)$",
        ),
        (lambda: T.RandomResizedCrop(0), r"of pixels in \[1, 65,535\], got 0"),
        (lambda: T.RandomResizedCrop(22.5), "must hold 2 values, got 22.5"),
        (lambda: T.RandomResizedCrop(True), "got True"),
        (lambda: T.RandomResizedCrop((1, 2, 3)), r"must hold 2 values, got \(1, 2, 3\)"),
        (lambda: T.RandomResizedCrop(8, scale=(0.5, 0.1)), r"low <= high, got \(0.5, 0.1\)"),
        (lambda: T.RandomResizedCrop(8, scale=(0.0, 1.0)), r"above 0, got \(0.0, 1.0\)"),
        (lambda: T.RandomResizedCrop(8, scale=(0.5, 1.5)), r"not exceed 1, got \(0.5, 1.5\)"),
        (lambda: T.RandomResizedCrop(8, ratio=(-1, 1)), r"above 0, got \(-1, 1\)"),
        (lambda: T.RandomResizedCrop(8, ratio=(float("nan"), 1)), "finite number, got nan"),
        (lambda: T.Resize("8"), "must hold 2 values, got '8'"),
        (lambda: T.Resize((8, -1)), r"of pixels in \[1, 65,535\], got -1"),
        (lambda: T.CenterCrop((8, 0)), r"of pixels in \[1, 65,535\], got 0"),
        (lambda: T.RandomHorizontalFlip(1.1), r"in \[0, 1\], got 1.1"),
        (lambda: T.RandomHorizontalFlip(10**5000), "finite number, got a value of type int"),
        (lambda: T.Resize(65_536), r"of pixels in \[1, 65,535\], got 65536"),
        (lambda: T.RandomHorizontalFlip("often"), "finite number, got 'often'"),
        (lambda: T.ColorJitter(brightness=-0.1), "must be at least 0, got -0.1"),
        (lambda: T.ColorJitter(contrast=(-0.5, 1)), r"must be at least 0, got \(-0.5, 1\)"),
        (lambda: T.ColorJitter(hue=0.6), r"in \[0, 0.5\], or \(low, high\) within \[-0.5, 0.5\], got 0.6"),
        (lambda: T.ColorJitter(hue=-0.1), r"in \[0, 0.5\], or .*, got -0.1"),
        (lambda: T.ColorJitter(hue=(-0.6, 0)), r"be at least -0.5, got \(-0.6, 0\)"),
        (lambda: T.ColorJitter(hue=(0, 0.6)), r"not exceed 0.5, got \(0, 0.6\)"),
        (lambda: T.ColorJitter(hue="blue"), "finite number, got 'blue'"),
        (lambda: T.Normalize((0, 0), (1, 1, 1)), r"mean must hold 3 values, got \(0, 0\)"),
        (lambda: T.Normalize((0, 0, 0), (1, 0, 1)), "std must be above 0"),
        (
            lambda: T.Normalize((0, 0, 0), (1, 1, 1), dtype="int8"),
            'must be "float32", "float16" or "bfloat16", got .int8',
        ),
        (lambda: T.Map(3), r"function fn\(image, rng\), got 3"),
    ],
)
def test_wrong_parameters_and_orders_are_refused_at_construction(build, says):
    with pytest.raises(ConfigError, match=says):
        build()


def test_a_repr_evaluates_back_to_an_equal_pipeline():
    pipeline = full()
    again = eval(repr(pipeline))
    assert again == pipeline
    assert again.fingerprint == pipeline.fingerprint
    assert repr(again) == repr(pipeline)


def test_prep_and_normalize_split_the_transforms():
    pipeline = full()
    assert pipeline.normalize == IMAGENET
    assert pipeline.prep == pipeline.transforms[:-1]
    assert T.Pipeline([T.DecodeImage()]).normalize is None
    assert T.Pipeline([T.DecodeImage(), IMAGENET]).prep == (T.DecodeImage(),)


def same(image, rng):
    return image


@pytest.mark.parametrize(
    ("transforms", "shape"),
    [
        ([], None),
        ([T.Resize(8)], None),
        ([T.Resize((8, 9))], (8, 9, 3)),
        ([T.Resize(8), T.CenterCrop(7)], (7, 7, 3)),
        ([T.RandomResizedCrop((5, 6)), T.RandomHorizontalFlip(), T.ColorJitter(0.1), IMAGENET], (5, 6, 3)),
        ([T.RandomResizedCrop(5), T.Map(same)], None),
        ([T.Map(same), T.RandomHorizontalFlip()], None),
        ([T.Map(same), T.CenterCrop(5)], (5, 5, 3)),
    ],
)
def test_the_output_shape_is_known_where_the_transforms_fix_it(transforms, shape):
    assert T.Pipeline([T.DecodeImage(), *transforms]).output_shape == shape


def test_a_map_and_mirrored_padding_are_for_the_cpu_engine_only():
    crop, hue, own, pad = T.RandomResizedCrop(8), T.ColorJitter(hue=0.1), T.Map(same), T.Pad(1, padding_mode="reflect")
    for transforms, cpu_only in [([crop, hue, IMAGENET], None), ([hue, own], own), ([pad, crop], pad)]:
        assert T.Pipeline([T.DecodeImage(), *transforms]).cpu_only is cpu_only


def test_what_dali_lacks_is_random():
    """So it comes after the deterministic prefix, whose result the engine keeps."""
    lacking = [
        *(T.RandomRotation(10), T.RandomAffine(10), T.RandomPerspective(), T.ColorJitter(hue=0.1), T.RandomGrayscale()),
        *(T.RandomInvert(), T.RandomSolarize(128), T.RandomPosterize(4), T.RandomEqualize(), T.RandomAutocontrast()),
        *(T.RandomAdjustSharpness(2), T.GaussianBlur(3), T.RandomErasing(), T.RandAugment(), T.TrivialAugmentWide()),
        *(T.AutoAugment(), T.AugMix()),
    ]
    for transform in lacking:
        pipeline = T.Pipeline([T.DecodeImage(), T.Resize((8, 9)), transform, T.CenterCrop(5)])
        assert (transform.runs_on_dali, pipeline.cpu_only, pipeline.prefix) == (False, None, 2), transform


def test_equal_settings_have_equal_fingerprints_and_others_do_not():
    def crop(**settings):
        return T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(**settings)]).fingerprint

    assert crop(size=224) == crop(size=(224, 224)) == crop(size=[224, 224], scale=[0.08, 1], ratio=(0.75, 4 / 3))
    others = {
        crop(size=224),
        crop(size=225),
        crop(size=224, scale=(0.09, 1)),
        crop(size=224, ratio=(0.7, 4 / 3)),
    }
    orders = ([T.Resize(8), T.CenterCrop(8)], [T.CenterCrop(8), T.Resize(8)])
    swapped = {T.Pipeline([T.DecodeImage(), *two]).fingerprint for two in orders}
    assert len(others | swapped) == 6


def test_pickling_keeps_a_pipeline():
    pipeline = full()
    copy = pickle.loads(pickle.dumps(pipeline))
    assert copy == pipeline
    assert copy.fingerprint == pipeline.fingerprint


PRINT_FINGERPRINTS = """
import numpy as np
from mbaas import transforms as T

def make(k):
    names = {"a", "b", "c", "d", "e"}
    def add(image, rng, by=(1, 2)):
        return image + np.uint8(k) if "a" in names else image
    return add

print(T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(224), T.ColorJitter(0.4)]).fingerprint)
print(T.Pipeline([T.DecodeImage(), T.Map(make(1))]).fingerprint)
print(T.Pipeline([T.DecodeImage(), T.Map(make(2))]).fingerprint)
"""


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process():
    """Two Pythons with different hash seeds iterate over sets in different orders."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_FINGERPRINTS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def unchanged(sample):
    return sample


def drawn(sample, rng):
    return sample


IMAGE, SOUND = T.DecodeImage(), T.DecodeAudio(max_s=2)
TURN = T.Map(unchanged, deterministic=True)
CROP, FLIP = T.RandomResizedCrop(8), T.RandomHorizontalFlip()
LABELLED = T.Map(unchanged, fields=["label"], deterministic=True)
BOXES, POINTS = {"boxes": T.Boxes()}, {"keypoints": T.Keypoints()}


@pytest.mark.parametrize(
    ("prefix", "transforms", "lying"),
    [
        (1, [IMAGE], {}),
        (1, [IMAGE, CROP, FLIP], {}),
        (1, [IMAGE, IMAGENET], {}),
        (1, [IMAGE, T.RandomHorizontalFlip(1.0), T.Resize(9)], {}),
        (1, [IMAGE, T.ColorJitter(), T.Resize(9)], {}),
        (3, [IMAGE, T.Resize(9), T.CenterCrop(8), FLIP, T.Resize(7)], {}),
        (3, [IMAGE, T.Resize(9), T.CenterCrop(8), IMAGENET], {}),
        (3, [IMAGE, T.Resize(9), TURN, CROP], {}),
        (2, [IMAGE, T.Resize(9), T.Map(drawn), T.CenterCrop(8)], {}),
        (2, [IMAGE, T.Resize(9), LABELLED, T.CenterCrop(8)], {}),
        (3, [IMAGE, T.Resize(9), T.CenterCrop(8), FLIP], BOXES),
        (2, [IMAGE, T.Resize(9), TURN, T.CenterCrop(8)], BOXES),
        (2, [IMAGE, T.Resize(9), TURN, T.CenterCrop(8)], POINTS),
        (1, [IMAGE, T.RandomIoUCrop(), T.Resize((9, 9))], BOXES),
        (1, [IMAGE, T.RandomZoomOut(), T.Resize((9, 9))], BOXES),
        (1, [SOUND, T.RandomCrop(9), T.MelSpectrogram()], {}),
        (4, [SOUND, T.CropOrPad(9), T.MelSpectrogram(), T.AmplitudeToDB(), T.SpecAugment(1, 1, 0, 0)], {}),
        (2, [T.DecodeArray(), TURN, T.Map(drawn), TURN], {}),
    ],
    ids=str,
)
def test_the_prefix_is_what_makes_the_same_of_a_sample_in_every_epoch(prefix, transforms, lying):
    assert T.Pipeline(transforms, **lying).prefix == prefix


def test_what_follows_and_what_lies_on_the_image_changes_no_fingerprint_of_the_prefix():
    first = [IMAGE, T.Resize(9)]
    alike = [
        T.Pipeline([*first, *more], **on) for more, on in (([], {}), ([FLIP, TURN], {}), ([CROP, IMAGENET], BOXES))
    ]
    assert len({each.prefix_fingerprint for each in alike}) == 1
    others = [[IMAGE], [IMAGE, T.Resize(8)], [IMAGE, T.Resize(9), T.CenterCrop(8)], [IMAGE, T.Resize(9), TURN]]
    assert len({T.Pipeline(each).prefix_fingerprint for each in [first, *others]}) == 5
    assert alike[0].prefix_fingerprint != alike[0].fingerprint


def test_only_a_map_that_is_not_deterministic_may_make_something_else_in_each_epoch():
    assert T.Pipeline([IMAGE, T.Map(drawn)]).is_random
    assert not T.Pipeline([IMAGE, T.Resize(9), TURN, LABELLED]).is_random
    assert T.Pipeline([IMAGE, TURN, FLIP]).is_random


IMAGE, SMALL, FLIP = T.DecodeImage(), T.Resize((32, 32)), T.RandomHorizontalFlip()


def adding(amount):
    return T.Map(lambda image: image + amount, deterministic=True)


@pytest.mark.parametrize(
    ("own", "other", "clause"),
    [
        ([IMAGE, SMALL, FLIP], [IMAGE, SMALL, FLIP], ""),
        ([IMAGE, SMALL], [IMAGE, T.Resize((16, 16))], "Resize with size=(32, 32) instead of (16, 16)"),
        ([IMAGE, SMALL, FLIP], [IMAGE, SMALL], "also RandomHorizontalFlip(p=0.5)"),
        ([IMAGE, SMALL], [IMAGE, SMALL, FLIP], "without RandomHorizontalFlip(p=0.5)"),
        ([IMAGE, SMALL, FLIP], [IMAGE, FLIP], "Resize(size=(32, 32)) instead of RandomHorizontalFlip(p=0.5)"),
        ([IMAGE, SMALL, adding(1)], [IMAGE, SMALL, adding(2)], "another Map(test_pipeline.adding.<locals>.<lambda>"),
    ],
)
def test_the_difference_of_two_pipelines_is_the_first_one(own, other, clause):
    found = T.Pipeline(own).difference(T.Pipeline(other))
    assert found.startswith(clause)
    assert bool(found) == bool(clause)


def test_other_boxes_are_a_difference():
    assert T.Pipeline([IMAGE, SMALL], boxes=T.Boxes("b")).difference(T.Pipeline([IMAGE, SMALL])).startswith("boxes ")


@pytest.mark.parametrize(
    ("own", "other", "common"),
    [
        ([IMAGE, SMALL, FLIP], [IMAGE, SMALL, T.RandomVerticalFlip()], 2),
        ([IMAGE, FLIP, SMALL], [IMAGE, FLIP, SMALL], 1),
        ([IMAGE, SMALL], [IMAGE, T.Resize((16, 16))], 1),
        ([T.DecodeImage(max_pixels=10_000)], [IMAGE, SMALL], 0),
        ([IMAGE, SMALL, adding(1)], [IMAGE, SMALL, adding(1), FLIP], 3),
    ],
)
def test_pipelines_have_their_first_deterministic_transforms_in_common(own, other, common):
    assert T.Pipeline(own).common_prefix(T.Pipeline(other)) == common
    assert T.Pipeline(other).common_prefix(T.Pipeline(own)) == common


def test_a_prefix_can_be_made_shorter_and_nothing_else_changes():
    pipeline = T.Pipeline([IMAGE, SMALL, FLIP])
    shorter = pipeline.with_prefix(1)
    assert (shorter.prefix, pipeline.prefix, pipeline.with_prefix(5).prefix) == (1, 2, 2)
    assert shorter.fingerprint == pipeline.fingerprint
