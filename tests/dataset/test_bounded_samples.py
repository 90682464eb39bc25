"""Files that are too large for a sample are bad samples, and no memory is allocated for them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from mbaas.dataset import Dataset, read_images
from mbaas.dataset.base import bounded
from mbaas.errors import BadSampleError
from mbaas.memory.budgets import MAX_SAMPLE_BYTES

HUGE_BYTES = 64 << 30


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    """Five files; the third is sparse, with a length of 64 GiB."""
    (tmp_path / "class").mkdir()
    for number in range(5):
        (tmp_path / "class" / f"{number}.png").write_bytes(bytes([number]) * (10 + number))
    os.truncate(tmp_path / "class" / "2.png", HUGE_BYTES)
    return read_images(tmp_path)


def test_a_file_that_is_too_large_is_a_bad_sample_without_bytes_and_its_neighbours_are_read(data: Dataset) -> None:
    found = pickle.loads(pickle.dumps(bounded(data), protocol=5))
    lengths = found.lengths(np.arange(5))
    assert lengths.tolist() == [10, 11, 0, 13, 14]
    assert found.total_bytes == 48
    assert (found.fingerprint, found.uri(2), len(found)) == (data.fingerprint, data.uri(2), 5)
    assert found.labels(np.arange(5)).tolist() == [0] * 5
    reader = found.reader()
    for sample in (0, 1, 3, 4):
        buffer = np.zeros(lengths[sample], np.uint8)
        reader.read_into(sample, buffer)
        assert buffer.tolist() == [sample] * (10 + sample)
    with pytest.raises(BadSampleError) as caught:
        reader.read_into(2, np.zeros(0, np.uint8))
    assert caught.value.uri == data.uri(2)
    assert caught.value.reason == "it has 68,719,476,736 bytes, over the limit of 1,073,741,824 bytes for a sample"


@pytest.mark.parametrize(("most", "bad"), [(13, [2, 4]), (14, [2]), (HUGE_BYTES - 1, [2])])
def test_a_file_of_just_the_limit_is_no_bad_sample(data: Dataset, most: int, bad: list[int]) -> None:
    assert np.flatnonzero(bounded(data, most).lengths(np.arange(5)) == 0).tolist() == bad


def test_a_dataset_of_files_that_are_small_enough_stays_what_it_is(data: Dataset) -> None:
    assert bounded(data, HUGE_BYTES) is data
    assert MAX_SAMPLE_BYTES < HUGE_BYTES
