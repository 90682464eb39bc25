"""The epoch with which a successor begins counts as kept when it is, and a later one stays; no Ray is started."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mbaas.coordinator import recovery
from mbaas.coordinator.recovery import KeptEpoch

WAIT_S = 10.0


def test_an_epoch_whose_writing_fails_is_kept_with_the_next_try(monkeypatch):
    written: list[int] = []

    def write(_feed: str, _fingerprint: str, epoch: int) -> None:
        written.append(epoch)
        if len(written) == 1:
            raise ConnectionError("the head is away")

    monkeypatch.setattr(recovery, "keep_epoch", write)

    async def keep() -> None:
        kept = KeptEpoch("train", "a", 2)
        assert not kept.is_due(2)
        assert kept.is_due(3)
        with pytest.raises(ConnectionError):
            await kept.keep(3)
        assert kept.is_due(3)
        await kept.keep(3)
        assert not kept.is_due(3)
        await kept.keep(3)
        await kept.keep(2)

    asyncio.run(keep())
    assert written == [3, 3]


def test_epochs_are_written_one_after_the_other_and_a_later_one_stays(monkeypatch):
    """The first write takes until it may go on; a second one that overtook it would be undone by it."""
    written: list[int] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def write(_feed: str, _fingerprint: str, epoch: int) -> None:
        if epoch == 1:
            begun.set()
            assert may_go_on.wait(WAIT_S)
        written.append(epoch)

    monkeypatch.setattr(recovery, "keep_epoch", write)

    async def keep() -> None:
        kept = KeptEpoch("train", "a", 0)
        first = asyncio.ensure_future(kept.keep(1))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        assert not kept.is_due(2), "the first one is still being written"
        others = [asyncio.ensure_future(kept.keep(epoch)) for epoch in (3, 2)]
        may_go_on.set()
        await asyncio.wait_for(asyncio.gather(first, *others), WAIT_S)

    asyncio.run(keep())
    assert written == [1, 3]
