"""The benchmark of searches runs as a command, with its own Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.searches import Run, Span, least_prepared


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_by_a_scheduler_is_measured_in_each_way_to_get_minibatches() -> None:
    options = ["--schedulers", "ASHA", "--trials", "3", "--slots", "2", "--step-ms", "5", "--json"]
    command = [sys.executable, "-m", "benchmarks", "searches", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["way"] for each in found] == ["epoch", "now", "dataloader"]
    for each in found:
        assert each["scheduler"] == "ASHA"
        assert 3 <= each["epochs"] <= 27
        assert 0 < each["waited"] < 1
        assert each["waited_s"] > 0
        assert each["seconds"] > each["first_batch_s"] > 0
        assert 0.5 <= each["train_least"] <= 1, "two run at a time"
    *shared, alone = found
    assert alone["train_prepared"] == alone["validation_prepared"] == 1
    for each in shared:
        assert 0 < each["train_prepared"] <= 1.2
        assert 0 < each["validation_prepared"] < 1


@pytest.mark.slow
def test_a_scheduler_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks", "searches", "--schedulers", "ASHA,Hyperband"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "must be of FIFO, ASHA, HyperBand, PBT, got Hyperband" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_way_to_begin_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks", "searches", "--starts", "later"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "must be of epoch, now, dataloader, got later" in " ".join(done.stderr.split())


def ran(began: float, ended: float, *epochs: tuple[float, float]) -> Run:
    return Run(Span(began, ended), tuple(Span(*epoch) for epoch in epochs), waited_s=0.0, first_batch_s=0.0)


def test_the_least_to_prepare_is_an_epoch_for_each_that_runs_alone_and_one_for_all_that_run_together() -> None:
    assert least_prepared([ran(0, 10, (0, 10))]) == 1
    assert least_prepared([ran(0, 10, (0, 10)), ran(20, 30, (20, 30))]) == 2
    assert least_prepared([ran(0, 10, (0, 10))] * 4) == pytest.approx(1)


def test_trials_that_overlap_share_what_they_run_together() -> None:
    """Half of the first epoch alone, then both halves together, then half of the second alone: 0.5 + 1 / 2 + 0.5."""
    assert least_prepared([ran(0, 10, (0, 10)), ran(5, 15, (5, 15))]) == pytest.approx(1.5)


def test_a_trial_that_evaluates_counts_as_one_that_runs() -> None:
    """In the first half two trials run and one trains: 0.5 / 2. In the second half it is alone: 0.5."""
    assert least_prepared([ran(0, 10, (0, 10)), ran(0, 5)]) == pytest.approx(0.75)
