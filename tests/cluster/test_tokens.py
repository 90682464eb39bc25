"""A user's own token, which Ray takes by itself when it starts a cluster, and mbaas when it joins one."""

from __future__ import annotations

import sys

import pytest
from ray_heads import ray_head


@pytest.mark.slow
def test_a_token_that_nobody_spoke_of_is_shown_to_the_cluster_that_wants_it() -> None:
    """`ray start` protects a cluster if its user has a token; `ray.init` alone would be refused for half a minute."""
    with ray_head(token="the-token-of-this-user-0123456789", says_mode=False) as head:
        done = head.run(sys.executable, "-m", "mbaas", "status")
        assert (done.returncode, done.stdout) == (0, "no feed runs on this cluster\n")
        refused = head.run(sys.executable, "-m", "mbaas", "status", HOME="/nowhere")
        assert refused.returncode == 1
        assert refused.stdout.splitlines()[-1].startswith("error: cannot join the Ray cluster")
