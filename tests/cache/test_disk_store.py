"""The disk tier's store keeps samples within its budget and over restarts, and ends cleanly."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_samples import EVERYTHING, LENGTHS, SAMPLES, disk_bytes, folder, get, open_tier, put

from mbaas.cache.disk.store import ROW, SEGMENT_BYTES
from mbaas.cache.disk.tier import DiskTier
from mbaas.cache.slab import Load, Origin
from mbaas.cache.stats import Meter
from mbaas.dataset import synthetic
from mbaas.errors import ConfigError, ResourceError, StateError
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import PlacementHistory
from mbaas.settings import Disk
from support.waiting import wait_until


def test_what_was_put_comes_back_in_any_order(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        assert put(tier, [5, 3, 9]) == [5, 3, 9]
        assert put(tier, range(20, 60)) == [*range(20, 60)]
        assert get(tier, [9, 21, 4, 5, 59, 9, 20]) == [9, 21, 5, 59, 9, 20]
        assert tier.has(np.array([3, 4, 59, 60])).tolist() == [True, False, True, False]
        assert get(tier, []) == []
        assert tier.stats().samples == 43


def test_a_sample_is_kept_once(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        assert put(tier, [1, 2, 1]) == [1, 2]
        used = tier.stats().used_bytes
        assert put(tier, [2, 3]) == [3]
        assert tier.stats().used_bytes == used + LENGTHS[3] + ROW.itemsize
        assert get(tier, [1, 2, 3]) == [1, 2, 3]


def test_the_budget_is_of_all_bytes_on_the_disk(tmp_path: Path) -> None:
    """The budget covers samples and rows. A sample that no longer fits is refused, a smaller one after it accepted."""
    lengths = LENGTHS[:3]
    budget = int(lengths.sum()) + 3 * ROW.itemsize
    with open_tier(tmp_path, budget=budget) as tier:
        assert put(tier, [0, 1]) == [0, 1]
        larger = int(np.argmax(LENGTHS))
        assert put(tier, [larger, 2]) == [2]
        assert put(tier, range(SAMPLES)) == []
        assert tier.stats().used_bytes == budget == disk_bytes(tmp_path)


def test_samples_lie_in_few_files_and_none_across_two(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        assert put(tier, range(SAMPLES)) == [*range(SAMPLES)]
        segments = list(folder(tmp_path).glob("segment-*.bin"))
        assert -(-LENGTHS.sum() // 5_000) <= len(segments) <= LENGTHS.sum() // (5_000 - 400) + 1
        assert max(file.stat().st_size for file in segments) <= 5_000
        assert get(tier, range(SAMPLES)) == [*range(SAMPLES)]


def test_a_segment_may_be_full_to_its_last_byte(tmp_path: Path) -> None:
    """Then the next segment's first address is one more than the last one of this segment."""
    options: dict[str, Any] = {"segment_bytes": SEGMENT_BYTES, "budget": 3 * SEGMENT_BYTES}
    with open_tier(tmp_path, **options) as tier:
        tier._end = 2 * SEGMENT_BYTES - int(LENGTHS[:2].sum())  # a sparse file
        assert put(tier, range(5)) == [*range(5)]
        sizes = [file.stat().st_size for file in sorted(folder(tmp_path).glob("segment-*.bin"))]
        assert sizes == [SEGMENT_BYTES, LENGTHS[2:5].sum()]
        assert get(tier, range(5)) == [*range(5)]
    with open_tier(tmp_path, **options) as tier:
        assert get(tier, range(5)) == [*range(5)]


def test_a_sample_larger_than_a_segment_and_an_empty_one_are_not_kept(tmp_path: Path) -> None:
    with open_tier(tmp_path, segment_bytes=100) as tier:
        kept = tier.put(np.array([0, 1, 2]), np.array([101, 0, 100]), np.zeros(201, np.uint8))
        assert kept.tolist() == [False, False, True]


def test_a_restart_serves_what_was_kept(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(0, 200, 2))
        before = tier.stats()
    with open_tier(tmp_path) as tier:
        assert tier.stats() == before
        assert get(tier, range(200)) == [*range(0, 200, 2)]
        assert put(tier, range(1, 200, 2)) == [*range(1, 200, 2)]
    with open_tier(tmp_path) as tier:
        assert get(tier, range(SAMPLES)) == [*range(200)]
        assert tier.stats().damaged_samples == 0


def test_a_smaller_budget_drops_whole_segments(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(SAMPLES))
    with open_tier(tmp_path, budget=EVERYTHING // 3) as tier:
        kept = get(tier, range(SAMPLES))
        assert kept == [*range(len(kept))]
        assert EVERYTHING // 3 - 5_000 - 5_000 < disk_bytes(tmp_path) == tier.stats().used_bytes <= EVERYTHING // 3
        assert tier.stats().damaged_samples == 0
    with open_tier(tmp_path, budget=0) as tier:
        assert disk_bytes(tmp_path) == tier.stats().samples == 0


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.preadv
    with open_tier(tmp_path) as tier:
        put(tier, range(40))
        monkeypatch.setattr(os, "preadv", lambda file, views, offset: real(file, [views[0][:90]], offset))
        assert get(tier, range(40)) == [*range(40)]


def test_neighbours_on_the_disk_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 and 6, 10 to 12, and 20 are contiguous in one segment: three calls."""
    real, calls = os.preadv, []

    def counted(file: int, views: list[Any], offset: int) -> int:
        calls.append(len(views))
        return real(file, views, offset)

    with open_tier(tmp_path, segment_bytes=1 << 20) as tier:
        put(tier, range(40))
        monkeypatch.setattr(os, "preadv", counted)
        assert get(tier, [11, 5, 20, 10, 6, 12]) == [11, 5, 20, 10, 6, 12]
        assert calls == [2, 3, 1]


def test_many_threads_put_and_get_at_once(tmp_path: Path) -> None:
    budget = EVERYTHING * 2 // 3
    with open_tier(tmp_path, budget=budget) as tier:

        def work(seed: int) -> list[int]:
            chance, kept = random.Random(seed), list[int]()
            for _ in range(30):
                kept += put(tier, chance.sample(range(SAMPLES), 12))
                get(tier, chance.sample(range(SAMPLES), 12))
            return kept

        with ThreadPoolExecutor(8) as pool:
            kept = sorted(sample_id for part in pool.map(work, range(8)) for sample_id in part)
        assert len(kept) == len(set(kept)) == tier.stats().samples
        assert get(tier, range(SAMPLES)) == kept
        assert budget - 400 - ROW.itemsize < tier.stats().used_bytes <= budget
        assert tier.stats().used_bytes == disk_bytes(tmp_path)
    with open_tier(tmp_path, budget=budget) as tier:
        assert get(tier, range(SAMPLES)) == kept


def test_close_waits_for_reads_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, inside, gate = os.preadv, threading.Event(), threading.Event()

    def held(file: int, views: list[Any], offset: int) -> int:
        inside.set()
        assert gate.wait(20)
        return real(file, views, offset)

    data = synthetic(10)
    disk, order = Disk(path=tmp_path, max_bytes=1 << 20), SampleOrder(10, seed=0, block_samples=8)
    tier = DiskTier([disk], data, PlacementHistory(order), Meter())
    ids = np.arange(10)
    lengths = data.lengths(ids)
    slab, origins = np.ones(int(lengths.sum()), np.uint8), np.full(10, Origin.STORAGE, np.int8)
    assert tier._disks[0].store.put(ids, lengths, slab).all()
    monkeypatch.setattr(os, "preadv", held)
    with ThreadPoolExecutor(2) as pool:
        load = Load(1, None, None, None, ids, ids, lengths)
        reading = pool.submit(asyncio.run, tier.read(load, slab, origins))
        assert inside.wait(20)
        closing = pool.submit(tier.close)
        wait_until(lambda: tier._disks[0].threads.is_ended, "the close has begun")
        with pytest.raises(ResourceError):  # the folder is still locked
            open_tier(tmp_path, fingerprint=data.fingerprint, num_samples=10)
        gate.set()
        reading.result(20)
        closing.result(20)
    assert (origins == Origin.DISK).all()
    open_tier(tmp_path, fingerprint=data.fingerprint, num_samples=10).close()


def test_a_closed_store_reads_and_writes_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.close()
    tier.close()
    for call in (put, get):
        with pytest.raises(StateError, match="is closed"):
            call(tier, [1])


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with open_tier(tmp_path) as tier:
            put(tier, range(SAMPLES))
            with pytest.raises(ResourceError):
                open_tier(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_fingerprint_that_would_lead_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got '\.\./etc'"):
        open_tier(tmp_path, fingerprint="../etc")


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"needs a folder that it may write to, got .*file"):
        open_tier(tmp_path / "file")
