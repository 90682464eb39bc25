"""The benchmark of searches, by its command: it starts a Ray of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_search_by_a_scheduler_is_measured() -> None:
    options = ["--schedulers", "ASHA", "--trials", "3", "--slots", "2", "--step-ms", "5", "--json"]
    command = [sys.executable, "-m", "benchmarks", "searches", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["scheduler"] == "ASHA"
    assert 3 <= found["epochs"] <= 27
    assert 0 < found["waited"] < 1
    assert found["train_prepared"] > 0
    assert found["validation_prepared"] > 0


def test_a_scheduler_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks", "searches", "--schedulers", "ASHA,Hyperband"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "must be of FIFO, ASHA, HyperBand, PBT, got Hyperband" in " ".join(done.stderr.split())
