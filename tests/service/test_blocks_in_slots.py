"""A feed of one node puts blocks into slots where trials read them, and falls back to the object store."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from service_feeds import augmented

import mbaas
from mbaas.dataset import synthetic
from mbaas.memory.slots import Slot
from mbaas.tools.chaos.participants import kill
from support.feeds import in_coordinator
from support.processes import prep_worker_pids
from support.trials import EpochRecord, Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES = 1003
OPTIONS: dict[str, Any] = {"batch_size": 64, "prep_workers": 2, "staging_bytes": 2 << 20}
NOTE = "blocks go through the object store from now on"


def staged(feed: mbaas.Feed) -> list[bool]:
    """Wait until parts are staged. Return True for each part that is in a slot."""

    def look(coordinator: Any) -> list[bool]:
        blocks = coordinator._running.service._staged.values()
        return [part.memory.ref is None for block in blocks for part in block.parts.values()]

    return wait_until(lambda: in_coordinator(feed.name, look), "parts are staged")


def epochs(loader: mbaas.Loader, count: int) -> list[EpochRecord]:
    records = [record_epoch(loader) for _ in range(count)]
    assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * count
    return records


@pytest.fixture(scope="module")
def known(ray_session: None) -> list[str]:
    """Digests of the first epochs, read through the object store because the consumer could open no slot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "held", lambda _: None)
        with mbaas.serve("by-objects", synthetic(SAMPLES, height=32, width=32), augmented(), **OPTIONS) as feed:
            with mbaas.join(feed.name, format="numpy") as loader:
                records = epochs(loader, 4)
                assert not any(staged(feed))
            assert NOTE in " ".join(feed.status().notes)
    return [record.row_digest for record in records]


def check(record: EpochRecord, known: list[str]) -> None:
    """Check that the epoch is exact and has the same bytes as through the object store."""
    assert record.flaws(range(SAMPLES)) == []
    assert record.row_digest == known[record.ledger.feed_epoch]


def serve(name: str) -> mbaas.Feed:
    return mbaas.serve(name, synthetic(SAMPLES, height=32, width=32), augmented(), **OPTIONS)


def test_blocks_lie_in_slots_and_have_the_bytes_of_those_in_the_object_store(known: list[str], feed_name: str) -> None:
    with serve(feed_name) as feed, mbaas.join(feed.name, format="numpy") as loader:
        records = epochs(loader, 2)
        assert all(staged(feed))
        assert feed.status().remade_blocks == 0
    for record in records:
        check(record, known)


def test_a_consumer_on_another_node_has_blocks_made_anew_where_it_can_read_them(
    known: list[str], feed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports another node and cannot open slots. Local consumers use slots again after it has left."""
    with serve(feed_name) as feed, mbaas.join(feed.name, "here", format="numpy") as here:
        recorder, loop = Recorder(), iter(here)
        recorder.add(next(loop))
        assert any(staged(feed))
        with monkeypatch.context() as patch:
            patch.setattr(ray.runtime_context.RuntimeContext, "get_node_id", lambda _: "f" * 56)
            with mbaas.join(feed.name, "there", format="numpy") as there:
                for batch in loop:
                    recorder.add(batch)
                del batch
                patch.setattr(Slot, "held", lambda _: None)
                (second,) = epochs(there, 1)
        check(recorder.record(here.ledger), known)
        check(second, known)
        epochs(here, 2)
        assert any(staged(feed))
        assert NOTE not in " ".join(feed.status().notes)


def test_what_a_dead_worker_made_is_made_again(known: list[str], feed_name: str) -> None:
    """The second consumer cannot open the dead worker's memory. The first one has it open and continues."""
    with serve(feed_name) as feed, mbaas.join(feed.name, "first", format="numpy") as first:
        recorder, loop = Recorder(), iter(first)
        recorder.add(next(loop))
        held = next(loop)
        before = held["image"].copy()
        mbaas.announce(feed.name, ["second"])
        for pid in prep_worker_pids(feed.name):
            kill(pid)
        with mbaas.join(feed.name, "second", format="numpy") as second:
            assert (held["image"] == before).all()
            recorder.add(held)
            for batch in loop:
                recorder.add(batch)
            del batch, held
            check(recorder.record(first.ledger), known)
            check(epochs(second, 1)[0], known)


def test_a_coordinator_that_can_open_no_slot_gives_up_after_a_few(known: list[str], feed_name: str) -> None:
    """Each such part is prepared again as an object, and then no more slots are requested."""
    with serve(feed_name) as feed:

        def blind(_: Any) -> None:
            Slot.staged = lambda _: None

        in_coordinator(feed.name, blind)
        with mbaas.join(feed.name, format="numpy") as loader:
            for record in epochs(loader, 2):
                check(record, known)
            assert not any(staged(feed))
        assert sum(NOTE in note for note in feed.status().notes) == 1
