"""What a trial gets of the arrays that were prepared, as numpy and as torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mbaas.client.convert import make_converter


def converted(images, format="torch"):
    converter = make_converter(format, None, None)
    labels = np.arange(len(images))
    return converter.finish(converter.start({"image": images, "label": labels, "sample_id": labels}))["image"]


def test_images_become_channels_first_in_channels_last_memory():
    images = np.random.default_rng(0).integers(0, 255, (4, 5, 7, 3), np.uint8)
    found = converted(images)
    assert found.shape == (4, 3, 5, 7)
    assert found.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(found.permute(0, 2, 3, 1), images)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5, 7), np.float32),
        ((5, 7, 3), np.float32),
        ((5, 7, 3), np.int8),
        ((5, 7, 1), np.uint8),
        ((3, 5, 7), np.uint8),
        ((9,), np.uint8),
    ],
    ids=["channels-first floats", "channels-last floats", "signed", "one channel", "channels-first bytes", "no image"],
)
def test_what_else_a_map_made_stays_as_it_is(shape, dtype):
    made = np.random.default_rng(0).integers(0, 255, (4, *shape)).astype(dtype)
    found = converted(made)
    assert found.shape == made.shape
    np.testing.assert_array_equal(found, made)
    np.testing.assert_array_equal(converted(made, format="numpy"), made)
