"""Normalize gives the same numbers in NumPy and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mbaas import transforms as T
from mbaas.errors import ConfigError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 7, 5, 3), np.uint8)


def channels_last(images):
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float16", 1e-3)])
def test_numpy_standardises(images, dtype, rtol):
    images.flags.writeable = False
    result = T.Normalize(MEAN, STD, dtype).apply_numpy(images)
    assert result.dtype == dtype
    assert result.flags.writeable
    np.testing.assert_allclose(result, (images / 255.0 - MEAN) / STD, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_gives_the_same_numbers_in_channels_last_memory_and_leaves_its_input(images, dtype):
    tensor = channels_last(images)
    result = T.Normalize(MEAN, STD, dtype).apply_torch(tensor)
    assert result.dtype == getattr(torch, dtype)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(tensor, channels_last(images))
    expected = torch.from_numpy(T.Normalize(MEAN, STD).apply_numpy(images)).permute(0, 3, 1, 2)
    assert torch.equal(result, expected.to(result.dtype))


def test_what_cannot_be_converted_is_refused(images):
    with pytest.raises(ConfigError, match="NumPy has no bfloat16"):
        T.Normalize(MEAN, STD, "bfloat16").apply_numpy(images)
    with pytest.raises(ConfigError, match="uint8 images, got float32"):
        T.Normalize(MEAN, STD).apply_numpy(images.astype(np.float32))
    with pytest.raises(ConfigError, match=r"uint8 images, got torch.float32"):
        T.Normalize(MEAN, STD).apply_torch(channels_last(images).float())
