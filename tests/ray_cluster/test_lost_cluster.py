"""A program reports that its Ray cluster has ended, whether it started or joined the cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mbaas.ray_cluster import connection


def connected(monkeypatch: pytest.MonkeyPatch, *, address: str = "", head: Any = None) -> None:
    """Pretend to be connected to a cluster: this program's own if ``head`` is given, otherwise a joined one."""
    context = SimpleNamespace(gcs_address=address)
    stands_for_ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setattr(connection, "ray", stands_for_ray)
    monkeypatch.setattr(connection, "_own_head", lambda: head)


def test_a_program_that_is_connected_to_no_cluster_has_lost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert connection.lost_cluster() is None


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
        assert connection.lost_cluster() is None
    assert (
        connection.lost_cluster()
        == f"the Ray cluster at {address}, which this program joined and did not start, has ended"
    )


STATED = """
import sys
import mbaas
try:
    mbaas.join("train", "me")
except mbaas.MbaasError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("left_in", ["RAY_ADDRESS", "file"])
def test_an_address_that_a_cluster_left_is_found_out_at_once(tmp_path: Path, left_in: str) -> None:
    """Ray itself would try to connect for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = str(tmp_path)
    (tmp_path / "ray").mkdir()
    if left_in == "file":
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        # Ray also finds a cluster by its processes, and another test may run one.
        wanted = ("no Ray cluster is running here; start one with `ray start --head`", "no feed 'train' runs on this")
    else:
        environment["RAY_ADDRESS"] = address
        wanted = (f"at RAY_ADDRESS={address} does not answer: nothing listens at {address}; unset RAY_ADDRESS if",)
    command = [sys.executable, "-c", STATED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 1
    assert any(sentence in done.stderr for sentence in wanted)


def test_a_cluster_that_this_program_started_has_ended_with_its_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regardless of listeners at its address: the program checks the processes that it started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as gcs:
        head = SimpleNamespace(all_processes={"gcs_server": [SimpleNamespace(process=gcs)]})
        connected(monkeypatch, address="127.0.0.1:1", head=head)
        assert connection.lost_cluster() is None
        gcs.kill()
        gcs.wait()
        assert connection.lost_cluster() == "the Ray cluster that this program started has ended"


@pytest.mark.parametrize(
    ("began", "command", "named"),
    [
        ("2999-01-01_00-00-00_000000", ["python", "search.py"], True),
        ("2999-01-01_00-00-00_000000", ["python", "/bin/ray", "start", "--head", "--block"], False),
        ("2001-01-01_00-00-00_000000", ["python", "search.py"], False),  # a later process with the pid of `ray start`
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_the_program_that_a_joined_cluster_ends_with_is_named(
    monkeypatch: pytest.MonkeyPatch, began: str, command: list[str], named: bool, here: bool
) -> None:
    node = SimpleNamespace(session_name=f"session_{began}_{os.getpid()}")
    stands_for_ray = SimpleNamespace(
        _private=SimpleNamespace(worker=SimpleNamespace(_global_node=node)),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1" if here else "10.0.0.2"),
    )
    monkeypatch.setattr(connection, "ray", stands_for_ray)
    monkeypatch.setattr(connection.psutil.Process, "cmdline", lambda self: command)
    wanted = f"process {os.getpid()} (python search.py)" if named and here else None
    assert connection._starter() == wanted
    node.session_name = "another-form"  # of another version of Ray
    assert connection._starter() is None
