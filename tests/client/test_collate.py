"""Images of any size and their masks are collated as a list, padded or packed, for NumPy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mbaas.client.convert import check_names, collating, make_converter
from mbaas.errors import ConfigError
from mbaas.samples.fields import Arrays, Field, Packed
from mbaas.transforms import Normalize
from mbaas.wire.samples import SampleSpec

SIZES = [(4, 6), (3, 9), (7, 2)]
MASKS = [2, 0, 1]
NORMALIZE = Normalize(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
SPEC = SampleSpec(
    Field("image", (None, None, 3), "uint8", longest=27), (Field("masks", (None, None, None), "uint8", longest=54),)
)


def images() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


def masks() -> list[Any]:
    return [np.full((MASKS[number], *SIZES[number]), number + 1, np.uint8) for number in range(3)]


def packed(values: list[Any], sized: int) -> Packed:
    """Pack values with other bytes before and after them, as in a part of a block."""
    tail = values[0].shape[sized:]
    flat = [np.full((3, *tail), 9, np.uint8), *(value.reshape(-1, *tail) for value in values), np.zeros((2, *tail))]
    bounds = np.cumsum([3, *map(len, flat[1:-1])])
    return Packed(np.concatenate(flat).astype(np.uint8), bounds, np.array([value.shape[:sized] for value in values]))


def minibatch(how: Any, format: str, normalize: Normalize | None = None) -> dict[str, Any]:
    arrays: Arrays = {"image": packed(images(), 2), "masks": packed(masks(), 3), "sample_id": np.arange(3)}
    converter = collating(make_converter(format, None, normalize), SPEC, how)
    return converter.finish(converter.start(arrays))


def wanted(format: str, normalize: Normalize | None) -> list[Any]:
    """Convert each image separately, as a minibatch of one."""
    found = []
    for image in images():
        converter = make_converter(format, None, normalize)
        found.append(converter.finish(converter.start({"image": image[None].copy()}))["image"][0])
    return found


both = pytest.mark.parametrize("format", ["torch", "numpy"])
normalized = pytest.mark.parametrize("normalize", [None, NORMALIZE], ids=["bytes", "normalized"])


@both
@normalized
def test_a_list_has_each_image_as_it_is(format: str, normalize: Normalize | None) -> None:
    batch = minibatch("list", format, normalize)
    assert list(batch) == ["image", "masks", "sample_id"]
    for image, alone in zip(batch["image"], wanted(format, normalize), strict=True):
        assert (type(image), image.dtype, image.shape) == (type(alone), alone.dtype, alone.shape)
        np.testing.assert_array_equal(image, alone)
    for mask, alone in zip(batch["masks"], masks(), strict=True):
        np.testing.assert_array_equal(mask, alone)
    if format == "torch":
        assert batch["image"][0].shape == (3, 4, 6)
        shared = [image.untyped_storage().data_ptr() for image in batch["image"]]
        assert len(set(shared)) == 1, "views of one memory"


@both
@normalized
def test_padded_images_have_zeros_to_the_right_and_below(format: str, normalize: Normalize | None) -> None:
    batch = minibatch("pad", format, normalize)
    assert list(batch) == ["image", "image_size", "masks", "masks_size", "sample_id"]
    assert batch["image_size"].tolist() == [list(size) for size in SIZES]
    assert batch["masks_size"].tolist() == [[count, *size] for count, size in zip(MASKS, SIZES, strict=True)]
    together = batch["image"] if format == "numpy" else batch["image"].permute(0, 2, 3, 1)
    assert together.shape == (3, 7, 9, 3)
    if format == "torch":
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    for image, alone, (height, width) in zip(together, wanted(format, normalize), SIZES, strict=True):
        np.testing.assert_array_equal(image[:height, :width], alone if format == "numpy" else alone.permute(1, 2, 0))
        assert not image[height:].any()
        assert not image[:, width:].any()
    assert batch["masks"].shape == (3, 2, 7, 9)
    for row, alone in enumerate(masks()):
        count, height, width = alone.shape
        np.testing.assert_array_equal(batch["masks"][row, :count, :height, :width], alone)
    assert batch["masks"].sum() == sum(alone.sum() for alone in masks())


@both
@normalized
def test_packed_images_are_pixels_end_to_end(format: str, normalize: Normalize | None) -> None:
    batch = minibatch("packed", format, normalize)
    assert list(batch) == ["image", "image_bounds", "image_size", "masks", "masks_bounds", "masks_size", "sample_id"]
    assert batch["image"].shape == (24 + 27 + 14, 3)
    assert batch["image_bounds"].tolist() == [0, 24, 51, 65]
    for row, alone in enumerate(wanted(format, normalize)):
        start, stop = batch["image_bounds"][row : row + 2].tolist()
        image = batch["image"][start:stop].reshape(*batch["image_size"][row].tolist(), 3)
        np.testing.assert_array_equal(image, alone if format == "numpy" else alone.permute(1, 2, 0))
    assert batch["masks"].tolist() == np.concatenate([mask.ravel() for mask in masks()]).tolist()


@pytest.mark.parametrize("how", ["list", "pad", "packed"])
def test_arrays_of_numpy_are_read_only(how: Any) -> None:
    batch = minibatch(how, "numpy")
    for value in (*batch["image"], *batch["masks"]) if how == "list" else (batch["image"], batch["masks"]):
        with pytest.raises(ValueError, match="read-only"):
            value[...] = 1


@both
def test_what_a_map_made_keeps_its_axes(format: str) -> None:
    floats = [image.astype(np.float32)[:, :, :1] for image in images()]
    column = Packed(
        np.concatenate([image.reshape(-1, 1) for image in floats]), np.cumsum([0, 24, 27, 14]), np.array(SIZES)
    )
    spec = SampleSpec(Field("image", (None, None, 1), "float32", longest=27), ())
    converter = collating(make_converter(format, None, None), spec, "list")
    for found, alone in zip(converter.finish(converter.start({"image": column}))["image"], floats, strict=True):
        np.testing.assert_array_equal(found, alone)


@both
@pytest.mark.parametrize("how", ["list", "pad"])
def test_what_no_image_decoder_made_keeps_its_axes_whatever_it_looks_like(how: Any, format: str) -> None:
    converter = collating(make_converter(format, None, None, has_images=False), SPEC, how, has_images=False)
    found = converter.finish(converter.start({"image": packed(images(), 2)}))["image"]
    for row, alone in enumerate(images()):
        np.testing.assert_array_equal(found[row][: alone.shape[0], : alone.shape[1]], alone)
    assert found[0].shape == ((4, 6, 3) if how == "list" else (7, 9, 3))


def test_names_beside_a_field_are_not_taken() -> None:
    spec = SampleSpec(SPEC.made, (Field("image_size", (2,), "int64"),))
    check_names(spec, "list")
    for how in ("pad", "packed"):
        with pytest.raises(ConfigError, match=f"^collate='{how}' adds 'image_size' to a minibatch, which is a field"):
            check_names(spec, how)
    check_names(SampleSpec(SPEC.made, (Field("image_length", (), "int64"),)), "pad")
