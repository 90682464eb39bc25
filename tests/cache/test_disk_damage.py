"""The disk tier's store never serves damaged samples, and a failing disk costs no more than necessary."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_samples import LENGTHS, OTHER, PRINT, SAMPLES, disk_bytes, flip, folder, get, open_tier, put

from mbaas.cache.disk.folder import INDEX
from mbaas.cache.disk.store import ROW
from mbaas.cache.disk.tier import DiskTier
from mbaas.cache.slab import pack
from mbaas.cache.stats import Meter
from mbaas.dataset import synthetic
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import PlacementHistory
from mbaas.settings import Disk


@pytest.mark.parametrize("reopened", [True, False])
def test_a_flipped_byte_costs_one_sample_which_is_counted_and_can_be_put_again(tmp_path: Path, reopened: bool) -> None:
    tier = open_tier(tmp_path)
    put(tier, range(40))
    if reopened:
        tier.close()
    flip(folder(tmp_path) / "segment-000001.bin", int(LENGTHS[:11].sum()))
    tier = open_tier(tmp_path) if reopened else tier
    with tier:
        assert tier.has(np.array([11]))
        assert get(tier, range(40)) == [i for i in range(40) if i != 11]
        assert not tier.has(np.array([11]))
        assert (tier.stats().damaged_samples, tier.stats().samples) == (1, 39)
        assert put(tier, [11]) == [11]
        assert get(tier, range(40)) == [*range(40)]
        assert tier.stats().used_bytes == disk_bytes(tmp_path)
    with open_tier(tmp_path) as tier:
        assert get(tier, range(40)) == [*range(40)]


def test_a_damaged_sample_that_is_asked_for_twice_is_counted_once(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(10))
        flip(folder(tmp_path) / "segment-000001.bin", 0)
        assert get(tier, [0, 1, 0]) == [1]
        assert get(tier, [0]) == []
        assert (tier.stats().damaged_samples, tier.stats().samples) == (1, 9)


def test_a_flipped_row_costs_one_sample(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(40))
    for position in (3, 9, 17, 21, 26, 30):  # each column in turn, in a different row each time
        flip(folder(tmp_path) / INDEX, position * ROW.itemsize + position)
    with open_tier(tmp_path) as tier:
        assert tier.stats().samples == 34
        assert get(tier, range(40)) == [i for i in range(40) if i not in (3, 9, 17, 21, 26, 30)]
    assert (folder(tmp_path) / INDEX).stat().st_size == 34 * ROW.itemsize


def test_a_truncated_segment_costs_the_samples_of_its_end(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(20))
    os.truncate(folder(tmp_path) / "segment-000001.bin", int(LENGTHS[:7].sum()) + LENGTHS[7] - 1)
    with open_tier(tmp_path) as tier:
        assert tier.stats().samples == 7
        assert put(tier, range(100, 110)) == [*range(100, 110)]
        assert get(tier, range(SAMPLES)) == [*range(7), *range(100, 110)]


def test_a_segment_that_is_truncated_while_it_is_open_costs_its_samples(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(20))
        os.truncate(folder(tmp_path) / "segment-000001.bin", int(LENGTHS[:7].sum()) + LENGTHS[7] - 1)
        assert get(tier, range(20)) == [*range(7)]
        assert tier.stats().damaged_samples == 13


def test_a_missing_segment_and_a_missing_index(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(100))
    (folder(tmp_path) / "segment-000002.bin").unlink()
    with open_tier(tmp_path) as tier:
        kept = get(tier, range(100))
        assert 20 < len(kept) == tier.stats().samples < 90
    (folder(tmp_path) / INDEX).unlink()
    with open_tier(tmp_path) as tier:
        assert tier.stats().samples == disk_bytes(tmp_path) == 0
        assert put(tier, range(100)) == [*range(100)]


def test_a_length_that_is_not_the_datasets_is_damage(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, [4, 5])
        length = LENGTHS[4:5] + 1
        assert not tier.get(np.array([4]), length, buffer=np.zeros(length[0], np.uint8), offsets=np.array([0])).any()
        assert tier.stats().damaged_samples == 1
        assert get(tier, [4, 5]) == [5]


def test_another_datasets_rows_and_segments_are_not_believed(tmp_path: Path) -> None:
    for fingerprint, seed in ((PRINT, 0), (OTHER, 1)):
        with open_tier(tmp_path, fingerprint=fingerprint) as tier:
            put(tier, range(50), seed=seed)
    for file in folder(tmp_path).glob("segment-*.bin"):
        (folder(tmp_path, OTHER) / file.name).replace(file)
    with open_tier(tmp_path) as tier:  # the other's segments, our index: every checksum fails
        assert get(tier, range(50)) == []
        assert tier.stats().damaged_samples == 50
    (folder(tmp_path, OTHER) / INDEX).replace(folder(tmp_path) / INDEX)
    with open_tier(tmp_path) as tier:  # the other's segments and index
        assert tier.stats().samples == 0


def test_a_disk_that_is_full_ends_writing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with open_tier(tmp_path) as tier:
        put(tier, range(10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            assert put(tier, range(10, 20)) == []
        assert "No space left on device" in tier.stats().write_failure
        assert put(tier, range(20, 30)) == []
        assert get(tier, range(30)) == [*range(10)]
    with open_tier(tmp_path) as tier:
        assert put(tier, range(10, 20)) == [*range(10, 20)]


def test_the_log_tells_once_of_a_disk_that_is_full_and_of_samples_that_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    data = synthetic(40)
    disk, order = Disk(path=tmp_path, max_bytes=1 << 20), SampleOrder(40, seed=0, block_samples=8)
    tier = DiskTier([disk], data, PlacementHistory(order), Meter())
    ids, store = np.arange(10), tier._disks[0].store
    lengths = data.lengths(ids)
    content = np.ones(int(lengths.sum()), np.uint8)
    try:
        assert store.put(ids, lengths, content).all()
        assert tier.log() == []
        flip(next(tmp_path.rglob("segment-*.bin")), 0)
        store.get(ids, lengths, buffer=content, offsets=pack(lengths))
        monkeypatch.setattr(os, "pwrite", full)
        store.put(ids + 10, lengths, content)
        failed, damaged = tier.log()
        assert re.match(r"the disk cache .* keeps nothing more: writing to .* failed: .*No space left", failed)
        assert re.match(r"1 sample in the disk cache .* could not be read.*\(1 since it was opened\)", damaged)
        assert tier.log() == []
    finally:
        tier.close()


def test_a_disk_that_cannot_be_read_costs_the_samples_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    with open_tier(tmp_path) as tier:
        put(tier, range(10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", broken)
            assert get(tier, range(3)) == []
        assert tier.stats().damaged_samples == 3
        assert get(tier, range(10)) == [*range(3, 10)]
