"""A bug in the coordinator itself: consumers miss nothing, and people are told of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import ray

import mbaas
from mbaas import runtime
from mbaas import transforms as T
from mbaas.chaos.participants import coordinator_pid
from support.trials import Recorder, record_epoch
from support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.meets_bugs]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the coordinator cannot import it

SAMPLES = 2011


def inside(feed: mbaas.Feed, change: Any) -> None:
    """Change something in the process of a feed's coordinator, behind its back."""
    actor = ray.get_actor(runtime.actor_name(feed.name), runtime.NAMESPACE)
    ray.get(actor.__ray_call__.remote(change), timeout=30)


def break_staging(coordinator: Any) -> None:
    coordinator._running.service.core.window.used_bytes += 1


def break_supervisor(coordinator: Any) -> None:
    for worker in coordinator._running.supervision.state.workers.values():
        worker.version = 0


def break_loop(coordinator: Any) -> None:
    def look(_: Any) -> None:
        raise RuntimeError("provoked by a test")

    coordinator._look = look


@pytest.mark.parametrize("change", [break_staging, break_supervisor])
def test_a_coordinator_that_contradicts_itself_starts_anew_and_nothing_is_missed(serve_small, ray_clean, change):
    with serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=2) as feed:
        pid = coordinator_pid(feed.name)
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            recorder = Recorder()
            for number, batch in enumerate(loader, 1):
                recorder.add(batch)
                if number == 8:
                    inside(feed, change)
            del batch
            assert recorder.record(loader.ledger).flaws(range(SAMPLES)) == []
        assert coordinator_pid(feed.name) != pid
        assert any("the coordinator was restarted" in note for note in feed.status().notes)
        assert feed.status().restarts == 1


def test_an_error_in_the_coordinator_s_loop_is_told_and_the_loop_goes_on(serve_small, ray_clean):
    with serve_small(SAMPLES, T.RandomHorizontalFlip(), prep_workers=1) as feed:
        pid = coordinator_pid(feed.name)
        inside(feed, break_loop)

        wait_until(lambda: feed.status().internal_errors >= 2, "the loop has gone on after the first error")
        told = sum("RuntimeError: provoked by a test" in note for note in feed.status().notes)
        assert told == 1, "an error that comes every round is told once"
        with mbaas.join(feed.name, consumer="me", format="numpy") as loader:
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
        assert coordinator_pid(feed.name) == pid
