"""Torchvision and Albumentations run a library's transforms, with the same result for a sample wherever it is made."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from mbaas import transforms as T
from mbaas.errors import ConfigError
from mbaas.prep.engines import Batch, make_engine
from mbaas.transforms.function import pickled

ALL = range(64)


class Jitter:
    """A transform as people write them, which draws from all generators of the process."""

    def __init__(self, most=8):
        self.most = most

    def __call__(self, image):
        pixels = np.asarray(image).astype(np.float32)
        level = torch.rand(()) + np.random.rand() + random.random()
        return Image.fromarray((pixels * float(level) / self.most).astype(np.uint8)).resize((20, 10))


def to_float(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 + torch.rand(())


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (len(ALL), 32, 24, 3), np.uint8)


def prepared(pipeline, images, *, threads=1, epoch=3):
    """Minibatch of all images, none of which is bad."""
    result = outcome(pipeline, images, threads=threads, epoch=epoch)
    assert not result.bad
    return np.array(result.made)


def outcome(pipeline, images, *, threads=1, epoch=3):
    """What the engine returns for all images."""
    encoded = [cv2.imencode(".png", image[:, :, ::-1])[1].tobytes() for image in images]
    engine = make_engine("cpu", pipeline, seed=4, threads=threads)
    out = engine.field(encoded[0], "x", {}).empty(len(encoded))
    result = engine.prepare(Batch(encoded, np.arange(len(encoded)), epoch, {}), out)
    engine.close()
    return result


def with_rng(transform, number=0):
    return transform.fn(np.full((16, 12, 3), 99, np.uint8), np.random.default_rng(number))


# ---- torchvision ----


@pytest.mark.parametrize("function", [Jitter(), to_float], ids=["image", "tensor"])
def test_threads_do_not_change_a_sample(images, function):
    pipeline = T.Pipeline([T.DecodeImage(), T.Torchvision(function)])
    alone = prepared(pipeline, images)
    np.testing.assert_array_equal(prepared(pipeline, images, threads=4), alone)
    assert len(np.unique(alone.reshape(len(ALL), -1), axis=0)) == len(ALL)
    assert not np.array_equal(prepared(pipeline, images, epoch=4), alone)


def test_the_processs_own_generators_go_on_as_if_nothing_had_drawn_from_them():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with_rng(T.Torchvision(Jitter()))
    assert (torch.rand(()), np.random.rand(), random.random()) == expected


def test_results_are_delivered_as_a_model_gets_them():
    assert with_rng(T.Torchvision(lambda image: image.resize((6, 4)))).shape == (4, 6, 3)
    grey = with_rng(T.Torchvision(lambda image: image.convert("L")))
    assert (grey.dtype, grey.shape) == (np.uint8, (16, 12))
    image = with_rng(T.Torchvision(lambda image: image[:, :5], takes="tensor"))
    assert (image.dtype, image.shape) == (np.uint8, (5, 12, 3))
    one = with_rng(T.Torchvision(lambda image: image[:1], takes="tensor"))
    assert (one.dtype, one.shape) == (np.uint8, (1, 16, 12))
    floats = with_rng(T.Torchvision(lambda image: image / 99.0, takes="tensor"))
    assert (floats.dtype, floats.shape) == (np.float32, (3, 16, 12))
    assert (floats == 1).all()
    with pytest.raises(TypeError, match="must return an image, a tensor or an array, got dict"):
        with_rng(T.Torchvision(lambda image: {"image": image}))


def test_a_deterministic_transform_is_part_of_the_prefix(images):
    half = T.Torchvision(lambda image: image.resize((12, 16)), deterministic=True)
    pipeline = T.Pipeline([T.DecodeImage(), half, T.RandomCrop(8)])
    assert pipeline.prefix == 2
    assert prepared(pipeline, images).shape == (len(ALL), 8, 8, 3)


def test_the_fingerprint_follows_what_a_transform_does():
    def fingerprint(*args, **options):
        return T.Pipeline([T.DecodeImage(), T.Torchvision(*args, **options)]).fingerprint

    mean = [functools.partial(torch.add, other=torch.full((3, 1, 1), value)) for value in (1.0, 1.0, 2.0)]
    same = [fingerprint(Jitter(8)), fingerprint(Jitter(8))]
    others = [
        fingerprint(Jitter(9)),
        fingerprint(Jitter(8), takes="tensor"),
        fingerprint(Jitter(8), deterministic=True),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 4
    assert fingerprint(mean[0]) == fingerprint(mean[1]) != fingerprint(mean[2])


def test_an_error_names_the_users_transform(images):
    def sometimes(image):
        if torch.rand(()) < 0.5:
            raise ValueError("too dark")
        return image

    bad = outcome(T.Pipeline([T.DecodeImage(), T.Torchvision(sometimes)]), images).bad
    assert 0 < len(bad) < len(ALL)
    assert all("<locals>.sometimes raised ValueError: too dark" in each.reason for each in bad)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r'takes must be "PIL" or "tensor", got .numpy'):
        T.Torchvision(Jitter(), takes="numpy")
    with pytest.raises(ConfigError, match="transform must be a transform, which can be called, got 3"):
        T.Torchvision(3)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="must pickle to reach the prep workers"):
        T.Torchvision(lambda image: image if lock else None)
    with pytest.raises(ConfigError, match="a transform of images"):
        T.Pipeline([T.DecodeArray(), T.RandomCrop(3), T.Torchvision(Jitter())])


def compositions():
    """What people write, of both of torchvision's interfaces."""
    v1, v2 = pytest.importorskip("torchvision.transforms"), pytest.importorskip("torchvision.transforms.v2")
    mean_and_std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    return [
        v1.Compose(
            [v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.AutoAugment(), v1.ToTensor(),
             v1.Normalize(*mean_and_std), v1.RandomErasing()]
        ),
        v1.Compose([v1.RandomChoice([v1.Pad(2), v1.Pad(3)]), v1.Resize((16, 16)), v1.ColorJitter(0.4, 0.4, 0.4, 0.1)]),
        v2.Compose(
            [v2.ToImage(), v2.RandomResizedCrop(16, antialias=True), v2.RandAugment(),
             v2.ToDtype(torch.float32, scale=True), v2.Normalize(*mean_and_std)]
        ),
        v2.Compose([v2.RandomOrder([v2.RandomAffine(20), v2.RandomPosterize(2)]), v2.TrivialAugmentWide()]),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(4))
def test_torchvision_itself(images, number):
    """With torchvision at hand (CI has none): equal to the transform with the seed that the sample has."""
    compose = compositions()[number]
    transform = T.Torchvision(compose)
    assert transform.identity() == T.Torchvision(compositions()[number]).identity()
    pipeline = T.Pipeline([T.DecodeImage(), transform])
    alone = prepared(pipeline, images)
    np.testing.assert_array_equal(prepared(pipeline, images, threads=4), alone)
    seed = int(np.random.default_rng(5).integers(2**32))
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    expected = compose(Image.fromarray(images[0]))
    np.testing.assert_array_equal(transform.fn(images[0], np.random.default_rng(5)), np.asarray(expected))


# ---- Albumentations ----


def unchanged(image, **_):
    return image


def composition(limit=0.2):
    albumentations = pytest.importorskip("albumentations")
    return albumentations.Compose(
        [
            albumentations.RandomCrop(20, 20),
            albumentations.HorizontalFlip(p=0.5),
            albumentations.OneOf([albumentations.GaussNoise(), albumentations.RandomGamma()], p=0.8),
            albumentations.RandomBrightnessContrast(limit, limit),
        ]
    )


def test_albumentations_itself(images):
    transform, direct = T.Albumentations(composition()), composition()
    pipeline = T.Pipeline([T.DecodeImage(), transform])
    alone = prepared(pipeline, images)
    assert alone.shape == (len(ALL), 20, 20, 3)
    np.testing.assert_array_equal(prepared(pipeline, images, threads=4), alone)
    direct.set_random_seed(int(np.random.default_rng(5).integers(2**32)))
    np.testing.assert_array_equal(transform.fn(images[0], np.random.default_rng(5)), direct(image=images[0])["image"])


@pytest.mark.slow
def test_albumentations_in_another_process_and_other_threads(tmp_path):
    transform = T.Albumentations(composition())
    image = np.arange(40 * 40 * 3).reshape(40, 40, 3).astype(np.uint8)
    expected = transform.fn(image, np.random.default_rng(2))
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: transform.fn(image, np.random.default_rng(2)), range(20)):
            np.testing.assert_array_equal(result, expected)
    (tmp_path / "transform").write_bytes(pickled(transform))
    np.save(tmp_path / "image.npy", image)
    code = (
        "import pickle, sys, numpy as np; from pathlib import Path; folder = Path(sys.argv[1]);"
        "transform = pickle.loads((folder / 'transform').read_bytes());"
        "np.save(folder / 'made.npy', transform.fn(np.load(folder / 'image.npy'), np.random.default_rng(2)));"
        "print(transform.identity())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    np.testing.assert_array_equal(np.load(Path(tmp_path, "made.npy")), expected)
    assert done.stdout.strip() == transform.identity()


def test_the_fingerprint_follows_albumentations_parameters():
    same, other = T.Albumentations(composition()).identity(), T.Albumentations(composition(0.3)).identity()
    assert same == T.Albumentations(composition()).identity() != other


def test_what_albumentations_cannot_describe_is_refused():
    albumentations = pytest.importorskip("albumentations")
    with pytest.raises(ConfigError, match=r"cannot be identified: .*name"):
        T.Albumentations(albumentations.Compose([albumentations.Lambda(image=unchanged)]))
    with pytest.raises(ConfigError, match="must be a Compose of Albumentations 2, got"):
        T.Albumentations(lambda image: {"image": image})
