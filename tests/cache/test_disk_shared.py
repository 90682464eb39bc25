"""Several writers in one folder: each finds the samples of the others, and none can harm another."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_samples import EVERYTHING, LENGTHS, OTHER, PRINT, SAMPLES, disk_bytes, flip, get, put
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.cache.disk import shared
from mbaas.cache.disk.folder import INDEX
from mbaas.cache.disk.shared import SharedStore
from mbaas.cache.disk.store import ROW
from mbaas.errors import ConfigError


def open_shared(path: Path, *, budget: int = 2 * EVERYTHING, fingerprint: str = PRINT) -> SharedStore:
    return SharedStore(path, budget, fingerprint, num_samples=SAMPLES)


def found(store: SharedStore, ids: Any = range(SAMPLES)) -> list[int]:
    """Samples that a store gives after a look at the folder, each with the right bytes."""
    store.refresh()
    return get(store, ids)  # type: ignore[arg-type]  # it has the methods of a `DiskStore`


def stored(store: SharedStore, ids: Any) -> list[int]:
    ids = put(store, ids)  # type: ignore[arg-type]
    store.refresh()
    return ids


def test_each_writer_finds_what_the_others_stored_and_stores_nothing_twice(tmp_path: Path) -> None:
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    assert stored(first, range(100)) == [*range(100)]
    second.refresh()
    assert stored(second, range(50, 150)) == [*range(100, 150)]
    for store in (first, second):
        assert found(store) == [*range(150)]
        assert store.has(np.arange(SAMPLES)).sum() == store.stats().samples == 150
        np.testing.assert_array_equal(store.lengths(np.arange(150)), LENGTHS[:150])
    assert disk_bytes(tmp_path) == LENGTHS[:150].sum() + 150 * ROW.itemsize
    first.close()
    assert found(second) == [*range(150)], "a writer's samples stay when it ends"
    second.close()


def test_a_later_writer_finds_all_and_continues_the_files_of_an_ended_one(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    stored(store, range(10))
    store.close()
    again = open_shared(tmp_path)
    assert found(again) == [*range(10)]
    stored(again, range(20))
    again.close()
    assert len([*tmp_path.glob(f"{PRINT}-*")]) == 1
    with_two = [open_shared(tmp_path), open_shared(tmp_path)]
    assert [found(each) for each in with_two] == [[*range(20)]] * 2
    for each in with_two:
        each.close()


def test_samples_of_another_dataset_are_not_found(tmp_path: Path) -> None:
    first, other = open_shared(tmp_path), open_shared(tmp_path, fingerprint=OTHER)
    stored(first, range(10))
    assert found(other) == []
    first.close()
    other.close()


def test_a_damaged_sample_is_never_given_and_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its bytes cannot be late any more, it is read from storage, and takes no more of the budget."""
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    stored(first, range(30))
    segment = next(tmp_path.rglob("segment-*.bin"))
    flip(segment, int(LENGTHS[:4].sum()))
    assert found(second, range(30)) == [i for i in range(30) if i != 4]
    assert stored(second, [4]) == []
    assert second.stats().damaged_samples == 0
    monkeypatch.setattr(shared, "LATE_S", 0.0)
    assert found(second, [4]) == []
    assert second.stats().damaged_samples == 1
    assert stored(second, [4]) == [4]
    assert found(second, [4]) == [4]
    first.close()
    second.close()


def test_a_row_whose_bytes_have_not_arrived_costs_that_sample(tmp_path: Path) -> None:
    """As on a network file system, where the index may be ahead of the samples, or arrive in part."""
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    stored(first, range(30))
    index, segment = first._own.path / INDEX, next(tmp_path.rglob("segment-*.bin"))
    rows, content = index.read_bytes(), segment.read_bytes()
    index.write_bytes(rows[: 10 * ROW.itemsize] + bytes(ROW.itemsize) + rows[11 * ROW.itemsize : -5])
    segment.write_bytes(content[: int(LENGTHS[:20].sum()) - 1])
    assert found(second) == [*range(10), *range(11, 19)]
    index.write_bytes(rows)
    assert found(second, range(25, 29)) == []
    segment.write_bytes(content)
    assert found(second) == [i for i in range(30) if i != 10], "bytes that arrived late"
    assert second.stats().damaged_samples == 0
    second.close()
    first.close()


def test_an_index_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    """The writer of a volume replaces its damaged index when it opens it again."""
    store = open_shared(tmp_path)
    stored(store, range(30))
    index = store._own.path / INDEX
    store.close()
    flip(index, 3 * ROW.itemsize)
    blocker = open_shared(tmp_path)  # takes over the volume, and replaces its index
    reader = open_shared(tmp_path)
    assert found(reader) == [i for i in range(30) if i != 3]
    blocker.close()
    flip(index, 5 * ROW.itemsize)
    again = open_shared(tmp_path)
    assert found(reader) == [i for i in range(30) if i not in (3, 6)]  # row 5 is sample 6 now
    again.close()
    reader.close()


def test_a_transient_error_costs_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    stored(first, range(30))
    assert found(second) == [*range(30)]
    pread = shared.os.pread
    with monkeypatch.context() as patched:
        patched.setattr(shared.os, "pread", lambda *_: (_ for _ in ()).throw(OSError("not now")))
        assert found(second) == [*range(30)]
    assert shared.os.pread is pread
    assert found(second) == [*range(30)]
    first.close()
    second.close()


def test_an_index_may_be_replaced_while_a_thread_opens_a_segment(tmp_path: Path) -> None:
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    stored(first, range(30))
    assert found(second) == [*range(30)]
    (volume,) = second._volumes
    volume._identity = (0, 0)  # as if the index were replaced

    class Watched(dict[int, int]):
        def __contains__(self, number: object) -> bool:
            """Another thread finds the new index after this test."""
            there = super().__contains__(number)
            thread = threading.Thread(target=second.refresh)
            thread.start()
            thread.join(0.2)
            return there

    volume._segments = Watched(volume._segments)
    assert get(second, range(30)) == [*range(30)]  # type: ignore[arg-type]
    first.close()
    second.close()


def test_files_of_a_removed_volume_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "RETIRED_S", 0.0)
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    opened = len([*Path("/proc/self/fd").iterdir()])
    stored(first, range(30))
    assert found(second) == [*range(30)]
    shutil.rmtree(first._own.path)
    assert found(second) == []
    second.refresh()
    assert len([*Path("/proc/self/fd").iterdir()]) == opened + 1, "the first writer's own segment"
    first.close()
    second.close()


def test_a_folder_that_is_removed_gives_nothing_and_is_noticed(tmp_path: Path) -> None:
    first, second = open_shared(tmp_path / "s"), open_shared(tmp_path / "s")
    stored(first, range(30))
    second.refresh()
    assert second.is_there()
    shutil.rmtree(tmp_path / "s")
    assert not second.is_there()
    second.refresh()
    assert set(found(second)) <= {*range(30)}
    first.close()
    second.close()


def test_the_budget_is_for_all_writers_together(tmp_path: Path) -> None:
    budget = EVERYTHING // 2
    stores = [open_shared(tmp_path, budget=budget) for _ in range(3)]
    ids = [[*range(number, SAMPLES, 3)] for number in range(3)]
    for start in range(0, 100, 5):
        for store, own in zip(stores, ids, strict=True):
            stored(store, own[start : start + 5])
            assert disk_bytes(tmp_path) <= budget
    assert disk_bytes(tmp_path) >= 0.85 * budget, "unused reservations are small"
    for store in stores:
        store.close()


def test_datasets_that_nobody_uses_make_room(tmp_path: Path) -> None:
    old, used = open_shared(tmp_path, fingerprint=OTHER), open_shared(tmp_path, fingerprint="a" * 32)
    stored(old, range(150))
    stored(used, range(10))
    old.close()
    store = open_shared(tmp_path, budget=EVERYTHING)
    assert len(stored(store, range(SAMPLES))) > 250
    assert disk_bytes(tmp_path) <= EVERYTHING
    assert [*tmp_path.glob(f"{OTHER}-*")] == []
    assert found(used) == [*range(10)], "one that is in use stays"
    used.close()
    store.close()


def test_without_the_lock_of_the_folder_a_put_stores_nothing_and_a_later_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PUT_WAIT_S", 0.05)
    store, other = open_shared(tmp_path), open_shared(tmp_path)
    with other._locked(1.0):
        assert put(store, range(30)) == []  # type: ignore[arg-type]
    assert put(store, range(30)) == [], "it waits before it asks again"  # type: ignore[arg-type]
    monkeypatch.setattr(store, "_ask_at", 0.0)
    assert put(store, range(30)) == [*range(30)]  # type: ignore[arg-type]
    store.close()
    other.close()


def test_a_full_folder_is_not_scanned_at_each_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = open_shared(tmp_path, budget=EVERYTHING // 4), list[int]()
    reserve = store._reserve
    monkeypatch.setattr(store, "_reserve", lambda nbytes: (asked.append(nbytes), reserve(nbytes)))
    for start in range(0, SAMPLES, 30):
        put(store, range(start, start + 30))  # type: ignore[arg-type]
    assert 1 <= len(asked) <= 5
    store.set_budget(2 * EVERYTHING)
    assert len(put(store, range(SAMPLES))) > 200, "a larger budget is used at once"  # type: ignore[arg-type]
    store.close()


def test_the_folder_is_not_locked_while_a_node_loads_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, loaded = open_shared(tmp_path), list[bool]()
    load = shared.DiskStore._load_index

    def watched(store: shared.DiskStore) -> Any:
        with first._locked(0.0):
            loaded.append(True)
        return load(store)

    monkeypatch.setattr(shared.DiskStore, "_load_index", watched)
    open_shared(tmp_path).close()
    assert loaded == [True]
    first.close()


def test_volumes_of_machines_whose_names_are_alike_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of these two have the same 16-bit hash."""
    names: dict[str, str] = {}
    for number in range(10_000):
        name = f"node-{number}"
        short = hashlib.blake2b(name.encode(), digest_size=2).hexdigest()
        if short in names:
            break
        names[short] = name
    for each in (names[short], name):
        monkeypatch.setattr(shared.socket, "gethostname", lambda each=each: each)
        open_shared(tmp_path).close()
    assert len([*tmp_path.glob(f"{PRINT}-*")]) == 2


def test_a_damaged_ledger_costs_no_more_than_unused_reservations(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    stored(store, range(100))
    for content in (b"", b"[1", b"[]", b'{"a": "b"}', bytes(100)):
        (tmp_path / "mbaas-shared.json").write_bytes(content)
        other = open_shared(tmp_path)
        assert found(other) == [*range(100)]
        other.close()
    store.close()


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"shared disk cache needs a folder .* got .*file"):
        open_shared(tmp_path / "file")


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / f"{OTHER}-{'12345678' * 3}"
    mine.mkdir()
    (mine / "segment-000001.bin").write_bytes(bytes(50))
    (tmp_path / f"{PRINT}-{'12345678' * 3}").symlink_to(mine)
    store = open_shared(tmp_path, budget=EVERYTHING // 4)
    stored(store, range(SAMPLES))
    store.close()
    assert [each.name for each in mine.iterdir()] == ["segment-000001.bin"]


def test_threads_of_one_store_and_another_store_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = open_shared(tmp_path), open_shared(tmp_path)
    failures = list[BaseException]()

    def use(store: SharedStore, seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(60):
                ids = chance.sample(range(SAMPLES), 20)
                chance.choice([put, get])(store, ids)  # type: ignore[arg-type]
                if chance.random() < 0.3:
                    store.refresh()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(store, seed)) for seed, store in enumerate([first, second] * 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert found(first) == found(second)
    assert first.stats().damaged_samples == second.stats().damaged_samples == 0
    first.close()
    second.close()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_schedule_of_writers_that_come_and_go_and_of_damage_gives_no_wrong_byte(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`get` compares every byte of what it finds."""
    path, chance = tmp_path_factory.mktemp("shared"), random.Random(seed)
    budget, stores = chance.choice([EVERYTHING // 3, 2 * EVERYTHING]), list[SharedStore]()
    is_damaged = False
    for _ in range(60):
        event = chance.choices(["open", "close", "put", "get", "damage", "remove"], [3, 2, 8, 8, 1, 0.2])[0]
        if event == "open" and len(stores) < 4:
            stores.append(open_shared(path, budget=budget))
        elif event == "close" and stores:
            stores.pop(chance.randrange(len(stores))).close()
        elif event == "put" and stores:
            put(chance.choice(stores), chance.sample(range(SAMPLES), 15))  # type: ignore[arg-type]
        elif event == "get" and stores:
            found(chance.choice(stores), chance.sample(range(SAMPLES), 40))
        elif event == "damage" and (files := [file for file in path.rglob("*.bin") if file.stat().st_size]):
            file, is_damaged = chance.choice(files), True
            size = file.stat().st_size
            flip(file, chance.randrange(size)) if chance.random() < 0.7 else file.write_bytes(
                file.read_bytes()[: chance.randrange(size)]
            )
        elif event == "remove" and (volumes := [*path.glob(f"{PRINT}-*")]):
            shutil.rmtree(chance.choice(volumes))
            is_damaged = True
        if not is_damaged:
            assert disk_bytes(path) <= budget
            assert all(store.stats().damaged_samples == 0 for store in stores)
    for store in stores:
        store.close()


HOLDER = """
import sys, numpy as np
from mbaas.cache.disk.shared import SharedStore
store = SharedStore(sys.argv[1], 10**9, sys.argv[2], num_samples=10**5)
for i in range(0, 10**5, 10):
    ids = np.arange(i, i + 10)
    store.put(ids, np.full(10, 500), np.repeat(ids % 251, 500).astype(np.uint8))
    store.refresh()
    print(i, flush=True)
"""


@pytest.mark.slow
def test_two_writers_that_are_killed_leave_what_they_published(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), PRINT], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout
            while int(holder.stdout.readline()) < 500:
                pass
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            assert holder.stdout
            holder.stdout.close()
    store = SharedStore(tmp_path, 10**9, PRINT, num_samples=10**5)
    ids = np.flatnonzero(store.has(np.arange(10**5)))
    assert len(ids) >= 500
    buffer = np.zeros(500 * len(ids), np.uint8)
    assert store.get(ids, np.full(len(ids), 500), buffer=buffer, offsets=np.arange(len(ids)) * 500).all()
    assert (buffer.reshape(-1, 500) == (ids % 251)[:, None]).all()
    store.close()
