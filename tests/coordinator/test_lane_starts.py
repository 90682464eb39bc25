"""A lane's coordinator starts even if Ray still holds the name of an ended one. No Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from mbaas.coordinator import lane
from mbaas.errors import ResourceError
from mbaas.settings import FeedSettings, Staging

SETTINGS = FeedSettings(
    name="train", batch_size=20, cache_bytes=0, staging_bytes=10**6, prep_workers=1, staging=Staging(lanes=3)
)


class Options:
    """Stand-in for Ray that refuses a lane's name ``refusals`` times."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.started: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, *, name: str, **_: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise ray.exceptions.ActorAlreadyExistsError(f"{name} is still held")

        def remote(*args: Any) -> str:
            self.started.append((name, args))
            return name

        return SimpleNamespace(remote=remote)


@pytest.fixture
def start(monkeypatch):
    """Start the lanes of a feed of three with a Ray that refuses names."""
    here = SimpleNamespace(get_node_id=lambda: 56 * "0", get_actor_id=lambda: "main")
    monkeypatch.setattr(lane.ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(lane, "RETRY_S", 0.001)

    def start(refusals: int) -> tuple[tuple[Any, ...], Options]:
        options = Options(refusals)
        monkeypatch.setattr(lane.LaneCoordinatorActor, "options", options)
        return asyncio.run(lane.start_lanes(SETTINGS)), options

    return start


def test_a_name_that_ray_still_holds_is_asked_for_again_until_it_is_free(start):
    actors, options = start(refusals=2)
    assert actors == ("lane:train:1", "lane:train:2")
    assert options.started == [(f"lane:train:{number}", (SETTINGS, number, "main")) for number in (1, 2)]


def test_a_name_that_is_never_free_ends_in_an_error_that_says_which(start, monkeypatch):
    monkeypatch.setattr(lane, "LANE_BEGIN_S", 0.05)
    with pytest.raises(ResourceError, match=r"lane 1 of feed 'train' cannot be started: .*lane:train:1 is still held"):
        start(refusals=10**9)
