"""The directory and the layout of slabs."""

import numpy as np
import pytest

from mbaas.cache import Directory, Load
from mbaas.cache.slab import pack, squeeze
from mbaas.placement import PartRequest


def published() -> Directory:
    directory = Directory(10)
    for slab, ids, lengths in (3, [7, 2], [5, 4]), (5, [0, 9, 4], [1, 1, 6]):
        sizes = np.array(lengths)
        directory.publish(slab, np.array(ids), offsets=pack(sizes), lengths=sizes)
    return directory


def test_lookup_gives_the_place_of_each_sample() -> None:
    directory = published()
    places = directory.lookup(np.array([4, 7, 1]))
    assert places["slab"].tolist() == [5, 3, 0]
    assert places["offset"].tolist() == [2, 0, 0]
    assert places["length"].tolist() == [6, 5, 0]
    assert places["node"].tolist() == [0, 0, 0]
    assert directory.slabs(np.array([9, 3])).tolist() == [5, 0]


def test_totals_and_version_follow_what_is_published() -> None:
    directory = published()
    assert (directory.version, directory.samples, directory.nbytes) == (2, 5, 17)
    assert directory.cached_ids().tolist() == [0, 2, 4, 7, 9]
    directory.validate()


@pytest.mark.parametrize("column", ["slab", "offset", "length"])
def test_validate_sees_a_wrong_entry(column: str) -> None:
    directory = published()
    directory._places[column][9] += 1
    with pytest.raises((AssertionError, KeyError)):
        directory.validate()


def test_validate_sees_a_wrong_total() -> None:
    directory = published()
    directory.samples -= 1
    with pytest.raises(AssertionError):
        directory.validate()


def test_squeeze_leaves_the_others_where_pack_puts_them() -> None:
    """Samples of 2, 3, 0 and 4 bytes; the second is lost: 2 + 0 + 4 bytes stay, at 0, 2 and 2."""
    lengths = np.array([2, 3, 0, 4])
    rows = np.arange(4)
    load = Load(1, PartRequest(0), 0, None, rows, rows, lengths, pack(lengths), 9)
    slab = np.arange(9, dtype=np.uint8)
    assert squeeze(slab, load, {}) is slab
    assert squeeze(slab, load, {1: "gone"}).tolist() == [0, 1, 5, 6, 7, 8]
    assert pack(lengths[load.kept({1: "gone"})]).tolist() == [0, 2, 2]
    assert squeeze(slab, load, dict.fromkeys(range(4), "gone")).tolist() == []
