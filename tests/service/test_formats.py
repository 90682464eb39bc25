"""Minibatches have the promised layout, and no trial can change the data of another."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from service_feeds import MEAN, STD

import mbaas
from mbaas.dataset import synthetic
from support.trials import record_epoch

pytestmark = pytest.mark.usefixtures("slotted", "ray_clean")

WAYS = pytest.mark.parametrize(
    "feed_fixture", ["plain", "tiny", "slotted"], ids=["in the object store", "inside of messages", "in slots"]
)
"""A block reaches a trial through the object store, inside a message, or in a slot."""


def first_batches(feed, format, consumers=("one", "two")):
    """Join as each consumer. Return the loaders, their first minibatches of the same epoch, and the loops."""
    mbaas.announce(feed.name, consumers)
    loaders = [mbaas.join(feed.name, consumer=name, format=format) for name in consumers]
    loops = [iter(loader) for loader in loaders]
    return loaders, [next(loop) for loop in loops], loops


def close(loaders):
    for loader in loaders:
        loader.close()


def test_numpy_minibatches_are_nhwc_uint8_and_int64(plain):
    with mbaas.join(plain.name, consumer="me", format="numpy") as loader:
        batch = next(iter(loader))
        assert sorted(batch) == ["image", "label", "sample_id"]
        assert (batch["image"].shape, batch["image"].dtype) == ((64, 32, 32, 3), np.uint8)
        for name in ("label", "sample_id"):
            assert (batch[name].shape, batch[name].dtype) == ((64,), np.int64)
        np.testing.assert_array_equal(batch["label"], batch["sample_id"] % 10)
        del batch


def test_torch_minibatches_are_nchw_in_channels_last_memory(plain):
    with mbaas.join(plain.name, consumer="me") as loader:
        batch = next(iter(loader))
        image = batch["image"]
        assert (tuple(image.shape), image.dtype) == ((64, 3, 32, 32), torch.uint8)
        assert image.stride() == (3 * 32 * 32, 1, 3 * 32, 3)
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert (batch["label"].dtype, batch["sample_id"].dtype) == (torch.int64, torch.int64)


def test_both_formats_hold_the_same_bytes(plain):
    mbaas.announce(plain.name, ["as numpy", "as torch"])
    with (
        mbaas.join(plain.name, consumer="as numpy", format="numpy") as one,
        mbaas.join(plain.name, consumer="as torch", format="torch") as two,
    ):
        for array, tensor in zip(one, two, strict=True):
            np.testing.assert_array_equal(array["image"], tensor["image"].permute(0, 2, 3, 1).numpy())
            np.testing.assert_array_equal(array["sample_id"], tensor["sample_id"].numpy())
        del array


@pytest.mark.parametrize("name", ["image", "label", "sample_id"])
@pytest.mark.parametrize("batch_size", [64, 500], ids=["inside a block", "across blocks"])
def test_numpy_arrays_of_an_unnormalized_feed_refuse_to_be_written(plain, name, batch_size):
    with mbaas.join(plain.name, consumer="me", format="numpy", batch_size=batch_size) as loader:
        array = next(iter(loader))[name]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        del array


def test_small_arrays_that_travel_inside_of_messages_refuse_to_be_written_too(tiny):
    with mbaas.join(tiny.name, consumer="me", format="numpy") as loader:
        batch = next(iter(loader))
        for name in ("label", "sample_id"):
            with pytest.raises(ValueError, match="read-only"):
                batch[name][0] = 0
        del batch


@pytest.mark.parametrize(
    "feed_fixture", ["plain", "tiny", "slotted"], ids=["in the object store", "inside of messages", "in slots"]
)
def test_a_trial_that_overwrites_its_tensors_changes_nothing_for_another(feed_fixture, request):
    """Both trials read the same block in one process. This is the worst case: even its deserialized form is shared."""
    feed = request.getfixturevalue(feed_fixture)
    loaders, (vandal, victim), loops = first_batches(feed, "torch")
    before = {name: tensor.clone() for name, tensor in victim.items()}
    for tensor in vandal.values():
        tensor.zero_()
    for name, tensor in victim.items():
        assert torch.equal(tensor, before[name]), name
    vandal, victim = next(loops[0]), None
    vandal["image"].fill_(7)
    victim = next(loops[1])
    assert not torch.equal(vandal["image"], victim["image"])
    assert torch.equal(vandal["sample_id"], victim["sample_id"])
    close(loaders)


@pytest.mark.parametrize(
    "feed_fixture", ["plain", "tiny", "slotted"], ids=["in the object store", "inside of messages", "in slots"]
)
def test_what_one_trial_overwrites_is_not_what_a_later_reader_of_the_block_gets(feed_fixture, request):
    """The vandal finishes its epoch before the victim reads, so all memory within its reach is overwritten."""
    feed = request.getfixturevalue(feed_fixture)
    mbaas.announce(feed.name, ["vandal", "victim"])
    with (
        mbaas.join(feed.name, consumer="vandal") as vandal,
        mbaas.join(feed.name, consumer="victim", format="numpy") as victim,
    ):
        image_sums = []
        for batch in vandal:
            image_sums.append(batch["image"].double().sum().item())
            for tensor in batch.values():
                tensor.zero_()
        seen = [batch["image"].sum(dtype=np.float64) for batch in victim]
        np.testing.assert_allclose(seen, image_sums, rtol=1e-6)
        assert victim.ledger.exact


def decoded(feed_data, sample_id):
    """Pixels of a sample, read without the service: uint8[h, w, 3]."""
    content = np.empty(int(feed_data.lengths(np.array([sample_id]))[0]), np.uint8)
    feed_data.reader().read_into(int(sample_id), content)
    return cv2.imdecode(content, cv2.IMREAD_COLOR_RGB)


@pytest.mark.parametrize("format", ["numpy", "torch"])
def test_normalize_gives_private_floats_that_follow_the_formula(tiny, format):
    with mbaas.join(tiny.name, consumer="me", format=format) as loader:
        batch = next(iter(loader))
        image = batch["image"] if format == "numpy" else batch["image"].permute(0, 2, 3, 1).numpy()
        raw = np.stack([decoded(synthetic(1003), i) for i in batch["sample_id"]])
        expected = (raw / 255.0 - np.array(MEAN)) / np.array(STD)
        assert image.dtype == np.float32
        np.testing.assert_allclose(image, expected, atol=1e-5)
        batch["image"][:] = 0.0
        del batch, image


def test_a_normalized_torch_image_is_channels_first(tiny):
    with mbaas.join(tiny.name, consumer="me") as loader:
        image = next(iter(loader))["image"]
        assert (tuple(image.shape), image.dtype) == ((64, 3, 8, 8), torch.float32)
        assert image.is_contiguous(memory_format=torch.channels_last)


def test_a_normalized_epoch_is_exact(tiny):
    with mbaas.join(tiny.name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(1003)) == []
