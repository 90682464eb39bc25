"""A slot never changes while it is read, and no dead or hanging process keeps one forever."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mbaas.memory import slots
from mbaas.memory.slots import HeldSlot, Slot, SlotMemory
from mbaas.samples.fields import Packed
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(not slots.are_supported(), reason="needs memfd_create and locks of Linux")

ROWS = 5
LIKE = np.empty((ROWS, 4, 3), np.uint8)
SLOT_BYTES = 4096

HOLDER = """
import pickle, sys, time
arrays = pickle.loads(bytes.fromhex(sys.argv[1])).held().read()
print(int(arrays["image"][0, 0, 0]), flush=True)
time.sleep(60)
"""


def made(memory: SlotMemory, value: int, most: int = 3) -> Slot | None:
    """A block whose values are all ``value``; None if no slot is free."""
    place = memory.take(most)
    if place is None:
        return None
    image = place.samples(LIKE)
    image[...] = value
    slot = place.hand_out({"image": image, "label": np.full(ROWS, value)})
    assert slot is not None
    return slot


def staged(memory: SlotMemory, value: int, most: int = 3) -> HeldSlot:
    slot = made(memory, value, most)
    assert slot is not None
    held = slot.staged()
    assert held is not None
    return held


def arrays_in(slot: Slot) -> dict[str, Any] | None:
    held = slot.held()
    return None if held is None else held.read()


def values(arrays: dict[str, Any] | None) -> list[int]:
    assert arrays is not None
    return sorted({*arrays["image"].ravel().tolist(), *arrays["label"].tolist()})


@pytest.fixture
def memory() -> SlotMemory:
    return SlotMemory(SLOT_BYTES)


def test_arrays_come_as_they_were_put_in_read_only_and_aligned(memory: SlotMemory) -> None:
    place = memory.take(1)
    assert place is not None
    image = place.samples(LIKE)
    image[...] = np.arange(LIKE.size).reshape(LIKE.shape)
    boxes = Packed(np.arange(12, dtype=np.float32).reshape(3, 4), np.array([0, 1, 1, 3]))
    masks = Packed(np.arange(8, dtype=np.uint8), np.array([0, 2, 8]), np.array([[1, 2], [2, 3]]))
    given = {"image": image[:3], "label": np.arange(3), "boxes": boxes, "masks": masks, "none": np.empty(0, np.float64)}
    slot = place.hand_out(given)
    assert slot is not None
    found = arrays_in(pickle.loads(pickle.dumps(slot)))
    assert found is not None
    assert list(found) == list(given)
    for name, column in given.items():
        for one, other in zip(_arrays(column), _arrays(found[name]), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
            assert not other.flags.writeable
            assert other.ctypes.data % slots.ALIGNED_BYTES == 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                other.flags.writeable = True


def _arrays(column: Any) -> tuple[Any, ...]:
    return slots.memory(column)


def test_the_room_of_an_array_is_the_whole_slot_in_which_it_lies(memory: SlotMemory) -> None:
    held = [staged(memory, value, most=3) for value in (1, 2, 3)]
    found = [arrays_in(each.slot) for each in held]
    rooms = []
    for value, arrays in zip((1, 2, 3), found, strict=True):
        assert arrays is not None
        room = slots.room_of(arrays["image"][1])
        assert room is not None
        assert room.ctypes.data % mmap.PAGESIZE == room.nbytes % mmap.PAGESIZE == 0
        assert not room.flags.writeable
        assert room[: arrays["image"].nbytes].tolist() == [value] * arrays["image"].nbytes
        rooms.append((room.ctypes.data, room.ctypes.data + room.nbytes))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(rooms)))
    assert slots.room_of(np.zeros(10)) is None
    assert slots.will_be_written(room)
    assert not slots.will_be_written(np.zeros(4096, np.uint8))
    del arrays, found, held
    assert memory.take(3) is not None, "a room does not hold its slot"


def test_what_does_not_fit_is_not_handed_out_and_the_slot_is_free_again(memory: SlotMemory) -> None:
    place = memory.take(1)
    assert place is not None
    assert place.hand_out({"image": place.samples(LIKE), "label": np.zeros(SLOT_BYTES // 8)}) is None
    assert values(arrays_in(staged(memory, 3, most=1).slot)) == [3]


def test_a_slot_is_written_again_when_neither_the_coordinator_nor_a_reader_needs_it(memory: SlotMemory) -> None:
    held = staged(memory, 1, most=1)
    arrays = arrays_in(held.slot)
    assert made(memory, 2, most=1) is None, "it is staged"
    slot = held.slot
    del held
    assert made(memory, 2, most=1) is None, "a consumer reads it"
    row = arrays["image"][2]  # type: ignore[index]
    del arrays
    assert made(memory, 2, most=1) is None, "a view still refers to the slot"
    assert row.tolist() == [[1] * 3] * 4
    del row
    assert values(arrays_in(staged(memory, 2, most=1).slot)) == [2]
    assert arrays_in(slot) is None, "its former contents are gone"
    assert slot.staged() is None


def test_the_slot_that_was_written_last_is_written_first(memory: SlotMemory) -> None:
    first, second, third = (staged(memory, value) for value in range(3))
    numbers = [first.slot.number, second.slot.number]
    del first, second
    again = staged(memory, 9)
    assert again.slot.number == numbers[1]
    assert values(arrays_in(third.slot)) == [2]


def test_a_slot_that_no_coordinator_has_seen_is_left_alone_for_a_while(
    memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator may be busy, or may have died before it received the slot."""
    slot = made(memory, 1, most=1)
    assert slot is not None
    assert made(memory, 2, most=1) is None
    monkeypatch.setattr(slots, "UNSEEN_S", 0.0)
    assert made(memory, 2, most=1) is not None
    assert slot.staged() is None


def test_a_file_that_took_the_place_of_a_workers_memory_is_not_taken_for_it(memory: SlotMemory, tmp_path: Path) -> None:
    slot = made(memory, 1)
    assert slot is not None
    assert values(arrays_in(slot)) == [1]
    slots.forget_all()
    assert arrays_in(replace(slot, token=bytes(slots.TOKEN_BYTES))) is None
    for path in ("/proc/self/fd/100000", os.devnull, str(tmp_path / "short")):
        (tmp_path / "short").touch()
        assert arrays_in(replace(slot, path=path)) is None


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_reader_that_dies_gives_its_slot_back_and_one_that_hangs_keeps_it_alone(
    memory: SlotMemory, way: signal.Signals
) -> None:
    held = staged(memory, 7, most=1)
    command = [sys.executable, "-c", HOLDER, pickle.dumps(held.slot).hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "7\n"
        del held
        assert made(memory, 8, most=1) is None
        os.kill(reader.pid, way)
        if way == signal.SIGSTOP:
            assert made(memory, 8, most=1) is None
            assert values(arrays_in(staged(memory, 8, most=2).slot)) == [8], "others get another slot"
            reader.kill()
        wait_until(lambda: made(memory, 9, most=1) is not None, "the slot is free")


def test_whoever_reads_a_workers_memory_does_so_after_its_death() -> None:
    """The reader releases it when it opens the memory of the next worker."""
    memory = SlotMemory(SLOT_BYTES)
    held = staged(memory, 5)
    arrays = arrays_in(held.slot)
    assert held.is_in_live_worker
    del memory
    assert not held.is_in_live_worker
    assert values(arrays) == [5]
    assert values(arrays_in(held.slot)) == [5], "this process had opened it"
    staged(SlotMemory(SLOT_BYTES), 6)
    assert arrays_in(held.slot) is None
    assert values(arrays) == [5]


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_changes_what_somebody_holds(seed: int) -> None:
    """Two workers make blocks, which are staged, dropped, read and released in any order. Free slots are found."""
    choose = random.Random(seed)
    memories = [SlotMemory(SLOT_BYTES) for _ in range(2)]
    held: dict[int, HeldSlot] = {}
    read: list[tuple[int, dict[str, Any]]] = []
    known: dict[int, Slot] = {}
    for value in range(1, 250):
        at = choose.randrange(2)
        in_use = {(slot.token, slot.number) for slot in (known[v] for v in {*held, *(v for v, _ in read)})}
        slot = made(memories[at], value, most=4)
        taken = sum(token == memories[at]._token for token, _ in in_use)
        assert (slot is None) == (taken == 4), f"step {value}: {taken} of 4 slots are in use, got {slot}"
        if slot is not None:
            known[value] = slot
            held[value] = keep = slot.staged()  # type: ignore[assignment]
            assert keep is not None
            del keep
        for _ in range(choose.randrange(4)):
            if known and choose.random() < 0.5:
                old = choose.choice([*known])
                arrays = arrays_in(known[old])
                is_held = old in held or any(old == v for v, _ in read)
                assert arrays is not None or not is_held, f"step {value}: block {old} is held, and cannot be read"
                if arrays is not None:
                    read.append((old, arrays))
                del arrays
            if held and choose.random() < 0.5:
                del held[choose.choice([*held])]
            if read and choose.random() < 0.6:
                read.pop(choose.randrange(len(read)))
        for old, arrays in read:
            assert values(arrays) == [old], f"step {value}: block {old} changed"
            del arrays
    for old, keep in held.items():
        assert values(arrays_in(keep.slot)) == [old]
