"""MinIO: admit until full, never evict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.cache import MinIO
from mbaas.errors import ConfigError

LENGTHS = st.lists(st.integers(0, 50), max_size=40).map(lambda x: np.array(x, dtype=np.int64))


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
    minio.give_back(6)
    assert minio.admit(np.array([7, 6])).tolist() == [False, True]


@given(budget=st.integers(0, 500), batches=st.lists(LENGTHS, max_size=5))
def test_the_budget_holds_and_nothing_that_fits_is_refused(budget: int, batches: list[np.ndarray]) -> None:
    """Against the definition, one sample at a time."""
    minio, used = MinIO(budget), 0
    for lengths in batches:
        expected = []
        for length in lengths.tolist():
            expected.append(0 < length <= budget - used)
            used += length if expected[-1] else 0
        assert minio.admit(lengths).tolist() == expected
        assert minio.used_bytes == used <= budget


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_bytes must be at least 0, got -1"):
        MinIO(-1)
