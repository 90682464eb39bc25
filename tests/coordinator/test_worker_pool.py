"""A slow worker start is awaited on a real Ray, and a failed one reports the missing resource."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from mbaas import transforms as T
from mbaas.coordinator import worker_pool as worker_pool_module
from mbaas.coordinator.worker_pool import WorkerPool
from mbaas.errors import ResourceError
from mbaas.ray_cluster import actor_names, leftovers
from mbaas.settings import FeedSettings, Scaling
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import from this folder

DEADLINE_S = 1.0
"""Time for a worker to start."""


class Barred:
    """A pipeline that can be unpickled only once a file exists, so the test controls when a worker is ready."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (str(self.gate),)


def _opened(gate: str) -> T.Pipeline:
    while not Path(gate).exists():
        time.sleep(0.02)
    return T.Pipeline([T.DecodeImage()])


@pytest.fixture
def make_worker_pool(ray_clean, feed_name):
    """Pools of one worker, without a coordinator."""

    def make(pipeline, **options):
        settings = FeedSettings(
            name=feed_name, batch_size=8, cache_bytes=0, staging_bytes=1 << 20, prep_workers=1, **options
        )
        return WorkerPool(settings, pipeline, "cpu")

    yield make
    leftovers.end_children(feed_name)
    wait_until(lambda: not actor_names.children(feed_name, "prep"), "the worker is gone")


def actor_pid(feed):
    """Process id of the feed's starting worker, or None."""
    actors = list(actor_names.children(feed, "prep").values())
    return actor_names.pid_of(actors[0]) if actors else None


def test_a_worker_that_has_its_cpu_and_begins_late_is_waited_for(make_worker_pool, feed_name, tmp_path):
    """The deadline is long, because the process must exist before it even on a busy machine."""
    gate, seen, deadline_s = tmp_path / "open", [], 8.0
    began = time.monotonic()

    def open_late():
        with contextlib.suppress(AssertionError):  # without a process the assertion below fails
            seen.append(wait_until(lambda: actor_pid(feed_name), "its process runs", deadline_s=deadline_s))
            time.sleep(began + deadline_s + 0.5 - time.monotonic())
        gate.touch()

    worker_pool = make_worker_pool(Barred(gate))
    helper = threading.Thread(target=open_late)
    helper.start()
    try:
        worker = asyncio.run(worker_pool.start("prep-0", deadline_s))
    finally:
        helper.join()
    assert time.monotonic() - began > deadline_s
    assert seen == [worker.pid]


def test_a_worker_that_does_not_begin_is_said_to_have_its_cpu(make_worker_pool, feed_name, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool_module, "BEGIN_S", 0.5)
    told = rf"prep-0 of feed '{feed_name}' got its CPU, but its process \d+ was not ready within 30\.5 s"
    worker_pool, runs = make_worker_pool(Barred(tmp_path / "never")), lambda: actor_pid(feed_name) is not None
    with pytest.raises(ResourceError, match=told):
        asyncio.run(worker_pool.start("prep-0", 30.0, give_up=runs))


def test_a_worker_that_gets_no_place_is_said_to_lack_its_cpu(make_worker_pool, feed_name):
    worker_pool = make_worker_pool(T.Pipeline([T.DecodeImage()]), scaling=Scaling(prep_labels={"zone": "nowhere"}))
    wait_until(lambda: ray.available_resources().get("CPU") == 8, "workers of other tests gave their CPUs back")
    with pytest.raises(ResourceError, match=r"needs 1 CPU and did not get it within 1 s: 8 of 8 CPUs are free"):
        asyncio.run(worker_pool.start("prep-0", DEADLINE_S))
