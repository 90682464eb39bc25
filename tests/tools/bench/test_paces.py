"""The benchmark of trials with different paces runs as a command, with its own Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONS = ["--steps-ms", "5,20", "--trials", "1", "--epochs", "2", "--rounds", "1"]


@pytest.mark.long
def test_every_pace_is_set_against_data_that_is_always_ready() -> None:
    command = [sys.executable, "-m", "benchmarks", "paces", *OPTIONS, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [pace["step_s"] for pace in found["paces"]] == [0.005, 0.02]
    for pace in found["paces"]:
        assert 1.0 <= pace["epoch"] <= pace["longest_epoch"]
        assert pace["evaluation_s"] >= pace["ideal_evaluation_s"] == pytest.approx(288 / 32 * 0.1 * pace["step_s"])
    assert found["seconds"] >= found["ideal_s"] == pytest.approx(2 * (54 + 0.9) * 0.02)
    assert 0.4 <= found["prepared_per_delivered"] <= 1.1
