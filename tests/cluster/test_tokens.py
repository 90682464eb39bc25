"""Ray uses a user's token when it starts a cluster; mbaas uses it when it joins one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray_heads import ray_head

from mbaas.tools.chaos.nodes import address_kept_in
from mbaas.tools.chaos.runner import ChaosSettings, run


@pytest.mark.slow
def test_a_token_that_nobody_spoke_of_is_shown_to_the_cluster_that_wants_it() -> None:
    """`ray start` protects a cluster if its user has a token; `ray.init` alone would be refused for half a minute."""
    with ray_head(token="the-token-of-this-user-0123456789", says_mode=False) as head:
        done = head.run(sys.executable, "-m", "mbaas", "status")
        assert (done.returncode, done.stdout) == (0, "no feed runs on this cluster\n")
        for wrong in {}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "the-token-of-somebody-else-0123"}:
            refused = head.run(sys.executable, "-m", "mbaas", "status", HOME="/nowhere", **wrong)
            assert refused.returncode == 1
            # the complete output: no warning of Ray, which would repeat it each second
            assert re.fullmatch(
                r"error: cannot join the Ray cluster at \S+: it wants a token, and this program has none or another "
                r"one; a cluster with tokens wants RAY_AUTH_MODE=token, and its token in .*\n",
                refused.stdout,
            ), refused.stdout


@pytest.mark.slow
def test_without_a_token_where_one_is_wanted_the_command_says_so() -> None:
    """Ray would end the program without a message."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # something listens; whether it is Ray is checked later
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "HOME": "/nowhere", "RAY_ADDRESS": address}
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_TOKEN")}
        command = [sys.executable, "-m", "mbaas", "status"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: RAY_AUTH_MODE is token, and this program has no token; a cluster with tokens "
    )


ASK = """
import os, subprocess, sys
from pathlib import Path
without = {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "the-token-of-somebody-else-0123"}
with Path(sys.argv[1]).open("w") as told:
    for other in {}, *without:
        environment = {**os.environ, **other}
        if other in without[:1]:
            del environment["RAY_AUTH_TOKEN"]
        command = [sys.executable, "-m", "mbaas", "status"]
        subprocess.run(command, env=environment, stdout=told, stderr=told, timeout=60)
"""
"""Lists a cluster's feeds as one of its processes, without its token, and with a wrong token."""


def told_by(text: str) -> str:
    """The output of mbaas without Ray's own log lines, which occur without a network."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("["))


REFUSED = r"error: cannot join the Ray cluster at \S+: it wants a token, and this program has none or another one; .*\n"


@pytest.mark.slow
def test_the_cluster_of_chaos_wants_a_token_that_only_its_own_processes_know(no_ray: None, tmp_path: Path) -> None:
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    command = (sys.executable, "-c", ASK, str(tmp_path / "told"))
    report = run(ChaosSettings(faults=1, kinds=("kill-worker",), command=command), lambda _: None)
    assert report.command_code == 0
    told = told_by((tmp_path / "told").read_text())
    assert re.fullmatch(rf"no feed runs on this cluster\n({REFUSED}){{2}}", told), told
    assert {name: os.environ.get(name) for name in before} == before


START = """
import os, subprocess, sys
import ray
from mbaas.ray_cluster import connection
connection.start_own_ray()
own = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
for other in {}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "disabled", "HOME": "/nowhere"}:
    command = [sys.executable, "-m", "mbaas", "status"]
    subprocess.run(command, env={**own, **other}, stdout=sys.stdout, stderr=sys.stdout, timeout=60)
"""


@pytest.mark.slow
def test_a_ray_that_mbaas_starts_itself_wants_a_token_where_nobody_spoke_of_one() -> None:
    """The user's processes find the token where Ray wrote it; a program without it is refused."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    with tempfile.TemporaryDirectory(prefix="own", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", START],
            env={**environment, **address_kept_in(folder), "HOME": folder},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = told_by(done.stdout)
        assert re.fullmatch(rf"no feed runs on this cluster\n({REFUSED}){{2}}", told), told
        token = Path(folder) / ".ray" / "auth_token"
        assert token.read_text()
        assert oct(token.stat().st_mode & 0o777) == "0o600"
