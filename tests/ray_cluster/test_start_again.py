"""While Ray still holds the name of an ended feed, leftovers are cleared and the start is retried."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError

from mbaas import serving
from mbaas.errors import FeedExistsError, ResourceError
from mbaas.ray_cluster import leftovers


class Cluster:
    """A stand-in for Ray that refuses a name ``refusals`` times.

    Leftovers are cleared unless another program was faster.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusals: int, is_faster: bool = False) -> None:
        self.refusals, self.is_faster, self.calls = refusals, is_faster, list[str]()
        monkeypatch.setattr(leftovers, "clear_leftovers", self.clear)
        monkeypatch.setattr(leftovers, "LOOK_S", 0.001)

    def start(self) -> Any:
        self.calls.append("start")
        if self.calls.count("start") <= self.refusals:
            raise ActorAlreadyExistsError("held")
        return "feed"

    def clear(self, name: str) -> bool:
        self.calls.append(f"clear {name}")
        return not self.is_faster

    def serve(self) -> object:
        return serving._started_where_the_name_is_free("train", self.start)


@pytest.mark.parametrize("refusals", [0, 1, 20])
def test_what_is_left_is_cleared_before_each_further_start(monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    cluster = Cluster(monkeypatch, refusals=refusals)
    assert cluster.serve() == "feed"
    assert cluster.calls == ["start", *["clear train", "start"] * refusals]


def test_a_name_that_is_held_for_too_long_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "LEFTOVERS_S", 0.05)
    cluster = Cluster(monkeypatch, refusals=10**9)
    with pytest.raises(
        ResourceError, match=r"^Ray did not release the names of an earlier feed 'train' within 50 ms \(held\); "
    ):
        cluster.serve()
    assert cluster.calls.count("start") > 5


def test_a_program_that_was_faster_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, refusals=9, is_faster=True)
    with pytest.raises(FeedExistsError, match="'train' was served by another program at the same time"):
        cluster.serve()
    assert cluster.calls == ["start", "clear train"]
