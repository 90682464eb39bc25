"""A synthetic dataset has any number of valid PNG images, without files or memory for them."""

from __future__ import annotations

import pickle
import tracemalloc

import cv2
import numpy as np
import pytest

from mbaas.dataset import Dataset, synthetic
from mbaas.errors import ConfigError


def sample(data: Dataset, sample_id: int) -> bytes:
    buffer = np.zeros(int(data.lengths(np.array([sample_id]))[0]), np.uint8)
    data.reader().read_into(sample_id, buffer)
    return buffer.tobytes()


@pytest.mark.parametrize(("height", "width"), [(8, 8), (1, 1), (7, 13), (200, 150)])
def test_every_sample_is_a_png_of_noise(height: int, width: int) -> None:
    """200 x 150 x 3 bytes do not fit in one stored deflate block of 64 KiB."""
    data = synthetic(1_000, height=height, width=width)
    files = [np.frombuffer(sample(data, sample_id), np.uint8) for sample_id in (0, 1, 999)]
    images = [np.asarray(cv2.imdecode(file, cv2.IMREAD_UNCHANGED)) for file in files]
    assert all(image.shape == (height, width, 3) for image in images)
    assert not np.array_equal(images[0], images[1])
    if height == 200:
        assert abs(images[0].mean() - 127.5) < 2


def test_a_sample_depends_on_its_id_alone() -> None:
    assert sample(synthetic(10), 7) == sample(synthetic(10**8, num_classes=3), 7)


def test_a_hundred_million_samples_take_no_memory() -> None:
    tracemalloc.start()
    data = synthetic(10**8, num_classes=7)
    ids = np.array([0, 6, 7, 10**8 - 1])
    assert len(data) == 10**8
    assert data.labels(ids).tolist() == [0, 6, 0, (10**8 - 1) % 7]
    assert data.lengths(ids).tolist() == [len(sample(data, 0))] * 4
    assert data.total_bytes == 10**8 * len(sample(data, 0))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert data.labels(ids).dtype == data.lengths(ids).dtype == np.int64
    assert data.class_names == tuple("0123456")
    assert data.uri(12) == "synthetic://100000000x8x8x7/12.png"


def test_a_pickle_is_small_and_the_same_dataset() -> None:
    data = synthetic(10**8)
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1_000
    assert (again.fingerprint, repr(again), sample(again, 3)) == (
        data.fingerprint,
        repr(data),
        sample(data, 3),
    )


def test_datasets_that_differ_have_fingerprints_that_differ() -> None:
    variants = [
        synthetic(10),
        synthetic(11),
        synthetic(10, height=9),
        synthetic(10, width=9),
        synthetic(10, num_classes=9),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)
    assert synthetic(10).fingerprint == variants[0].fingerprint


@pytest.mark.parametrize("argument", ["num_samples", "height", "width", "num_classes"])
def test_an_argument_below_one_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument} must be at least 1, got 0"):
        synthetic(**{"num_samples": 5, argument: 0})


def test_a_buffer_of_another_length_is_refused() -> None:
    data = synthetic(5)
    with pytest.raises(ConfigError, match=r"5x8x8x10/3.png must have \d+ bytes, got 4"):
        data.reader().read_into(3, np.zeros(4, np.uint8))
