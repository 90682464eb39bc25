"""Random augmentations of images draw what torchvision draws: probabilities, ranges, and chains of operations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import mbaas.transforms as T
from mbaas.errors import ConfigError
from mbaas.samples.order import uniforms
from mbaas.transforms.auto_augment import gamma
from mbaas.transforms.base import Blur, DrawInputs, Erasure, Mixture, Operation

MANY = 4_000


def drawn(transform, n=MANY, height=40, width=60, seed=0):
    ids = np.arange(n)

    def more(rows, first, count):
        return uniforms(seed, 0, ids[rows], substream=1, draws=count, first=first)

    u = uniforms(seed, 0, ids, substream=1, draws=transform.draws)
    return DrawInputs(u, np.tile((height, width), (n, 1)), None, more)


@pytest.mark.parametrize(
    ("transform", "operation"),
    [
        (T.RandomGrayscale(), Operation("Grayscale")),
        (T.RandomInvert(0.3), Operation("Invert")),
        (T.RandomEqualize(0.3), Operation("Equalize")),
        (T.RandomAutocontrast(0.3), Operation("AutoContrast")),
        (T.RandomSolarize(100, p=0.3), Operation("Solarize", 100)),
        (T.RandomPosterize(3, p=0.3), Operation("Posterize", 3)),
        (T.RandomAdjustSharpness(1.5, p=0.3), Operation("Sharpness", 1.5)),
    ],
)
def test_an_operation_is_applied_with_its_probability(transform, operation):
    chains = transform.step(drawn(transform)).chains
    assert set(chains) == {(), (operation,)}
    assert sum(map(bool, chains)) / MANY == pytest.approx(transform.p, abs=0.03)


def test_erased_windows_have_the_area_and_shape_that_were_asked_for():
    transform = T.RandomErasing(p=0.8, scale=(0.1, 0.2), ratio=(0.5, 2.0), value=(1, 2, 3))
    chains = transform.step(drawn(transform, height=200, width=300)).chains
    boxes = np.array([each.box for chain in chains for each in chain])
    assert len(boxes) / MANY == pytest.approx(0.8, abs=0.03)
    assert {each.value for chain in chains for each in chain} == {(1.0, 2.0, 3.0)}
    top, left, height, width = boxes.T
    assert (boxes[:, :2] >= 0).all()
    assert ((top + height).max() <= 200, (left + width).max() <= 300) == (True, True)
    share, ratio = height * width / 60_000, height / width
    assert (share.min(), share.max()) == pytest.approx((0.1, 0.2), abs=0.005)
    assert (ratio.min(), ratio.max()) == pytest.approx((0.5, 2.0), abs=0.05)


def test_what_is_to_be_erased_is_smaller_than_the_image():
    transform = T.RandomErasing(p=1.0, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert set(transform.step(drawn(transform, height=20, width=20)).chains) == {()}


def test_a_blur_has_a_random_width_within_its_range():
    transform = T.GaussianBlur((3, 5), sigma=(0.5, 1.5))
    blurs = [each for (each,) in transform.step(drawn(transform)).chains]
    assert all(isinstance(each, Blur) and each.kernel_size == (3, 5) for each in blurs)
    assert (min(each.sigma for each in blurs), max(each.sigma for each in blurs)) == pytest.approx((0.5, 1.5), abs=0.01)
    assert T.GaussianBlur(3, 0.7).sigma == (0.7, 0.7)


def test_a_rotation_maps_the_centre_to_itself_and_a_corner_by_its_angle():
    transform = T.RandomRotation((90, 90))
    step = transform.step(drawn(transform, 3, height=40, width=60))
    centre, up = np.array([30, 20, 1]), np.array([30, 10, 1])
    assert np.allclose(step.to_source @ centre, centre)
    assert np.allclose(step.to_source @ up, [40, 20, 1]), "counter-clockwise: the upper point was to the right"
    expanded = T.RandomRotation((90, 90), expand=True).step(drawn(transform, 3, height=40, width=60))
    assert expanded.sizes.tolist() == [[60, 40]] * 3


def test_an_affine_map_moves_by_whole_pixels_within_its_range():
    transform = T.RandomAffine(0, translate=(0.1, 0.2))
    step = transform.step(drawn(transform, height=40, width=60))
    shift = -step.to_source[:, :2, 2]
    assert np.allclose(shift, np.rint(shift))
    assert np.abs(shift).max(axis=0).round().tolist() == [6, 8]


def test_a_perspective_moves_each_corner_inwards_by_at_most_half_of_the_scale():
    transform = T.RandomPerspective(0.5, p=0.4)
    step = transform.step(drawn(transform, height=40, width=60))
    assert step.which.mean() == pytest.approx(0.4, abs=0.03)
    corners = np.array([[0, 0, 1], [59, 0, 1], [59, 39, 1], [0, 39, 1]])
    moved = np.linalg.inv(step.to_source) @ corners.T
    moved = (moved[:, :2] / moved[:, 2:]).transpose(0, 2, 1)
    inwards = np.abs(moved - corners[:, :2])
    assert np.allclose(inwards, np.rint(inwards), atol=1e-6)
    assert inwards.max(axis=(0, 1)).round().tolist() == [15, 10]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_perspective_of_a_tiny_image_is_finite(size):
    transform = T.RandomPerspective(1.0, p=1.0)
    assert np.isfinite(transform.step(drawn(transform, height=size, width=size)).to_source).all()


def test_random_augment_chooses_evenly_among_fourteen_operations_of_one_magnitude():
    transform = T.RandAugment(num_ops=1)
    chains = transform.step(drawn(transform)).chains
    found = Counter(each.name for chain in chains for each in chain)
    assert len(found) == 13, "one of fourteen changes nothing"
    assert all(count / MANY == pytest.approx(1 / 14, abs=0.02) for count in found.values())
    values = {name: sorted({each.value for chain in chains for each in chain if each.name == name}) for name in found}
    assert values["Rotate"] == pytest.approx([-9, 9])
    assert values["Brightness"] == pytest.approx([1 - 0.27, 1 + 0.27])
    assert values["TranslateX"] == [-8, 8], "9 / 30 of 150 / 331 of the width, cut to whole pixels"
    assert values["TranslateY"] == [-5, 5]
    assert values["Posterize"] == [7], "8 - 1.2, rounded"
    assert values["Solarize"] == pytest.approx([178.5])
    assert values["Equalize"] == [0]


def test_trivial_augment_draws_its_magnitude():
    transform = T.TrivialAugmentWide()
    chains = transform.step(drawn(transform, 20_000)).chains
    assert max(map(len, chains)) == 1
    angles = {round(abs(each.value), 3) for chain in chains for each in chain if each.name == "Rotate"}
    assert sorted(angles) == pytest.approx([number * 4.5 for number in range(31)])


def test_auto_augment_applies_pairs_of_its_policy():
    transform = T.AutoAugment("svhn")
    names = {tuple(each.name for each in chain) for chain in transform.step(drawn(transform)).chains}
    assert ("Equalize", "Rotate") in names
    assert ("ShearX", "Invert") in names
    assert ("Posterize", "Rotate") not in names, "that is ImageNet's"


def test_the_weights_of_a_mixture_add_up_to_one_and_have_a_dirichlets_spread():
    transform = T.AugMix(alpha=2.0, mixture_width=3, chain_depth=2)
    mixtures = [each for (each,) in transform.step(drawn(transform)).chains]
    assert all(isinstance(each, Mixture) for each in mixtures)
    own = np.array([each.own for each in mixtures])
    weights = np.array([each.weights for each in mixtures])
    assert np.allclose(own + weights.sum(axis=1), 1)
    assert (own.mean(), own.var()) == pytest.approx((0.5, 0.05), abs=0.01), "Beta(2, 2)"
    shares = weights / weights.sum(axis=1, keepdims=True)
    assert shares.mean(axis=0) == pytest.approx([1 / 3] * 3, abs=0.02)
    assert shares.var(axis=0) == pytest.approx([2 / 63] * 3, abs=0.004), "Dirichlet(2, 2, 2)"
    assert {len(chain) for each in mixtures for chain in each.chains} == {2}
    drawn_depths = {len(chain) for (each,) in T.AugMix().step(drawn(T.AugMix())).chains for chain in each.chains}
    assert drawn_depths == {1, 2, 3}


@pytest.mark.parametrize("shape", [0.3, 1.0, 2.5])
def test_gamma_numbers_have_their_mean_and_variance(shape):
    def more(rows, first, count):
        return uniforms(1, 0, rows, substream=1, draws=count, first=first)

    found = gamma(more, 20_000, 7, 2, shape)
    assert (found > 0).all()
    assert found.mean() == pytest.approx(shape, rel=0.03)
    assert found.var() == pytest.approx(shape, rel=0.08)


def test_a_sample_draws_the_same_whoever_is_beside_it():
    for transform in (T.AugMix(), T.RandAugment(), T.RandomErasing(), T.RandomPerspective()):
        many, few = transform.step(drawn(transform, 64)), transform.step(drawn(transform, 5))
        if isinstance(transform, T.RandomPerspective):
            assert np.array_equal(many.to_source[:5], few.to_source)
        else:
            assert many.chains[:5] == few.chains
            assert not any(isinstance(each, Erasure) and each.box[2] == 0 for chain in few.chains for each in chain)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: T.GaussianBlur(4), "GaussianBlur's kernel_size must hold odd numbers, got"),
        (lambda: T.RandomSolarize(256), r"RandomSolarize's threshold must be in \[0, 255\], got 256"),
        (lambda: T.RandomPosterize(9), "RandomPosterize's bits must be a whole number"),
        (lambda: T.RandomRotation(30, interpolation="cubic"), 'interpolation must be "nearest" or "bilinear"'),
        (lambda: T.RandAugment(magnitude=31), r"RandAugment's magnitude must be a whole number in \[0, 30\], got 31"),
        (lambda: T.AutoAugment("mnist"), 'AutoAugment\'s policy must be "imagenet", "cifar10" or "svhn", got'),
        (lambda: T.AugMix(alpha=0), "AugMix's alpha must be above 0, got 0"),
        (lambda: T.Pad((1, 2, 3)), "Pad's padding must hold one, two or four values, got"),
        (lambda: T.Pad(1, fill=300), r"Pad's fill must be in \[0, 255\], got 300"),
        (lambda: T.RandomAffine(0, translate=(0.1, 2)), r"RandomAffine's translate must be in \[0, 1\], got 2"),
    ],
)
def test_wrong_parameters_are_refused_by_name(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_torchvisions_enumerations_are_accepted():
    class Mode:
        value = "bilinear"

    assert T.RandomRotation(30, interpolation=Mode()) == T.RandomRotation(30, interpolation="bilinear")
