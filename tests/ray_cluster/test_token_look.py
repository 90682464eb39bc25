"""A program that looks for a token still talks to a Ray without tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ray
from mbaas.ray_cluster import resources

print(resources.has_token())

@ray.remote(num_cpus=0)
class Answer:
    def word(self):
        return "answered"

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get(Answer.remote().word.remote(), timeout=60))
"""


@pytest.mark.slow
def test_looking_for_a_token_does_not_keep_it(tmp_path: Path) -> None:
    """Ray would keep it, and the program would refuse the calls of its own Ray, which has none."""
    token = tmp_path / "token"
    token.write_text("a-token-that-this-ray-does-not-want-0123")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": str(token)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["True", "answered"], done.stderr
