"""The benchmark of one trial with DALI runs on CPUs, and its figures add up."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import one_trial
from benchmarks.one_trial import STEPS, dali_row, engine_row, in_processes, table
from mbaas.tools.bench.rows import BenchSettings
from mbaas.tools.bench.runner import find_data
from mbaas.tools.bench.tasks.base import Data


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Data:
    settings = BenchSettings(samples=96, cache_dir=Path(tmp_path_factory.mktemp("photos")))
    return find_data(settings, lambda _: None)


@pytest.mark.slow
def test_the_engine_alone_says_how_its_time_divides(photos: Data) -> None:
    row = engine_row(photos, 1, 2, gpu=False, window_s=0.2)
    assert row.name == "engine, 1 worker, 2 in flight"
    assert row.per_s > 0
    assert row.cpu_s > 0
    assert set(row.notes) == {*STEPS}


@pytest.mark.slow
def test_dali_alone_has_a_rate_and_is_in_the_table(photos: Data) -> None:
    row = dali_row(photos, 1, gpu=False, window_s=0.2)
    assert row.per_s > 0
    text = io.StringIO()
    Console(file=text, width=120).print(table([row]))
    assert "DALI alone in the trial, 1 thread" in text.getvalue()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_command_runs_all_rows() -> None:
    command = [sys.executable, "-m", "benchmarks", "one-trial", "--images", "96", "--window", "0.2", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr
    rows = {row["name"]: row for row in json.loads(told.stdout)}
    assert len(rows) == 10
    assert min(row["per_s"] for row in rows.values()) > 0
    assert int(rows["feed, 1 worker, one trial"]["notes"]["samples in a block"]) in (64, 128)


def _fails(*_: object, **__: object) -> None:
    raise ValueError("on purpose")


def test_a_process_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="a process of the benchmark failed"):
        in_processes(1, _fails, window_s=0.0)


def _answers(begin: Any, results: Any, *, window_s: float) -> None:
    results.put(window_s)


def test_a_process_may_take_its_time_to_measure_in_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_trial, "ANSWER_S", 0.0)
    assert in_processes(1, _answers, window_s=60.0) == [60.0]
