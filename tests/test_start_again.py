"""Ray may hold the name of a feed that is gone for a moment: it is started again, after what is left was cleared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError

from mbaas import runtime, serving
from mbaas.errors import FeedExistsError


class Cluster:
    """Ray, which refuses a name so many times; what is left is cleared unless another program was faster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusals: int, is_faster: bool = False) -> None:
        self.refusals, self.is_faster, self.calls = refusals, is_faster, list[str]()
        monkeypatch.setattr(serving, "_start", self.start)
        monkeypatch.setattr(runtime, "clear_leftovers", self.clear)

    def start(self, *_: Any) -> str:
        self.calls.append("start")
        if self.calls.count("start") <= self.refusals:
            raise ActorAlreadyExistsError("held")
        return "feed"

    def clear(self, name: str) -> bool:
        self.calls.append(f"clear {name}")
        return not self.is_faster

    def serve(self) -> object:
        settings: Any = SimpleNamespace(name="train")
        nothing: Any = None
        return serving._started_where_the_name_is_free(settings, nothing, nothing, 0)


@pytest.mark.parametrize("refusals", [0, 1, 4])
def test_what_is_left_is_cleared_before_each_further_start(monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    cluster = Cluster(monkeypatch, refusals=refusals)
    assert cluster.serve() == "feed"
    assert cluster.calls == ["start", *["clear train", "start"] * refusals]


def test_after_five_starts_the_error_of_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, refusals=5)
    with pytest.raises(ActorAlreadyExistsError, match="held"):
        cluster.serve()
    assert cluster.calls.count("start") == 5


def test_a_program_that_was_faster_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, refusals=9, is_faster=True)
    with pytest.raises(FeedExistsError, match="'train' was served by another program at the same time"):
        cluster.serve()
    assert cluster.calls == ["start", "clear train"]
