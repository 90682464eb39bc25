"""The coordinator's actor class forwards all calls, and a joining program imports no part of a coordinator."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import ray

import mbaas
from mbaas import transforms as T
from mbaas.coordinator import actor
from mbaas.coordinator.coordinator import FeedCoordinator

JOIN = """
import json, sys, ray, mbaas
ray.init(address=sys.argv[1], log_to_driver=False)
with mbaas.join(sys.argv[2], "other", format="numpy") as loader:
    next(iter(loader))
print(json.dumps(sorted(sys.modules)))
"""


def test_all_calls_are_forwarded() -> None:
    methods = inspect.getmembers(FeedCoordinator, inspect.isfunction)
    assert sorted(actor.CALLS) == sorted(name for name, _ in methods if not name.startswith("_"))
    assert all(inspect.iscoroutinefunction(getattr(actor.Coordinator, name)) for name in actor.CALLS)


def test_a_program_that_joins_imports_no_parts_of_a_coordinator(ray_session, small_images, feed_name) -> None:
    with mbaas.serve(feed_name, small_images, T.Pipeline([T.DecodeImage()]), batch_size=64, prep_workers=1):
        command = [sys.executable, "-c", JOIN, ray.get_runtime_context().gcs_address, feed_name]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    imported = set(json.loads(found.stdout.splitlines()[-1]))
    assert "mbaas.loader" in imported
    others = ("mbaas.coordinator.coordinator", "mbaas.cache.node", "mbaas.prep.worker", "mbaas.transforms")
    assert imported.isdisjoint(others), imported.intersection(others)
