"""CPU seconds and memory are those of all descendants, and CPU seconds also of those that have ended."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mbaas.tools.bench.cpu import CpuReading, Seen, TreeCpu

SPIN = "import time\nwhile time.process_time() < {s}: pass"

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


@pytest.mark.slow
def test_a_busy_child_is_seen() -> None:
    # In a separate process: this one may have Ray clusters of other tests below it, and their memory varies.
    subprocess.run([sys.executable, "-c", LOOK], check=True, timeout=60.0)


def test_cores_by_kind_count_processes_that_came_later() -> None:
    first = CpuReading(10.0, {(1, "trial"): 5.0, (2, "trial"): 1.0, (9, "raylet"): 7.0})
    later = CpuReading(12.0, {(1, "trial"): 6.0, (2, "trial"): 2.0, (9, "raylet"): 7.5, (11, "trial"): 1.0})
    assert first.cores_until(later) == {"trial": pytest.approx(1.5), "raylet": pytest.approx(0.25)}
    assert list(first.cores_until(later)) == ["trial", "raylet"]


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


@pytest.mark.slow
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
