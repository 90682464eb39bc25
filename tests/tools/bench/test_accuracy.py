"""The benchmark of accuracy runs as a command, with its own Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.console import Console

from benchmarks.accuracy import Accuracy, table


@pytest.mark.long
@pytest.mark.timeout(300)
def test_searches_that_begin_either_way_find_something_out() -> None:
    options = ["--seeds", "2", "--trials", "5", "--epochs", "2", "--json"]
    command = [sys.executable, "-m", "benchmarks", "accuracy", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    epoch, now = json.loads(done.stdout)
    assert (epoch["start"], now["start"]) == ("epoch", "now")
    for each in (epoch, now):
        assert len(each["best"]) == len(each["early"]) == 2
        assert all(0.5 < early <= best <= 1 for early, best in zip(each["early"], each["best"], strict=True))
    # with "epoch" too, a trial that evaluates for long may continue in the middle of an epoch
    assert all(0 <= share <= 1 for share in epoch["out_of_phase"] + now["out_of_phase"])
    assert sum(now["out_of_phase"]) > 0, "the fifth trial begins while others train"


def test_what_seeds_differ_in_is_told_by_pairs() -> None:
    """The means 0.9 and 0.89 differ less than the seeds do, but each seed lost 1 %."""
    epoch = Accuracy("epoch", best=(0.85, 0.95), early=(0.5, 0.7), out_of_phase=(0.0, 0.0))
    now = Accuracy("now", best=(0.84, 0.94), early=(0.52, 0.72), out_of_phase=(0.5, 0.5))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table([epoch, now]))
    text = " ".join(capture.get().split())
    assert "epoch 90.00 ± 7.07 60.00 ± 14.14 0.00 ± 0.00" in text
    assert "now less epoch, by seed: best -1.00 ± 0.00, all +2.00 ± 0.00" in text
