"""All CPU seconds of a search are counted, by the table and by the command in a real run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time

import pytest
from rich.console import Console

from benchmarks.costs import WAYS, Cost, table
from benchmarks.searches import Search
from mbaas.tools.bench.cpu import Seen, TreeCpu

SPIN = "import time\nwhile time.process_time() < {s}: pass"


def test_what_nobody_waits_for_is_counted_when_it_has_ended_and_nothing_is_counted_twice() -> None:
    """Child 3 of worker 2 ends first and is then part of 2. Then 2 ends, and a fourth process has its id."""
    looks = iter(
        [
            [Seen(1, 0.0, 10.0, True), Seen(2, 0.0, 5.0, False)],
            [Seen(1, 0.0, 11.0, True), Seen(2, 0.0, 6.0, False), Seen(3, 1.0, 2.0, True)],
            [Seen(1, 0.0, 11.0, True), Seen(2, 0.0, 9.0, False)],  # 6, and 3 from its child
            [Seen(1, 0.0, 12.0, True)],
            [Seen(1, 0.0, 12.0, True), Seen(2, 7.0, 1.0, False)],
        ]
    )
    cpu = TreeCpu(lambda: next(looks))
    cpu._before_s = cpu._count()  # without the thread, so that looks come one by one
    assert [cpu.seconds() for _ in range(4)] == [1 + 1 + 2, 1 + 4, 2 + 4, 2 + 4 + 1]


def test_a_child_that_has_ended_is_counted() -> None:
    with TreeCpu() as cpu:
        subprocess.run([sys.executable, "-c", SPIN.format(s=0.4)], check=True)
        ended = cpu.seconds()
        began = time.process_time()
        while time.process_time() < began + 0.2:
            pass
        own = cpu.seconds() - ended
    assert 0.38 < ended < 1.5  # user and system time are measured in ticks of 10 ms
    assert 0.18 < own < 0.5


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
