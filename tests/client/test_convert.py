"""Prepared arrays become NumPy arrays or torch tensors with the right axes, and shared memory stays unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mbaas.client.batches import BatchCutter, BlockView
from mbaas.client.convert import make_converter
from mbaas.samples.fields import Arrays
from mbaas.transforms import Normalize


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


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_what_no_image_decoder_made_stays_as_it_is_whatever_it_looks_like(format):
    """A volume stays unchanged even if its field is named "image"."""
    made = np.random.default_rng(0).integers(0, 255, (4, 5, 7, 3), np.uint8)
    for name in ("image", "volume"):
        converter = make_converter(format, None, None, has_images=False)
        found = converter.finish(converter.start({name: made.copy(), "sample_id": np.arange(4)}))
        assert found[name].shape == made.shape
        np.testing.assert_array_equal(found[name], made)


def shared_part(rows: list[int]) -> Arrays:
    """A part in immutable memory, as Ray returns it."""
    ids = np.array(rows, np.int64)
    image = np.repeat(ids, 5 * 7 * 3).astype(np.uint8).reshape(len(ids), 5, 7, 3)
    part = {"image": image, "label": ids % 10, "sample_id": ids + 100, "row": ids}
    return {name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for name, array in part.items()}


def cut(parts: list[Arrays], size: int) -> Arrays:
    cutter = BatchCutter()
    cutter.put(BlockView(parts))
    return cutter.cut(size)


def test_tensors_of_a_minibatch_of_two_parts_are_what_was_put_together_and_no_second_copy():
    arrays = cut([shared_part([0, 3]), shared_part([1, 2, 4])], 4)
    converter = make_converter("torch", None, None)
    batch = converter.finish(converter.start(arrays))
    for name, tensor in batch.items():
        assert np.shares_memory(tensor.numpy(), arrays[name]), name
    assert batch["sample_id"].tolist() == [100, 101, 102, 103]


def test_tensors_of_a_minibatch_of_one_part_can_be_written_and_the_part_stays():
    part = shared_part([0, 1, 2, 3])
    before = {name: array.copy() for name, array in part.items()}
    arrays = cut([part], 3)
    assert np.shares_memory(arrays["image"], part["image"])
    converter = make_converter("torch", None, None)
    for tensor in converter.finish(converter.start(arrays)).values():
        tensor.fill_(7)
    for name, array in part.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[0, 3], [1, 2, 4]]], ids=["one part", "two parts"])
@pytest.mark.parametrize("normalize", [None, Normalize((0.5,) * 3, (0.2,) * 3)], ids=["pixels", "normalized"])
def test_arrays_refuse_to_be_written_whatever_a_minibatch_was_cut_from(rows, normalize):
    """Normalized images are the exception: they are made for this minibatch alone."""
    converter = make_converter("numpy", None, normalize)
    batch = converter.finish(converter.start(cut([shared_part(each) for each in rows], 3)))
    for name, array in batch.items():
        if name == "image" and normalize is not None:
            array[:] = 0.0
            continue
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
