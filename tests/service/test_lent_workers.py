"""Prep workers move to a feed with more need and return, and no trial misses or repeats a sample."""

from __future__ import annotations

import time

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.tools.chaos.participants import alive, kill, paused
from support.processes import coordinator_pid
from support.trials import EpochRecord, record_epoch
from support.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("ray_clean"), pytest.mark.timeout(180)]

SAMPLES, BATCH_SIZE = 403, 13
SOON = mbaas.Lending(hold_s=0.5, pause_s=0.5)


def serve(name: str, workers: int) -> mbaas.Feed:
    """A feed whose workers prepare about 300 samples/s each."""

    def dawdle(image, rng):
        time.sleep(0.003)
        return image

    return mbaas.serve(
        name,
        synthetic(SAMPLES),
        T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip(), T.Map(dawdle)]),
        batch_size=BATCH_SIZE,
        staging_bytes=8 * BATCH_SIZE * (8 * 8 * 3 + 16),
        prep_workers=workers,
        lending=SOON,
    )


def workers(*feeds: mbaas.Feed) -> list[int]:
    return [len(feed.status().workers) for feed in feeds]


def pids(*feeds: mbaas.Feed) -> set[int]:
    return {worker.pid for feed in feeds for worker in feed.status().workers}


def train_until(loader: mbaas.Loader, shares: list[int], *feeds: mbaas.Feed) -> list[EpochRecord]:
    """Read epochs faster than prep until the feeds have ``shares`` workers."""
    records, end = [], time.monotonic() + 60
    while workers(*feeds) != shares:
        assert time.monotonic() < end, f"workers are {workers(*feeds)}, not {shares}"
        records.append(record_epoch(loader))
    return records


def check(records: list[EpochRecord]) -> None:
    """Check that the epochs are exact, whichever workers prepared them."""
    assert records
    for record in records:
        assert record.flaws(range(SAMPLES)) == []


@pytest.fixture
def rich(feed_name: str):
    with serve(f"{feed_name}-rich", 3) as feed:
        yield feed


def test_workers_are_lent_and_come_back_when_the_borrower_ends(rich: mbaas.Feed, feed_name: str) -> None:
    processes = pids(rich)
    with (
        serve(f"{feed_name}-poor", 1) as poor,
        mbaas.join(poor.name, consumer="me", format="numpy") as loader,
    ):
        records = train_until(loader, [1, 3], rich, poor)
        check([*records, record_epoch(loader)])
        assert len(pids(rich, poor)) == 4
        assert processes < pids(rich, poor)
        assert sum(worker.samples > 0 for worker in poor.status().workers) == 3
        assert any(f"lends a worker to {poor.name}" in note for note in rich.status().notes)
        status = poor.status()
        assert len(status.moves_s) == 2
        assert all(0 < seconds < 30 for seconds in status.moves_s)
        causes = {cause for change in status.worker_changes for cause in change.causes}
        assert "borrowed" in causes
        assert all(change.predicted_per_s > 0 for change in status.worker_changes if change.causes == ("borrowed",))
    wait_until(lambda: pids(rich) == processes, "the workers are back")
    with mbaas.join(rich.name, consumer="me", format="numpy") as loader:
        check([same := record_epoch(loader)])
    assert (same.ledger.feed_epoch, same.row_digest) == (0, records[0].row_digest), "whoever made it"


@pytest.mark.long
def test_an_owner_that_can_use_its_workers_gets_them_back(rich: mbaas.Feed, feed_name: str) -> None:
    with (
        serve(f"{feed_name}-poor", 1) as poor,
        mbaas.join(poor.name, consumer="me", format="numpy") as loader,
    ):
        check(train_until(loader, [1, 3], rich, poor))
        with mbaas.join(rich.name, consumer="owner", format="numpy") as owner:
            check(train_until(owner, [3, 1], rich, poor))
        assert any("gives back a worker" in note for note in poor.status().notes)


@pytest.mark.long
def test_a_lent_worker_that_dies_is_made_up_for_by_its_owner(rich: mbaas.Feed, feed_name: str) -> None:
    """A restarted coordinator also finds the workers that it lent or borrowed."""
    with (
        serve(f"{feed_name}-poor", 1) as poor,
        mbaas.join(poor.name, consumer="me", format="numpy") as loader,
    ):
        check(train_until(loader, [1, 3], rich, poor))
        (lent, *_) = pids(poor) - {int(worker.pid) for worker in poor.status().workers if worker.name == "prep-0"}
        kill(lent)
        check([record_epoch(loader)])
        for feed in (rich, poor):
            kill(coordinator_pid(feed.name))
        check([record_epoch(loader)])
        wait_until(lambda: sum(workers(rich, poor)) == 4, "the owner started another", deadline_s=30.0)
        check(train_until(loader, [1, 3], rich, poor))


@pytest.mark.long
@pytest.mark.parametrize("who_restarts", ["borrower", "owner"])
def test_a_lent_worker_that_is_silent_while_a_coordinator_restarts(
    rich: mbaas.Feed, feed_name: str, who_restarts: str
) -> None:
    """If the borrower restarts, the worker ends and its owner replaces it. If the owner restarts, the worker stays."""
    with (
        serve(f"{feed_name}-poor", 1) as poor,
        mbaas.join(poor.name, consumer="me", format="numpy") as loader,
    ):
        check(train_until(loader, [1, 3], rich, poor))
        (silent, _) = pids(poor) - {int(worker.pid) for worker in poor.status().workers if worker.name == "prep-0"}
        restarts = poor if who_restarts == "borrower" else rich
        with paused(silent):
            kill(coordinator_pid(restarts.name))
            wait_until(lambda: restarts.status().restarts == 1, "it goes on", deadline_s=30.0)
            if who_restarts == "borrower":
                wait_until(lambda: not alive(silent), "the silent one is ended")
                wait_until(lambda: sum(workers(rich, poor)) == 4, "the owner started another", deadline_s=30.0)
            else:
                assert alive(silent)
        check([*train_until(loader, [1, 3], rich, poor), record_epoch(loader)])
        assert (silent in pids(poor)) == (who_restarts == "owner")


@pytest.mark.long
def test_an_owner_that_ends_takes_its_workers_with_it(feed_name: str) -> None:
    with serve(f"{feed_name}-poor", 1) as poor, mbaas.join(poor.name, consumer="me", format="numpy") as loader:
        with serve(f"{feed_name}-rich", 3) as rich:
            check(train_until(loader, [1, 3], rich, poor))
        check([record_epoch(loader)])
        wait_until(lambda: workers(poor) == [1], "only its own worker is left")
        check([record_epoch(loader)])
