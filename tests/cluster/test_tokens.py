"""A user's own token, which Ray takes by itself when it starts a cluster, and mbaas when it joins one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest
from ray_heads import ray_head


@pytest.mark.slow
def test_a_token_that_nobody_spoke_of_is_shown_to_the_cluster_that_wants_it() -> None:
    """`ray start` protects a cluster if its user has a token; `ray.init` alone would be refused for half a minute."""
    with ray_head(token="the-token-of-this-user-0123456789", says_mode=False) as head:
        done = head.run(sys.executable, "-m", "mbaas", "status")
        assert (done.returncode, done.stdout) == (0, "no feed runs on this cluster\n")
        for wrong in {}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "the-token-of-somebody-else-0123"}:
            refused = head.run(sys.executable, "-m", "mbaas", "status", HOME="/nowhere", **wrong)
            assert refused.returncode == 1
            # all that is written: no warning of Ray's, which it would repeat each second
            assert re.fullmatch(
                r"error: cannot join the Ray cluster at \S+: it wants a token, and this program has none or another "
                r"one; a cluster with tokens wants RAY_AUTH_MODE=token, and its token in .*\n",
                refused.stdout,
            ), refused.stdout


def test_without_a_token_where_one_is_wanted_the_command_says_so() -> None:
    """Ray would end the program without a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # somebody is there; whether it is Ray is not asked first
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "HOME": "/nowhere", "RAY_ADDRESS": address}
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_TOKEN")}
        command = [sys.executable, "-m", "mbaas", "status"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: RAY_AUTH_MODE is token, and this program has no token; a cluster with tokens "
    )
