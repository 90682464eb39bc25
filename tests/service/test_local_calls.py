"""Consumers on the coordinator's machine call over a socket and others through Ray, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
from service_feeds import augmented

import mbaas
from mbaas.calls import client
from mbaas.calls import socket as local_socket
from mbaas.dataset import synthetic
from mbaas.tools.chaos.participants import kill
from support.processes import coordinator_pid
from support.trials import record_epoch

pytestmark = pytest.mark.usefixtures("ray_clean")

SAMPLES = 1003


@pytest.fixture
def through_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Descriptions of this process's calls for blocks through Ray."""
    made, answer = [], client.answer

    def count(ref: Any, timeout_s: float, what: str) -> Any:
        if "asks for blocks" in what:
            made.append(what)
        return answer(ref, timeout_s, what)

    monkeypatch.setattr(client, "answer", count)
    return made


def test_calls_of_this_machine_need_no_ray_and_bring_what_calls_through_ray_bring(
    feed_name: str, through_ray: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests() -> list[str]:
        data = synthetic(SAMPLES, height=32, width=32)
        options: dict[str, Any] = {"batch_size": 32, "prep_workers": 1, "staging_bytes": 4 << 20}
        with mbaas.serve(feed_name, data, augmented(), **options) as feed:
            with mbaas.join(feed.name, "me", format="numpy") as loader:
                records = [record_epoch(loader) for _ in range(3)]
        assert [record.flaws(range(SAMPLES)) for record in records] == [[]] * 3
        return [record.row_digest for record in records]

    def nobody(address: str, timeout_s: float) -> None:
        raise ConnectionRefusedError(address, timeout_s)

    over_socket = digests()
    assert len(through_ray) == 1, "the first answer tells of the socket"
    monkeypatch.setattr(local_socket, "connect", nobody)
    assert digests() == over_socket
    assert set(through_ray) == {"consumer 'me' asks for blocks"}


def test_after_a_restart_the_next_calls_go_to_the_new_coordinators_socket(
    feed_name: str, through_ray: list[str]
) -> None:
    data = synthetic(SAMPLES, height=32, width=32)
    with mbaas.serve(feed_name, data, augmented(), batch_size=32, prep_workers=1) as feed:
        with mbaas.join(feed.name, "me", format="numpy") as loader:
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
            kill(coordinator_pid(feed.name))
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
            met = len(through_ray)
            assert record_epoch(loader).flaws(range(SAMPLES)) == []
        assert met, "calls to the dead coordinator fall back to Ray"
        assert len(through_ray) == met
        assert feed.status().restarts == 1
