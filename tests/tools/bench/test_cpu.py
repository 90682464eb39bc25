"""The watch measures descendants of this process too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mbaas.tools.bench.cpu import CpuReading

CHILD = "held = bytearray(200 << 20)\nprint('ready', flush=True)\nwhile True: pass"

LOOK = f"""
import subprocess, sys, time
from mbaas.tools.bench.cpu import TreeWatch, memory_bytes

before, deadline = memory_bytes(), time.monotonic() + 30.0
with TreeWatch(interval_s=0.01) as watch:
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        began = watch.cpu()
        while watch.peak_bytes < before + (190 << 20):
            assert time.monotonic() < deadline, "the child's memory was not seen"
            time.sleep(0.01)
        while True:
            seen = watch.cpu()
            used = {{pid: s for (pid, _), s in seen.cpu_s.items()}}
            if used[child.pid] - {{pid: s for (pid, _), s in began.cpu_s.items()}}.get(child.pid, 0.0) >= 0.02:
                break
            assert time.monotonic() < deadline, "the child's CPU seconds were not seen"
        assert sum(began.cores_until(seen).values()) > 0
    finally:
        child.kill()
"""


def test_a_busy_child_is_seen() -> None:
    # In a separate process: this one may have Ray clusters of other tests below it, and their memory varies.
    subprocess.run([sys.executable, "-c", LOOK], check=True, timeout=60.0)


def test_cores_by_kind_count_processes_that_came_later() -> None:
    first = CpuReading(10.0, {(1, "trial"): 5.0, (2, "trial"): 1.0, (9, "raylet"): 7.0})
    later = CpuReading(12.0, {(1, "trial"): 6.0, (2, "trial"): 2.0, (9, "raylet"): 7.5, (11, "trial"): 1.0})
    assert first.cores_until(later) == {"trial": pytest.approx(1.5), "raylet": pytest.approx(0.25)}
    assert list(first.cores_until(later)) == ["trial", "raylet"]
