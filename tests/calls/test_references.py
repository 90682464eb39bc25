"""Receivers can read references that Ray does not count, and get an error when the object is gone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import ray

from mbaas.calls.wire import received, uncounted
from mbaas.messages import StoreRef

pytestmark = pytest.mark.usefixtures("ray_clean")

LARGE, SMALL = 2**20, 1000
"""Bytes: in the object store, and in the memory of its owner (below 100 kB)."""


@ray.remote(num_cpus=0)
class Owner:
    """Holds objects and hands out references to them."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def keep(self, nbytes: int) -> None:
        self._kept[nbytes] = ray.put(np.full(nbytes, 7, np.uint8))

    def lend(self, nbytes: int) -> list[Any]:
        return [uncounted(self._kept[nbytes])]

    def drop(self, nbytes: int) -> None:
        del self._kept[nbytes]


@pytest.fixture
def owner() -> Any:
    made = Owner.remote()  # type: ignore[attr-defined]
    yield made
    ray.kill(made)


def lent(owner: Any, nbytes: int) -> Any:
    ray.get(owner.keep.remote(nbytes))
    return again(owner, nbytes)


def again(owner: Any, nbytes: int) -> Any:
    (sent,) = ray.get(owner.lend.remote(nbytes))
    assert isinstance(sent, StoreRef), "plain bytes: Ray counts no reference"
    return received(sent)


def is_soon_lost(ref: Any) -> bool:
    """Return whether reading soon raises ObjectLostError: Ray batches frees for some milliseconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            ray.get(ref, timeout=10)
        except ray.exceptions.ObjectLostError:
            return True
    return False


@pytest.mark.parametrize("nbytes", [LARGE, SMALL])
def test_the_receiver_reads_what_the_owner_keeps(owner: Any, nbytes: int) -> None:
    ref = lent(owner, nbytes)
    other = again(owner, nbytes)
    assert isinstance(ref, ray.ObjectRef)
    assert ray.get(ref, timeout=10).sum() == 7 * nbytes
    del ref  # another reference to the same object stays valid
    assert ray.get(other, timeout=10).sum() == 7 * nbytes


def test_what_is_mapped_stays_readable_when_the_owner_drops_it_and_goes_when_it_is_let_go(owner: Any) -> None:
    ref = lent(owner, LARGE)
    view = ray.get(ref, timeout=10)
    ray.get(owner.drop.remote(LARGE))
    ray.get(owner.keep.remote(SMALL))
    assert view.sum() == 7 * LARGE
    assert not view.flags.writeable
    del view
    assert is_soon_lost(ref)


def test_an_object_that_is_gone_is_an_error_at_once(owner: Any) -> None:
    """A counted reference would have kept the object; this one is not counted."""
    ref = lent(owner, LARGE)
    ray.get(owner.drop.remote(LARGE))
    assert is_soon_lost(ref)


def test_where_ray_has_no_such_thing_references_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherRay:
        core_worker = object()

    ref = ray.put(1)
    with monkeypatch.context() as other:
        other.setattr(ray._private.worker, "global_worker", OtherRay)
        assert uncounted(ref) is ref
