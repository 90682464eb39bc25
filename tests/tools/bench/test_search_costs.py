"""The costs of a search, in the table and by the command in a real run."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from benchmarks.costs import WAYS, Cost, table
from benchmarks.searches import Search


def searched(way: str) -> Search:
    return Search("ASHA", "now", 1234, 4321.0, 2_345_678, 1_234_567, 0.33, 0.3, 0.01, 100.0, 0.5, 1.0)


def test_the_table_is_whole_in_80_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table([Cost(way, searched(way), 36_000.0) for way in WAYS]))
    assert "…" not in out.getvalue()
    row = out.getvalue().splitlines()[4].split()
    assert row == ["DataLoader", "1234", "4321", "3.50", "36000", "29.17", "1,234,567", "50%"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_is_measured_in_each_way() -> None:
    options = ["--images", "100", "--trials", "3", "--slots", "2", "--step-ms", "5", "--rounds", "1", "--json"]
    command = [sys.executable, "-m", "benchmarks", "costs", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["way"] for each in found] == list(WAYS)
    for each in found:
        assert 3 <= each["epochs"] <= 27
        assert each["seconds"] > 0
        assert each["cpu_s"] > 1
        assert each["delivered"] >= each["epochs"] * (100 + 12)
    alone, *shared = found
    assert alone["prepared"] == alone["delivered"] == alone["epochs"] * (100 + 12)
    for each in shared:
        assert 0 < each["prepared"] < each["delivered"]
