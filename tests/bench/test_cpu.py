"""The watch sees what happens below this process, not only in it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mbaas.bench.cpu import CpuReading, TreeWatch, memory_bytes

BUSY = "import time\nheld = bytearray(200 << 20)\nprint('ready', flush=True)\nwhile True: pass"


def test_a_busy_child_is_seen() -> None:
    before = memory_bytes()
    with TreeWatch(interval_s=0.01) as watch:
        child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            child.stdout.readline()
            began = watch.cpu()
            deadline = time.monotonic() + 30.0
            while child.pid not in {pid for pid, _ in watch.cpu().cpu_s} or watch.peak_bytes < before + (190 << 20):
                assert time.monotonic() < deadline, "the child's memory was not seen"
                time.sleep(0.01)
            while sum(began.cores_until(watch.cpu()).values()) <= 0 or not _ran(began, watch, child.pid):
                assert time.monotonic() < deadline, "the child's CPU seconds were not seen"
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _ran(began: CpuReading, watch: TreeWatch, pid: int) -> bool:
    used = {key[0]: seconds for key, seconds in watch.cpu().cpu_s.items()}
    return used[pid] - {key[0]: s for key, s in began.cpu_s.items()}.get(pid, 0.0) >= 0.02


def test_cores_by_kind_count_processes_that_came_later() -> None:
    first = CpuReading(10.0, {(1, "trial"): 5.0, (2, "trial"): 1.0, (9, "raylet"): 7.0})
    later = CpuReading(12.0, {(1, "trial"): 6.0, (2, "trial"): 2.0, (9, "raylet"): 7.5, (11, "trial"): 1.0})
    assert first.cores_until(later) == {"trial": pytest.approx(1.5), "raylet": pytest.approx(0.25)}
    assert list(first.cores_until(later)) == ["trial", "raylet"]
