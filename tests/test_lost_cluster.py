"""What a program says of a Ray cluster that has ended under it: its own, or one that it joined."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mbaas import runtime


def connected(monkeypatch: pytest.MonkeyPatch, *, address: str = "", head: Any = None) -> None:
    """As if this program were connected to a cluster: its own if there is a head, else one that it joined."""
    context = SimpleNamespace(gcs_address=address)
    stands_for_ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(runtime, "ray", stands_for_ray)
    monkeypatch.setattr(runtime, "_own_head", lambda: head)


def test_a_program_that_is_connected_to_no_cluster_has_lost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert runtime.lost_cluster() is None


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_cluster_that_was_joined_has_ended_when_nobody_listens_at_its_port(
    monkeypatch: pytest.MonkeyPatch, host: str, shown: str
) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        gcs = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    with gcs:
        address = f"{shown}:{gcs.getsockname()[1]}"
        connected(monkeypatch, address=address)
        assert runtime.lost_cluster() is None
    assert (
        runtime.lost_cluster()
        == f"the Ray cluster at {address}, which this program joined and did not start, has ended"
    )


def test_a_cluster_that_this_program_started_has_ended_with_its_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever listens at its address: a program that owns the processes asks these."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as gcs:
        head = SimpleNamespace(all_processes={"gcs_server": [SimpleNamespace(process=gcs)]})
        connected(monkeypatch, address="127.0.0.1:1", head=head)
        assert runtime.lost_cluster() is None
        gcs.kill()
        gcs.wait()
        assert runtime.lost_cluster() == "the Ray cluster that this program started has ended"
