"""The disk tier's store survives a killed process and a power failure at every write."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_samples import EVERYTHING, PRINT, SAMPLES, disk_bytes, flip, folder, get, open_tier, put
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.cache.disk.folder import INDEX
from mbaas.errors import ResourceError

pytestmark = pytest.mark.slow

HOLDER = """
import sys, numpy as np
from mbaas.cache.disk.store import DiskStore
tier = DiskStore(sys.argv[1], 10**9, sys.argv[2], num_samples=10**6)
for i in range(10**6):
    tier.put(np.array([i]), np.array([5000]), np.full(5000, i % 251, np.uint8))
    print(i, flush=True)
"""


def test_a_process_that_is_killed_leaves_what_it_said_it_kept(tmp_path: Path) -> None:
    """Another process cannot open the folder before the kill, and can right after."""
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


@dataclass
class Write:
    """One write of a tier to a file."""

    name: str
    offset: int
    data: bytes


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[Write]]]:
    """Puts into a new folder, each with the writes that it caused."""
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
    """Build the folder that these writes leave."""
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
    """Killed after each write, and in the middle: all earlier puts are present, later ones are absent."""
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
    """Any write may be missing, any file truncated at any length, any bytes flipped: twice in a row."""
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
    """A damaged row causes a new index. The process dies before the new index is in place."""

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
