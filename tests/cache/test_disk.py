"""The disk tier: what it keeps, over restarts too, and that nothing damaged is ever served."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.cache.disk.folder import INDEX, MARKER
from mbaas.cache.disk.index import ROW
from mbaas.cache.disk.store import DiskStore
from mbaas.cache.slab import pack
from mbaas.errors import ConfigError, ResourceError, StateError
from support.waiting import wait_until

SAMPLES = 300
PRINT = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
LENGTHS = np.random.default_rng(7).integers(1, 400, SAMPLES)
EVERYTHING = int(LENGTHS.sum()) + ROW.itemsize * SAMPLES


def content(sample_id: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, sample_id]).integers(0, 256, LENGTHS[sample_id], np.uint8)


def open_tier(path: Path, *, budget: int = EVERYTHING, fingerprint: str = PRINT, **options: Any) -> DiskStore:
    options = {"num_samples": SAMPLES, "segment_bytes": 5_000, "lock_wait_s": 0.0} | options
    return DiskStore(path, budget, fingerprint, **options)


def put(tier: DiskStore, ids: Iterable[int], *, seed: int = 0) -> list[int]:
    """Puts samples in one call; returns those that were kept."""
    chosen = np.array([*ids], np.int64)
    data = np.concatenate([np.zeros(0, np.uint8), *(content(i, seed) for i in chosen.tolist())])
    return chosen[tier.put(chosen, LENGTHS[chosen], data)].tolist()


def get(tier: DiskStore, ids: Iterable[int], *, seed: int = 0) -> list[int]:
    """Gets samples in one call, with a gap before each; returns those that came, and checks every byte."""
    chosen = np.array([*ids], np.int64)
    lengths = LENGTHS[chosen]
    offsets = pack(lengths + 3) + 3
    buffer = np.full(int((lengths + 3).sum()) + 1, 170, np.uint8)
    found = tier.get(chosen, lengths, buffer=buffer, offsets=offsets)
    untouched = np.ones(len(buffer), np.bool_)
    for sample_id, offset, length, came in zip(chosen.tolist(), offsets, lengths, found, strict=True):
        untouched[offset : offset + length] = False
        if came:
            assert (buffer[offset : offset + length] == content(sample_id, seed)).all(), f"sample {sample_id}"
    assert (buffer[untouched] == 170).all()
    return chosen[found].tolist()


def folder(path: Path, fingerprint: str = PRINT) -> Path:
    return path / fingerprint


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.bin"))


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
    """Samples and rows; what no longer fits is refused, a smaller one after it is taken."""
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
        assert tier.stats().segments == len(list(folder(tmp_path).glob("segment-*.bin")))
        assert -(-LENGTHS.sum() // 5_000) <= tier.stats().segments <= LENGTHS.sum() // (5_000 - 400) + 1
        assert max(file.stat().st_size for file in folder(tmp_path).glob("segment-*.bin")) <= 5_000
        assert get(tier, range(SAMPLES)) == [*range(SAMPLES)]


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
        assert tier.stats().damaged_rows == tier.stats().damaged_samples == 0


def test_a_smaller_budget_drops_whole_segments(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(SAMPLES))
    with open_tier(tmp_path, budget=EVERYTHING // 3) as tier:
        kept = get(tier, range(SAMPLES))
        assert kept == [*range(len(kept))]
        assert EVERYTHING // 3 - 5_000 - 5_000 < disk_bytes(tmp_path) == tier.stats().used_bytes <= EVERYTHING // 3
        assert tier.stats().damaged_rows == 0
    with open_tier(tmp_path, budget=0) as tier:
        assert disk_bytes(tmp_path) == tier.stats().samples == 0


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


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
    for position in (3, 9, 17, 21, 26, 30):  # in each column in turn, of another row each
        flip(folder(tmp_path) / INDEX, position * ROW.itemsize + position)
    with open_tier(tmp_path) as tier:
        assert tier.stats().damaged_rows == 6
        assert get(tier, range(40)) == [i for i in range(40) if i not in (3, 9, 17, 21, 26, 30)]
    with open_tier(tmp_path) as tier:
        assert (tier.stats().damaged_rows, tier.stats().samples) == (0, 34)


def test_a_truncated_segment_costs_the_samples_of_its_end(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(20))
    os.truncate(folder(tmp_path) / "segment-000001.bin", int(LENGTHS[:7].sum()) + LENGTHS[7] - 1)
    with open_tier(tmp_path) as tier:
        assert tier.stats().damaged_rows == 13
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
        assert 20 < len(kept) == tier.stats().samples == 100 - tier.stats().damaged_rows < 90
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
    with open_tier(tmp_path) as tier:  # the other's segments, our index: every checksum says no
        assert get(tier, range(50)) == []
        assert tier.stats().damaged_samples == 50
    (folder(tmp_path, OTHER) / INDEX).replace(folder(tmp_path) / INDEX)
    with open_tier(tmp_path) as tier:  # the other's segments and index
        assert (tier.stats().damaged_rows, tier.stats().samples) == (50, 0)


@pytest.mark.parametrize(
    "marker",
    [json.dumps({"format": "mbaas disk tier", "version": 99, "fingerprint": PRINT}), "", '{"format": "mbaas d'],
)
def test_a_folder_of_another_version_or_with_a_torn_marker_is_emptied(tmp_path: Path, marker: str) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(50))
    (folder(tmp_path) / MARKER).write_text(marker)
    for expected in ([], [7]):
        with open_tier(tmp_path) as tier:
            assert get(tier, range(50)) == expected
            put(tier, [7])


def test_a_folder_that_was_renamed_is_emptied(tmp_path: Path) -> None:
    with open_tier(tmp_path, fingerprint=OTHER) as tier:
        put(tier, range(50))
    folder(tmp_path, OTHER).rename(folder(tmp_path))
    with open_tier(tmp_path) as tier:
        assert tier.stats().samples == 0


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder(tmp_path).mkdir()
    (folder(tmp_path) / "thesis.tex").write_text("ten years")
    with pytest.raises(ConfigError, match=r"holds files, for instance thesis.tex, but no mbaas-disk-tier.json"):
        open_tier(tmp_path)
    assert (folder(tmp_path) / "thesis.tex").read_text() == "ten years"


def fill_other(path: Path, fingerprint: str, opened_at: float, samples: int = 50) -> int:
    """Another dataset's folder, last opened at a time; returns its bytes."""
    with open_tier(path, fingerprint=fingerprint) as tier:
        put(tier, range(samples))
        nbytes = tier.stats().used_bytes
    os.utime(folder(path, fingerprint) / MARKER, (opened_at, opened_at))
    return nbytes


def test_stale_folders_go_oldest_first_and_only_when_their_bytes_are_needed(tmp_path: Path) -> None:
    """The budget holds the three stale folders and 1,000 bytes."""
    sizes = {name: fill_other(tmp_path, name, at) for name, at in (("new", 3e8), ("old", 1e8), ("mid", 2e8))}
    with open_tier(tmp_path, budget=sum(sizes.values()) + 1_000) as tier:
        assert tier.stats().stale_bytes == sum(sizes.values())
        assert put(tier, [100]) == [100]
        assert tier.stats().removed_folders == 0
        assert put(tier, range(101, 120)) == [*range(101, 120)]
        assert {path.name for path in tmp_path.iterdir()} == {PRINT, "mid", "new"}
        assert tier.stats().removed_folders == 1
        assert put(tier, range(SAMPLES))
        assert tier.stats().stale_bytes == 0
        assert {path.name for path in tmp_path.iterdir()} == {PRINT}
        assert disk_bytes(tmp_path) <= tier.stats().budget_bytes


def test_a_smaller_budget_removes_stale_folders_at_once(tmp_path: Path) -> None:
    nbytes = fill_other(tmp_path, OTHER, 1e8)
    with open_tier(tmp_path, budget=nbytes - 1) as tier:
        assert tier.stats().removed_folders == 1
        assert not folder(tmp_path, OTHER).exists()


def test_only_our_files_in_folders_with_our_marker_are_removed(tmp_path: Path) -> None:
    fill_other(tmp_path, "marked", 1e8)
    (tmp_path / "marked" / "notes.txt").write_text("mine")
    (tmp_path / "unmarked").mkdir()
    (tmp_path / "unmarked" / "segment-000001.bin").write_text("mine")
    fill_other(tmp_path / "elsewhere", "linked", 1e8)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "linked")
    with open_tier(tmp_path, budget=10) as tier:
        assert tier.stats().removed_folders == 1
    assert [path.name for path in (tmp_path / "marked").iterdir()] == ["notes.txt"]
    assert (tmp_path / "unmarked" / "segment-000001.bin").exists()
    assert (tmp_path / "elsewhere" / "linked" / MARKER).exists()


def test_a_folder_in_use_is_not_stale(tmp_path: Path) -> None:
    with open_tier(tmp_path, fingerprint=OTHER) as other:
        put(other, range(50))
        with open_tier(tmp_path) as tier:
            assert tier.stats().stale_bytes == 0
            assert put(tier, range(SAMPLES)) == [*range(SAMPLES)]
        assert get(other, range(50)) == [*range(50)]


def test_a_stale_folder_that_is_taken_up_meanwhile_stays(tmp_path: Path) -> None:
    fill_other(tmp_path, OTHER, 1e8)
    with open_tier(tmp_path, budget=EVERYTHING) as tier, open_tier(tmp_path, fingerprint=OTHER) as other:
        put(tier, range(SAMPLES))
        assert (tier.stats().removed_folders, tier.stats().stale_bytes) == (0, 0)
        assert get(other, range(50)) == [*range(50)]


def test_one_at_a_time(tmp_path: Path) -> None:
    with open_tier(tmp_path):
        with pytest.raises(ResourceError, match="in use by another process"):
            open_tier(tmp_path)
    open_tier(tmp_path).close()


HOLDER = """
import sys, numpy as np
from mbaas.cache.disk.store import DiskStore
tier = DiskStore(sys.argv[1], 10**9, sys.argv[2], num_samples=10**6)
for i in range(10**6):
    tier.put(np.array([i]), np.array([5000]), np.full(5000, i % 251, np.uint8))
    print(i, flush=True)
"""


def test_a_process_that_is_killed_leaves_what_it_said_it_kept(tmp_path: Path) -> None:
    """Another process may not open the folder before, and may right after."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), PRINT], stdout=subprocess.PIPE, text=True)
    with holder:
        try:
            assert holder.stdout
            while int(holder.stdout.readline()) < 100:
                pass
            with pytest.raises(ResourceError):
                open_tier(tmp_path)
        finally:
            holder.kill()
    with open_tier(tmp_path, budget=10**9, num_samples=10**6, segment_bytes=1 << 30, lock_wait_s=10.0) as tier:
        kept = np.arange(tier.stats().samples)
        assert len(kept) > 100
        buffer = np.zeros(5000 * len(kept), np.uint8)
        assert tier.get(kept, np.full(len(kept), 5000), buffer=buffer, offsets=kept * 5000).all()
        assert (buffer.reshape(-1, 5000) == (kept % 251)[:, None]).all()
        assert tier.stats().damaged_rows == 0


@dataclass
class Write:
    """One write to a file that a tier made."""

    name: str
    offset: int
    data: bytes


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[Write]]]:
    """Puts into a new folder, each with the writes that it made."""
    path = tmp_path_factory.mktemp("recorded")
    real, calls = os.pwrite, list[Write]()

    def record(file: int, data: Any, offset: int) -> int:
        name = Path(f"/proc/self/fd/{file}").readlink().name
        short = bytes(data)[: 1 + len(data) // 2] if len(calls) % 5 == 0 else bytes(data)
        calls.append(Write(name, offset, short))
        return real(file, short, offset)

    puts = []
    chance = random.Random(3)
    with pytest.MonkeyPatch.context() as patch, open_tier(path) as tier:
        patch.setattr(os, "pwrite", record)
        for _ in range(25):
            ids = chance.sample(range(SAMPLES), chance.randint(1, 30))
            calls.clear()
            puts.append((put(tier, ids), list(calls)))
    return puts


def replay(path: Path, writes: Iterable[Write]) -> None:
    """A folder as these writes leave it."""
    open_tier(path).close()
    for write in writes:
        file = folder(path) / write.name
        file.touch()
        with file.open("r+b") as target:
            target.seek(write.offset)
            target.write(write.data)


def test_a_crash_at_every_write_loses_what_was_being_put_and_nothing_else(
    recorded: list[tuple[list[int], list[Write]]], tmp_path: Path
) -> None:
    """Killed after each write, and in the middle of it: earlier puts are all there, later ones not at all."""
    chance = random.Random(11)
    before: list[Write] = []
    done: set[int] = set()
    for number, (ids, writes) in enumerate(recorded):
        for i, last in enumerate(writes):
            torn = Write(last.name, last.offset, last.data[: chance.randrange(len(last.data))])
            path = tmp_path / f"{number}-{i}"
            replay(path, [*before, *writes[:i], torn])
            with open_tier(path) as tier:
                found = set(get(tier, range(SAMPLES)))
                assert done <= found <= done | set(ids)
                assert tier.stats().damaged_samples == 0
                assert tier.stats().used_bytes == disk_bytes(path)
                put(tier, range(SAMPLES))
                assert set(get(tier, range(SAMPLES))) >= done | set(ids)
        before += writes
        done |= set(ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_a_power_failure_leaves_nothing_wrong_is_served(
    recorded: list[tuple[list[int], list[Write]]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any of the writes may be missing, any file cut at any length, any bytes flipped: twice over."""
    path = tmp_path_factory.mktemp("power")
    writes = [write for _, some in recorded for write in some]
    lost = data.draw(st.sets(st.integers(0, len(writes) - 1), max_size=len(writes)))
    replay(path, [write for i, write in enumerate(writes) if i not in lost])
    for _ in range(2):
        files = sorted(folder(path).glob("*.bin"))
        for file in data.draw(st.lists(st.sampled_from(files), max_size=3)) if files else []:
            size = file.stat().st_size
            if not size:
                continue
            where = data.draw(st.integers(0, size - 1))
            if data.draw(st.booleans()):
                os.truncate(file, where)
            else:
                flip(file, where)
        with open_tier(path) as tier:
            had = np.flatnonzero(tier.has(np.arange(SAMPLES))).tolist()
            found = get(tier, range(SAMPLES))
            assert set(found) <= set(had)
            assert tier.stats().damaged_samples == len(had) - len(found)
            put(tier, range(0, SAMPLES, 3))
            assert set(get(tier, range(SAMPLES))) >= set(found)
            assert tier.stats().used_bytes == disk_bytes(path) <= EVERYTHING


def test_a_crash_while_the_folder_is_opened_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged row makes the index be written anew; the process dies before the new one is in place."""

    def die(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with open_tier(tmp_path) as tier:
        put(tier, range(50))
    flip(folder(tmp_path) / INDEX, 5)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            open_tier(tmp_path)
    with open_tier(tmp_path) as tier:
        assert get(tier, range(50)) == [*range(1, 50)]


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


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.preadv
    with open_tier(tmp_path) as tier:
        put(tier, range(40))
        monkeypatch.setattr(os, "preadv", lambda file, views, offset: real(file, [views[0][:90]], offset))
        assert get(tier, range(40)) == [*range(40)]


def test_neighbours_on_the_disk_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 and 6, 10 to 12, and 20 lie end to end in one segment: three calls."""
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


def test_close_waits_for_calls_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, inside, gate = os.preadv, threading.Event(), threading.Event()

    def held(file: int, views: list[Any], offset: int) -> int:
        inside.set()
        assert gate.wait(20)
        return real(file, views, offset)

    tier = open_tier(tmp_path)
    put(tier, range(10))
    monkeypatch.setattr(os, "preadv", held)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(get, tier, range(10))
        assert inside.wait(20)
        closing = pool.submit(tier.close)
        wait_until(lambda: tier._closed, "the close has begun")
        assert not closing.done()
        with pytest.raises(StateError, match="is closed"):
            get(tier, [1])
        gate.set()
        assert reading.result(20) == [*range(10)]
        closing.result(20)
    tier.close()
    with pytest.raises(StateError, match="is closed"):
        put(tier, [1])


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with open_tier(tmp_path) as tier:
            put(tier, range(SAMPLES))
            with pytest.raises(ResourceError):
                open_tier(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": -1}, "budget_bytes must be at least 0, got -1"),
        ({"segment_bytes": 0}, r"segment_bytes must be in \[1, 4294967296\], got 0"),
        ({"fingerprint": "../etc"}, "got '../etc'"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tier(tmp_path, **options)


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"needs a folder that it may write to, got .*file"):
        open_tier(tmp_path / "file")


def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        with pytest.raises(ConfigError, match="must have 5 bytes, got 4"):
            tier.put(np.array([1]), np.array([5]), np.zeros(4, np.uint8))
        with pytest.raises(ConfigError, match=r"must hold bytes \[2, 7\) of the samples, got 6 bytes"):
            tier.get(np.array([1]), np.array([5]), buffer=np.zeros(6, np.uint8), offsets=np.array([2]))
