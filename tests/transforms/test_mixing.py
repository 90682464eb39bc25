"""MixUp and CutMix: what they draw, their labels, and what they refuse. `prep/test_operations.py` has their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mbaas.transforms as T
from mbaas.errors import ConfigError

LABELS = np.array([2, 0, 4, 4, 1])


def chance(seed=0):
    return np.random.default_rng(seed)


def images(height=12, width=20):
    """Return float images [5, height, width, 3], each with one value of its own."""
    return np.broadcast_to(np.arange(5.0, dtype=np.float32)[:, None, None, None], (5, height, width, 3)).copy()


def test_labels_have_the_weights_of_the_pixels():
    """Each image keeps as much of its label as it keeps of its own pixels; the other part is the image before it."""
    for seed in range(50):
        for transform in (T.MixUp(alpha=0.4, num_classes=5), T.CutMix(alpha=2.0, num_classes=5)):
            given = images()
            found = transform.apply({"image": given, "label": LABELS, "sample_id": LABELS}, chance(seed))
            own, before = np.eye(5)[LABELS], np.eye(5)[np.roll(LABELS, 1)]
            weight = found["image"].mean(axis=(1, 2, 3))[1]  # a blend of the values 1 and 0
            np.testing.assert_allclose(found["label"], weight * own + (1 - weight) * before, atol=1e-5)
            assert found["label"].dtype == np.float32
            np.testing.assert_array_equal(found["sample_id"], LABELS)
            np.testing.assert_array_equal(given, images(), err_msg="the given images are unchanged")


def test_weights_are_betas():
    weights = [
        T.MixUp(alpha=0.3, num_classes=5).apply({"image": images(), "label": LABELS}, chance(seed))["label"][0, 2]
        for seed in range(3000)
    ]
    assert np.mean(weights) == pytest.approx(0.5, abs=0.03)
    assert np.var(weights) == pytest.approx(1 / (4 * (2 * 0.3 + 1)), abs=0.01)  # of Beta(0.3, 0.3)


@pytest.mark.parametrize("kind", [T.MixUp, T.CutMix])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_get_the_values_of_arrays(kind, dtype):
    transform, pictures = kind(num_classes=5, image="x", label="y"), chance(1).random((5, 12, 20, 3), np.float32)
    array = transform.apply({"x": pictures, "y": LABELS}, chance())
    tensors = {"x": torch.from_numpy(pictures.transpose(0, 3, 1, 2)).to(dtype), "y": torch.from_numpy(LABELS).int()}
    tensor = transform.apply(tensors, chance())
    assert (tensor["x"].dtype, tensor["y"].dtype) == (dtype, torch.float32)
    near = {"atol": 1e-6 if dtype == torch.float32 else 0.02}
    np.testing.assert_allclose(tensor["x"].float().permute(0, 2, 3, 1).numpy(), array["x"], **near)
    np.testing.assert_allclose(tensor["y"].numpy(), array["y"], atol=1e-6)


def test_labels_may_be_rows_of_probabilities_already():
    rows = np.eye(5, dtype=np.float32)[LABELS]
    for given in (rows, rows.astype(np.int64), torch.from_numpy(rows).long()):
        mixed = T.CutMix().apply({"image": images(), "label": given}, chance())["label"]
        wanted = T.CutMix(num_classes=5).apply({"image": images(), "label": LABELS}, chance())["label"]
        np.testing.assert_allclose(np.asarray(mixed), wanted, atol=1e-6)
        assert "float32" in str(mixed.dtype)


@pytest.mark.parametrize(
    ("transform", "batch", "sentence"),
    [
        (T.MixUp(), {"image": images()}, "MixUp needs 'label', got a minibatch of 'image'"),
        (T.MixUp(), {"image": [images()[0]], "label": LABELS}, "MixUp needs 'image' of one size, got a list"),
        (T.MixUp(), {"image": images(), "label": LABELS}, "needs num_classes for .*such as MixUp\\(num_classes=10\\)"),
        (T.MixUp(num_classes=4), {"image": images(), "label": LABELS}, "labels must be in \\[0, 3\\], got 0 to 4"),
        (T.CutMix(num_classes=9), {"image": images(), "label": LABELS - 1}, "must be in \\[0, 8\\], got -1 to 3"),
        (
            T.CutMix(num_classes=9),
            {"image": images(), "label": np.zeros((5, 2, 2))},
            "CutMix needs labels \\[n\\] or \\[n, classes\\], got shape \\(5, 2, 2\\)",
        ),
        (
            T.MixUp(num_classes=5),
            {"image": images(), "label": LABELS / 2},
            "MixUp needs whole numbers as labels \\[n\\], got float64",
        ),
        (
            T.MixUp(num_classes=5),
            {"image": images().astype(np.uint8), "label": LABELS},
            "MixUp needs float images, got uint8: end the pipeline with Normalize or ToFloat",
        ),
        (T.CutMix(num_classes=5), {"image": images()[0], "label": LABELS}, "4 axes, got shape \\(12, 20, 3\\)"),
    ],
)
def test_a_minibatch_that_cannot_be_mixed_is_refused(transform, batch, sentence):
    with pytest.raises(ConfigError, match=sentence):
        transform.apply(batch, chance())


def test_bad_parameters_and_places_are_refused():
    with pytest.raises(ConfigError, match=r"^MixUp's alpha must be above 0, got 0.0$"):
        T.MixUp(alpha=0)
    with pytest.raises(ConfigError, match="CutMix's num_classes must be a whole number"):
        T.CutMix(num_classes=1.5)
    with pytest.raises(ConfigError, match=r"is MixUp.*; pass it as batch_fn to join or get_loader"):
        T.Pipeline([T.DecodeImage(), T.MixUp()])
