"""Several disks of one cache node: the fastest is filled and read first, and one that fails is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_samples import flip

from mbaas.cache.disk import tier as tier_module
from mbaas.cache.disk.store import ROW, DiskStore
from mbaas.cache.disk.tier import GIVE_UP_READS, DaemonThreads, DiskTier
from mbaas.cache.slab import Load, Origin
from mbaas.cache.stats import Meter
from mbaas.dataset import synthetic
from mbaas.samples.order import SampleOrder
from mbaas.samples.placement import PlacementHistory
from mbaas.settings import Disk
from support.waiting import wait_until

DATA = synthetic(120)
LENGTHS = DATA.lengths(np.arange(120))
MB = 1e6


def content(ids: Any) -> np.ndarray:
    return np.concatenate([np.full(LENGTHS[i], i, np.uint8) for i in ids])


class Tier:
    """A disk tier, and the samples that it is given and asked for."""

    def __init__(self, *disks: Disk, speeds: tuple[float, ...], **options: Any) -> None:
        order = SampleOrder(120, seed=0, block_samples=8)
        self.tier = DiskTier(disks, DATA, PlacementHistory(order), Meter(), **options)
        self.lines: list[str] = []
        for index, speed in enumerate(speeds):
            self.tier.probed(index, speed * MB)

    def write(self, ids: Any, *, cached: bool = False) -> None:
        ids = np.array([*ids])
        load = Load(1 if cached else -1, None, None, None, np.arange(len(ids)), ids, LENGTHS[ids])
        asyncio.run(self.tier.write(load, content(ids), np.zeros(len(ids), np.int8), {}))

    def read(self, ids: Any) -> list[int]:
        """Samples found, each with its own bytes."""
        ids = np.array([*ids])
        load = Load(-1, None, None, None, np.arange(len(ids)), ids, LENGTHS[ids])
        origins = np.full(len(ids), Origin.STORAGE, np.int8)
        slab = asyncio.run(self.tier.read(load, np.zeros(load.nbytes, np.uint8), origins))
        found = origins == Origin.DISK
        for sample, offset, length, came in zip(ids.tolist(), load.offsets, load.lengths, found, strict=True):
            assert not came or (slab[offset : offset + length] == sample).all()
        return [int(i) for i in ids[found]]

    def on(self, disk: int) -> list[int]:
        return [int(i) for i in np.flatnonzero(self.tier._disks[disk].store.has(np.arange(120)))]

    def log(self) -> list[str]:
        self.tier.update(None)
        self.lines += self.tier.log()
        return self.lines


@contextlib.contextmanager
def opened(*disks: Disk, speeds: tuple[float, ...], **options: Any) -> Iterator[Tier]:
    tier = Tier(*disks, speeds=speeds, **options)
    try:
        yield tier
    finally:
        tier.tier.close()


def room_for(samples: int) -> int:
    return int(LENGTHS[:samples].sum()) + samples * ROW.itemsize


def test_the_fastest_is_filled_first_and_no_sample_is_stored_twice(tmp_path: Path) -> None:
    slow, fast = (Disk(path=tmp_path / name, max_bytes=room_for(40)) for name in ("slow", "fast"))
    with opened(slow, fast, speeds=(100, 900)) as tier:
        tier.write(range(30))
        tier.write(range(20, 100))
        assert (len(tier.on(0)), len(tier.on(1))) == (pytest.approx(40, abs=2), pytest.approx(40, abs=2))
        assert tier.on(1)[:30] == [*range(30)]
        assert not {*tier.on(0)} & {*tier.on(1)}
        assert tier.read(range(120)) == sorted(tier.on(0) + tier.on(1))
    with opened(fast, slow, speeds=(900, 100)) as tier:
        assert len(tier.read(range(120))) >= 78, "both survive a restart, in any order"


def test_the_status_has_the_bytes_the_speed_and_the_failure_of_each_disk(tmp_path: Path) -> None:
    disks = [Disk(path=tmp_path / name, max_bytes=room_for(40)) for name in ("slow", "fast", "lost")]
    with opened(*disks, speeds=(100, 900, 500)) as tier:
        tier.write(range(30))
        tier.tier.drop(2, "it was pulled out")
        tier.tier.update(200 * MB)
        slow, fast, lost = tier.tier.status()
    assert [Path(each.path).name for each in (slow, fast, lost)] == ["slow", "fast", "lost"]
    assert slow.used_bytes == lost.used_bytes == 0
    assert LENGTHS[:30].sum() <= fast.used_bytes <= fast.max_bytes == room_for(40)
    assert (slow.bytes_per_s, fast.bytes_per_s) == (100 * MB, 900 * MB)
    assert [each.is_used for each in (slow, fast, lost)] == [False, True, False], "one is no faster than storage"
    assert [each.failure for each in (slow, fast, lost)] == ["", "", "it was pulled out"]


def test_what_memory_caches_is_stored_only_where_disks_together_hold_all(tmp_path: Path) -> None:
    small, large = (Disk(path=tmp_path / name, max_bytes=room_for(70)) for name in "ab")
    with opened(small, speeds=(100,)) as tier:
        tier.write(range(60), cached=True)
        assert tier.on(0) == []
    with opened(small, large, speeds=(100, 50)) as tier:
        tier.write(range(120), cached=True)
        assert len(tier.on(0) + tier.on(1)) == 120


def test_a_shared_folder_with_room_for_the_dataset_stores_all_that_is_read(tmp_path: Path) -> None:
    local = Disk(path=tmp_path / "local", max_bytes=room_for(40))
    shared = Disk(path=tmp_path / "shared", max_bytes=10 * room_for(120), shared=True)
    with opened(local, shared, speeds=(900, 100)) as tier, opened(shared, speeds=(100,)) as other:
        tier.write(range(60))
        assert len(tier.on(0)) == pytest.approx(40, abs=2)
        tier.tier._disks[1].check()
        other.tier._disks[0].check()
        assert other.read(range(120)) == [*range(60)]
        assert tier.tier._meter.disk.sums().nbytes == 0


def test_samples_drawn_by_weight_go_to_the_disk_of_their_class(tmp_path: Path) -> None:
    fast, slow = (Disk(path=tmp_path / name, max_bytes=room_for(30)) for name in ("fast", "slow"))
    asked = []

    def classes(ids: Any, capacities: Any) -> Any:
        asked.append([*capacities])
        return np.where(ids < 10, -1, np.where(ids < 20, 1, np.where(ids < 30, 0, -1)))

    with opened(slow, fast, speeds=(100, 900), classes=classes) as tier:
        tier.write(range(60))
        assert tier.on(1) == [*range(20, 30)], "the class of the fastest disk is the first"
        assert tier.on(0) == [*range(10, 20)]
        assert asked == [[room_for(30)] * 2]


def test_a_removed_folder_is_named_and_dropped_and_the_others_stay(tmp_path: Path) -> None:
    first, second = (Disk(path=tmp_path / name, max_bytes=room_for(40)) for name in "ab")
    with opened(first, second, speeds=(900, 100)) as tier:
        tier.write(range(80))
        shutil.rmtree(tmp_path / "a")
        wait_until(lambda: any("its folder was removed" in line for line in tier.log()), "the drop")
        (line,) = tier.lines
        assert line.startswith(f"the disk {tmp_path / 'a'} is dropped: its folder was removed")
        assert tier.read(range(120)) == tier.on(1)
        tier.write(range(80, 120))
        assert not (tmp_path / "a").exists()


def test_a_disk_that_is_full_is_still_read_and_the_next_one_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(file: int, data: Any, offset: int) -> int:
        if str(tmp_path / "a") in str(Path(f"/proc/self/fd/{file}").readlink()):
            raise OSError(28, "No space left on device")
        return real(file, data, offset)

    first, second = (Disk(path=tmp_path / name, max_bytes=room_for(60)) for name in "ab")
    with opened(first, second, speeds=(900, 100)) as tier:
        tier.write(range(10))
        monkeypatch.setattr(os, "pwrite", full)
        tier.write(range(10, 40))
        assert tier.on(1) == [*range(10, 40)]
        assert tier.read(range(120)) == [*range(40)]
        (line,) = tier.log()
        assert line.startswith(f"the disk cache {tmp_path / 'a'} keeps nothing more: writing to ")
        assert "No space left on device" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_file_system_that_fills_up_is_named_and_the_next_disk_takes_over(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    size = f"size={room_for(120) // 2}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", small], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        first, second = (Disk(path=path, max_bytes="1 GB") for path in (small, tmp_path / "b"))
        with opened(first, second, speeds=(900, 100)) as tier:
            for start in range(0, 120, 10):
                tier.write(range(start, start + 10))
            assert 0 < len(tier.on(0)) < 120
            assert tier.read(range(120)) == [*range(120)]
            assert any("No space left on device" in line for line in tier.log())
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_disk_that_gives_only_wrong_bytes_is_dropped(tmp_path: Path) -> None:
    disk = Disk(path=tmp_path, max_bytes=room_for(120))
    with opened(disk, speeds=(900,)) as tier:
        tier.write(range(120))
        segment = next(tmp_path.rglob("segment-*.bin"))
        for offset in range(0, segment.stat().st_size, int(LENGTHS.min())):
            flip(segment, offset)
        for sample in range(GIVE_UP_READS + 1):
            assert tier.read([sample]) == []
        assert any(f"{GIVE_UP_READS} reads in a row gave no sample as it was written" in line for line in tier.log())
        assert not tier.tier.is_used


def test_a_disk_that_hangs_is_dropped_and_cannot_write_into_a_slab_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate, ended = DiskStore.get, threading.Event(), threading.Event()

    def hanging(self: DiskStore, *args: Any, buffer: Any, **options: Any) -> Any:
        if self.path.parent == tmp_path / "a":
            gate.wait(30)
            buffer[:] = 255
            ended.set()
        return real(self, *args, buffer=buffer, **options)

    monkeypatch.setattr(tier_module, "HANG_S", 0.3)
    monkeypatch.setattr(tier_module, "HANG_CHECK_S", 0.05)
    first, second = (Disk(path=tmp_path / name, max_bytes=room_for(40)) for name in "ab")
    with opened(first, second, speeds=(900, 100)) as tier:
        tier.write(range(80))
        on_second = tier.on(1)
        monkeypatch.setattr(DiskStore, "get", hanging)
        ids = np.arange(80)
        load = Load(-1, None, None, None, ids, ids, LENGTHS[ids])
        origins, slab = np.full(80, Origin.STORAGE, np.int8), np.zeros(load.nbytes, np.uint8)
        began = time.monotonic()
        filled = asyncio.run(tier.tier.read(load, slab, origins))
        assert time.monotonic() - began < 5
        assert [*np.flatnonzero(origins == Origin.DISK)] == on_second
        before = filled.copy()
        gate.set()
        assert ended.wait(20)
        np.testing.assert_array_equal(filled, before)
        (line,) = tier.log()
        assert "a is dropped: it did not finish a request for 300 ms" in line
        assert tier.read(range(80)) == on_second
        tier.write(range(80, 90))


def test_a_disk_of_which_one_read_hangs_is_dropped_although_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate = DiskStore.get, threading.Event()

    def hanging(self: DiskStore, sample_ids: Any, *args: Any, **options: Any) -> Any:
        if 0 in sample_ids:
            gate.wait(30)
        return real(self, sample_ids, *args, **options)

    monkeypatch.setattr(tier_module, "HANG_S", 0.3)
    monkeypatch.setattr(tier_module, "HANG_CHECK_S", 0.05)
    monkeypatch.setattr(tier_module, "CLOSE_S", 0.1)

    async def read_both(tier: DiskTier) -> int:
        def read(ids: Any) -> Any:
            load = Load(-1, None, None, None, ids, ids, LENGTHS[ids])
            return tier.read(load, np.zeros(load.nbytes, np.uint8), np.full(len(ids), Origin.STORAGE, np.int8))

        hung, others = asyncio.ensure_future(read(np.arange(1))), 0
        while not hung.done():
            await read(np.arange(1, 40))
            others += 1
        return others

    with opened(Disk(path=tmp_path, max_bytes="1 GB"), speeds=(900,)) as tier:
        tier.write(range(40))
        monkeypatch.setattr(DiskStore, "get", hanging)
        began = time.monotonic()
        assert asyncio.run(read_both(tier.tier)) > 1
        assert time.monotonic() - began < 5
        assert any("did not finish a request" in line for line in tier.log())
        gate.set()


def test_a_disk_whose_writes_hang_holds_up_no_slab_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(tier_module, "HANG_S", 0.3)
    monkeypatch.setattr(tier_module, "HANG_CHECK_S", 0.05)
    monkeypatch.setattr(tier_module, "CLOSE_S", 0.1)
    with opened(Disk(path=tmp_path, max_bytes="1 GB"), speeds=(900,)) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "put", lambda self, *args: gate.wait(30))
            began = time.monotonic()
            tier.write(range(20))
            assert time.monotonic() - began < 5
        assert any("did not finish a request" in line for line in tier.log())
    gate.set()


def test_a_disk_that_cannot_be_opened_leaves_no_lock_on_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good, bad = Disk(path=tmp_path / "good", max_bytes=1000), Disk(path=tmp_path / "file", max_bytes=1000)
    with pytest.raises(Exception, match="needs a folder that it may write to"):
        Tier(good, bad, speeds=())
    with opened(good, speeds=()):
        pass


def test_a_disk_that_cannot_be_opened_in_time_is_named_and_the_others_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate = DiskStore.__init__, threading.Event()

    def hanging(self: DiskStore, path: Any, *args: Any, **options: Any) -> None:
        assert Path(path) != tmp_path / "a" or gate.wait(30)
        real(self, path, *args, **options)

    monkeypatch.setattr(tier_module, "OPEN_S", 0.2)
    monkeypatch.setattr(DiskStore, "__init__", hanging)
    first, second = (Disk(path=tmp_path / name, max_bytes=room_for(40)) for name in "ab")
    with opened(first, second, speeds=()) as tier:
        tier.tier.probed(1, 100 * MB)
        tier.write(range(20))
        assert tier.read(range(120)) == [*range(20)]
        (line,) = tier.log()
        assert line.startswith(f"the disk {tmp_path / 'a'} is dropped: it could not be opened within 200 ms")
    gate.set()
    DiskStore(tmp_path / "a", first.max_bytes, DATA.fingerprint, num_samples=120, lock_wait_s=10.0).close()


HANGING = """
import sys, threading
from mbaas.cache.disk.tier import DaemonThreads
threads, begun = DaemonThreads(2), threading.Event()
threads.submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
assert threads.submit(lambda: 5).result() == 5
threads.end()
"""


def test_a_disk_that_hangs_does_not_delay_the_end_of_the_process() -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=30)


def test_threads_end_after_their_work_and_take_no_more() -> None:
    before, threads = threading.active_count(), DaemonThreads(3)
    work = [threads.submit(functools.partial(divmod, number, 2)) for number in range(10)]
    failing = threads.submit(lambda: 1 // 0)
    threads.end()
    assert [each.result(10)[0] for each in work] == [number // 2 for number in range(10)]
    assert isinstance(failing.exception(10), ZeroDivisionError)
    wait_until(lambda: threading.active_count() == before, "the threads have ended")
    with pytest.raises(RuntimeError, match="have ended"):
        threads.submit(lambda: None)
