"""The benchmark of a trial that never waits runs as a command, with its own Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "benchmarks", "ready", "--batch", "8", "--rounds", "2", "--images", "16"]


def measure_ready(*options, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.long
def test_both_formats_are_measured():
    done = measure_ready("--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(r["array"], r["batch"], len(r["losses"])) for r in results] == [("numpy", 8, 2), ("torch", 8, 2)]
    for result in results:
        assert result["step_s"] > 0.02
        assert min(result["losses"]) <= result["loss"] <= max(result["losses"])
        assert -0.5 < result["loss"] < 10.0


@pytest.mark.slow
def test_a_path_that_is_too_long_for_sockets_is_one_sentence(tmp_path):
    done = measure_ready(RAY_TMPDIR=str(tmp_path / ("long" * 25)))
    assert done.returncode == 1
    assert "Ray could not be started on this machine" in done.stderr
    assert "RAY_TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr
