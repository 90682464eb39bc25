"""Blocks of prep workers that die or hang are prepared again, the workers are replaced, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.ray_cluster import actor_names
from mbaas.samples.placement import PlacementHistory
from mbaas.tools.chaos.participants import alive, kill, paused
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

WORKERS, SAMPLES = 4, 1610


def slow_map():
    """A step of 1 ms per sample. It makes prep slower than its consumer, so workers are busy whenever they die."""

    def dawdle(image, _generator):
        time.sleep(0.001)
        return image

    return T.Map(dawdle)


def busiest(feed, spared):
    """The running worker with most tasks that is not in ``spared``, or None."""
    workers = [worker for worker in feed.status().workers if worker.pid not in spared]
    return max(workers, key=lambda worker: worker.tasks, default=None)


@pytest.mark.parametrize("kills", [4, pytest.param(8, marks=pytest.mark.long)])
def test_prep_workers_killed_over_an_epoch_cost_no_sample_and_are_replaced(serve_small, kills):
    """81 minibatches; a worker gets kill -9 after every twentieth, or every tenth."""
    killed = []
    with serve_small(SAMPLES, slow_map(), prep_workers=WORKERS) as feed:
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            recorder = Recorder()
            for number, batch in enumerate(loader, 1):
                recorder.add(batch)
                if number % (80 // kills) == 0:
                    victim = wait_until(lambda: busiest(feed, killed), "a worker is up")
                    kill(victim.pid)
                    killed.append(victim.pid)
            del batch
            assert len(killed) == kills
            assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
        status = wait_until(lambda: all_replaced(feed, killed), "all killed workers are replaced")
        assert not any(alive(pid) for pid in killed)
        assert sum("will be made again" in note for note in status.notes) >= kills // 2
        assert status.inexact_epochs == 0


def all_replaced(feed, gone):
    status = feed.status()
    pids = {worker.pid for worker in status.workers}
    return status if len(pids) == WORKERS and not pids & set(gone) else None


def test_a_stuck_prep_worker_is_named_killed_and_replaced(serve_small):
    with serve_small(2010, slow_map(), prep_workers=2, timeouts=mbaas.Timeouts(prep_s=2.0)) as feed:
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            recorder = Recorder()
            loop = iter(loader)
            recorder.add(next(loop))
            stuck = wait_until(lambda: busiest(feed, ()), "a worker is up")
            with paused(stuck.pid):
                for batch in loop:
                    recorder.add(batch)
                del batch
                assert recorder.record(loader.ledger).flaws(range(2010)) == []
                wait_until(lambda: stuck.pid not in pids(feed), "the stuck worker is given up")
                wait_until(lambda: len(pids(feed)) == 2, "the stuck worker is replaced")
                wait_until(lambda: not alive(stuck.pid), "the stuck process has ended")
        notes = [note for note in feed_notes(feed) if stuck.name in note]
        assert any("for more than 2 s" in note for note in notes), notes


def test_a_worker_that_makes_no_progress_says_where_it_is_before_it_is_replaced(serve_small, tmp_path, ray_folder):
    """A Map hangs once: its name is in the log of the worker's process."""

    def hang_once(image, _generator):
        if not (tmp_path / "hung").exists():
            (tmp_path / "hung").touch()
            time.sleep(600)
        return image

    (tmp_path / "hung").touch()
    with serve_small(303, T.Map(hang_once), prep_workers=1, timeouts=mbaas.Timeouts(prep_s=3.0)) as feed:
        (worker,) = feed.status().workers
        (tmp_path / "hung").unlink()
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            assert record_epoch(loader).flaws(range(303)) == []
        assert not alive(worker.pid)
    (log,) = Path(ray_folder).glob(f"session_latest/logs/worker-*-{worker.pid}.err")
    assert "hang_once" in log.read_text()


def test_a_pipeline_that_hangs_at_once_is_said_to(serve_small):
    def hang(image, _generator):
        time.sleep(600)

    with pytest.raises(mbaas.WaitTimeoutError, match=r"waited 2 s for prep-0 .* to read and prepare a first sample"):
        serve_small(303, T.Map(hang), prep_workers=1, timeouts=mbaas.Timeouts(prep_s=2.0))


def pids(feed):
    return {worker.pid for worker in feed.status().workers}


def feed_notes(feed):
    return feed.status().notes


def test_a_worker_that_does_not_know_the_homes_is_told_and_does_not_count_as_dead(serve_small):
    """As for a worker that the coordinator could not reach when homes changed."""

    def forget(worker):
        worker._work.placements = PlacementHistory(worker._work.brief.order)

    with serve_small(SAMPLES, prep_workers=1) as feed, mbaas.join(feed.name, consumer="me", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        (before,) = feed.status().workers
        actor = actor_names.children(feed.name, "prep")[before.name]
        ray.get(actor.__ray_call__.remote(forget), timeout=30)
        for _ in range(4):  # blocks of some epochs may already be prepared
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
        wait_until(
            lambda: any("it does not know the newest placement" in note for note in feed.status().notes), "it was told"
        )
        assert [worker.pid for worker in feed.status().workers] == [before.pid]
