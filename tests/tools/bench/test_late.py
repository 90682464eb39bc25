"""The benchmark of trials that start late runs as a command, with its own Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONS = ["--trials", "3", "--epochs", "2", "--step-ms", "10", "--rounds", "1"]


@pytest.mark.long
def test_who_begins_at_once_waits_less_and_no_more_is_prepared() -> None:
    command = [sys.executable, "-m", "benchmarks", "late", *OPTIONS, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    epoch, now = json.loads(done.stdout)
    assert (epoch["start"], now["start"]) == ("epoch", "now")
    assert now["first_batch_s"] < epoch["first_batch_s"]
    assert now["prepared_per_delivered"] <= epoch["prepared_per_delivered"] * 1.1
    for each in (epoch, now):
        assert each["first_batch_s"] <= each["longest_first_batch_s"]
        assert 1 / 3 <= each["prepared_per_delivered"] <= 1
        assert each["trial_s"] >= each["ideal_s"] == pytest.approx(2 * 4096 / 32 * 0.01)
