"""The directory knows which samples a node keeps and where, and slabs are laid out without gaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.cache.directory import Directory, MinIO
from mbaas.cache.slab import Load, extract, pack
from mbaas.samples.placement import PartRequest

LENGTHS = st.lists(st.integers(0, 50), max_size=40).map(lambda x: np.array(x, dtype=np.int64))


def published() -> Directory:
    directory = Directory(10)
    for slab, ids, lengths in (3, [7, 2], [5, 4]), (5, [0, 9, 4], [1, 1, 6]):
        sizes = np.array(lengths)
        directory.publish(slab, np.array(ids), offsets=pack(sizes), lengths=sizes)
    return directory


def test_lookup_tells_where_each_sample_lies() -> None:
    directory = published()
    locations = directory.lookup(np.array([4, 7, 1]))
    assert locations["slab"].tolist() == [5, 3, 0]
    assert locations["offset"].tolist() == [2, 0, 0]
    assert locations["length"].tolist() == [6, 5, 0]
    assert directory.slabs(np.array([9, 3])).tolist() == [5, 0]


def test_totals_follow_what_is_published() -> None:
    directory = published()
    assert (directory.samples, directory.nbytes) == (5, 17)
    assert directory.cached_ids().tolist() == [0, 2, 4, 7, 9]
    directory.validate()


@pytest.mark.parametrize("column", ["slab", "offset", "length"])
def test_validate_sees_a_wrong_entry(column: str) -> None:
    directory = published()
    directory._locations[column][9] += 1
    with pytest.raises((AssertionError, KeyError)):
        directory.validate()


def test_validate_sees_a_wrong_total() -> None:
    directory = published()
    directory.samples -= 1
    with pytest.raises(AssertionError):
        directory.validate()


def test_without_unreadable_samples_the_others_are_where_pack_puts_them() -> None:
    """Samples of 2, 3, 0 and 4 bytes. The second cannot be read, so 2 + 0 + 4 bytes stay, at 0, 2 and 2."""
    lengths = np.array([2, 3, 0, 4])
    rows = np.arange(4)
    load = Load(1, PartRequest(0), 0, None, rows, rows, lengths)
    slab = np.arange(9, dtype=np.uint8)
    assert extract(slab, lengths, load.readable({})) is slab
    assert extract(slab, lengths, load.readable({1: "gone"})).tolist() == [0, 1, 5, 6, 7, 8]
    assert pack(lengths[load.readable({1: "gone"})]).tolist() == [0, 2, 2]
    assert extract(slab, lengths, load.readable(dict.fromkeys(range(4), "gone"))).tolist() == []


def test_admits_what_fits_one_after_the_other() -> None:
    """Budget 10: 4 fits (6 left), 7 does not, 5 does (1 left), 2 does not, 1 does (0 left)."""
    minio = MinIO(10)
    assert minio.admit(np.array([4, 7, 5, 2, 1])).tolist() == [True, False, True, False, True]
    assert (minio.used_bytes, minio.free_bytes) == (10, 0)


def test_budget_that_holds_everything_exactly() -> None:
    minio = MinIO(12)
    assert minio.admit(np.array([5, 7])).all()
    assert not minio.admit(np.array([1])).any()


def test_an_empty_sample_is_never_admitted() -> None:
    assert MinIO(0).admit(np.array([0, 0])).tolist() == [False, False]
    assert MinIO(9).admit(np.array([0, 3])).tolist() == [False, True]


def test_bytes_given_back_can_be_taken_again() -> None:
    minio = MinIO(10)
    minio.admit(np.array([6, 4]))
    minio.used_bytes -= 6
    assert minio.admit(np.array([7, 6])).tolist() == [False, True]


@given(budget=st.integers(0, 500), batches=st.lists(LENGTHS, max_size=5))
def test_the_budget_holds_and_nothing_that_fits_is_refused(budget: int, batches: list[np.ndarray]) -> None:
    """Compared with the definition, one sample at a time."""
    minio, used = MinIO(budget), 0
    for lengths in batches:
        expected = []
        for length in lengths.tolist():
            expected.append(0 < length <= budget - used)
            used += length if expected[-1] else 0
        assert minio.admit(lengths).tolist() == expected
        assert minio.used_bytes == used <= budget
