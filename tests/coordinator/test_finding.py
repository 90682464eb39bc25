"""A program that looks for a feed on an empty cluster of its own gets advice; tested without Ray."""

from __future__ import annotations

import pytest

from mbaas.coordinator import control
from mbaas.errors import FeedNotFoundError


@pytest.mark.parametrize(
    ("running", "owns", "advised"),
    [((), True, True), ((), False, False), (("other",), True, False)],
)
def test_a_program_with_an_empty_cluster_of_its_own_is_told_how_to_join_another(
    monkeypatch: pytest.MonkeyPatch, running: tuple[str, ...], owns: bool, advised: bool
) -> None:
    """Tune starts a cluster if the program has not joined the one of `mbaas serve`."""
    monkeypatch.setattr(control.connection, "ensure_ray", lambda *, start: None)
    monkeypatch.setattr(control.connection, "owns_ray", lambda: owns)
    monkeypatch.setattr(control.actor_names, "find_coordinator", lambda name: None)
    monkeypatch.setattr(control.actor_names, "feed_names", lambda: list(running))
    with pytest.raises(FeedNotFoundError, match="no feed 'train' runs on this cluster") as raised:
        control.find("train")
    assert ('call ray.init("auto") first' in str(raised.value)) == advised
