"""Receivers can read references that Ray does not count, and get an error when the object is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import ray
from msgspec.structs import replace

from mbaas.memory import slots
from mbaas.memory.part_memory import (
    CountedObject,
    HeldObject,
    PartAddress,
    PartMemory,
    StoredObject,
    UnreadableError,
    read,
)
from mbaas.memory.slots import SlotMemory

pytestmark = pytest.mark.usefixtures("ray_clean")

LARGE, SMALL = 2**20, 1000
"""Bytes: in the object store, and in the memory of its owner (below 100 kB)."""


@ray.remote(num_cpus=0)
class Owner:
    """Holds objects and hands out references to them."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def keep(self, nbytes: int) -> None:
        self._kept[nbytes] = ray.put({"label": np.full(nbytes, 7, np.uint8)})

    def lend(self, nbytes: int) -> PartAddress:
        return HeldObject(self._kept[nbytes]).sent()

    def drop(self, nbytes: int) -> None:
        del self._kept[nbytes]


@pytest.fixture
def owner() -> Any:
    made = Owner.remote()  # type: ignore[attr-defined]
    yield made
    ray.kill(made)


def lent(owner: Any, nbytes: int) -> HeldObject:
    ray.get(owner.keep.remote(nbytes))
    address = ray.get(owner.lend.remote(nbytes))
    assert isinstance(address, StoredObject)
    return address.held()


def is_soon_lost(part: PartMemory) -> bool:
    """Return whether the part is soon lost: Ray batches frees for some milliseconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            part.read(10)
        except UnreadableError as error:
            return error.for_good
    return False


@pytest.mark.parametrize("nbytes", [LARGE, SMALL])
def test_the_receiver_reads_what_the_owner_keeps(owner: Any, nbytes: int) -> None:
    part = lent(owner, nbytes)
    other = ray.get(owner.lend.remote(nbytes)).held()
    assert isinstance(part.ref, ray.ObjectRef)
    assert part.read(10)["label"].sum() == 7 * nbytes
    del part  # another reference to the same object stays valid
    assert other.read(10)["label"].sum() == 7 * nbytes


def test_what_is_mapped_stays_readable_when_the_owner_drops_it_and_goes_when_it_is_let_go(owner: Any) -> None:
    part = lent(owner, LARGE)
    view = part.read(10)["label"]
    ray.get(owner.drop.remote(LARGE))
    ray.get(owner.keep.remote(SMALL))
    assert view.sum() == 7 * LARGE
    assert not view.flags.writeable
    del view
    assert is_soon_lost(part)


def test_an_object_that_is_gone_is_an_error_at_once(owner: Any) -> None:
    """A counted reference would have kept the object; this one is not counted."""
    part = lent(owner, LARGE)
    ray.get(owner.drop.remote(LARGE))
    assert is_soon_lost(part)


def test_where_ray_has_no_such_thing_references_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherRay:
        core_worker = object()

    part = HeldObject(ray.put({}))
    with monkeypatch.context() as other:
        other.setattr(ray._private.worker, "global_worker", OtherRay)
        address = part.sent()
    assert address == CountedObject(part.ref)
    assert address.held().ref is part.ref


@pytest.mark.skipif(not slots.are_supported(), reason="needs memfd_create and locks of Linux")
def test_parts_in_slots_and_in_the_store_are_read_together_and_one_that_is_lost_is_an_error() -> None:
    place = SlotMemory(4096).take(1)
    assert place is not None
    address = place.hand_out({"label": np.array([1, 2])})
    assert address is not None
    stored = [HeldObject(ray.put({"label": np.array([number])})) for number in (3, 4)]
    parts = [stored[1], address.held(), stored[0]]
    assert [arrays["label"].tolist() for arrays in read(parts, 10)] == [[4], [1, 2], [3]]
    assert is_lost([*parts, replace(address, written=7).held()])


def is_lost(parts: Sequence[PartMemory | None]) -> bool:
    """Not `pytest.raises`, because its result keeps the objects in the store."""
    try:
        read(parts, 10)
    except UnreadableError as error:
        return error.for_good
    return False


def test_a_part_that_is_late_is_not_lost() -> None:
    @ray.remote(num_cpus=0)
    def late() -> None:
        time.sleep(60)

    part = HeldObject(late.remote())
    with pytest.raises(UnreadableError) as error:
        part.read(0.1)
    assert not error.value.for_good
    ray.cancel(part.ref, force=True)
