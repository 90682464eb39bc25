"""The benchmark of the first minibatch runs as a command, with its own Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_the_first_minibatch_of_many_small_files_is_timed() -> None:
    command = [sys.executable, "-m", "benchmarks", "first", "--images", "3000", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["images"] == 3000
    assert found["block_samples"] % 256 == 0
    assert min(found[name] for name in ("listing_s", "again_s", "serving_s", "joining_s")) > 0
    assert found["longest_s"] == pytest.approx(found["serving_s"] + found["joining_s"])
