"""A row of the benchmark: what it is, what one run of it showed, and how to run it in a process of its own.

Everything that a row costs hangs below that process, the host, so its CPU seconds and memory can be counted, and
nothing of a row is left when the next begins.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO

import psutil

from mbaas.bench.source import TrialSpec
from mbaas.bench.trial import Window


@dataclass(frozen=True)
class RowSpec:
    """A row to run:

    ``trials`` processes that each open ``trial`` (its number replaced) and take minibatches for ``window``.
    """

    trial: TrialSpec
    trials: int
    window: Window
    timeout_s: float


@dataclass(frozen=True)
class RowRun:
    """What one run of a row showed.

    Attributes:
        row, trials, batch: which row; for "prep", trials are the processes of P.
        samples_per_s: delivered, summed over trials, each in its own window.
        cores_by_kind: CPU seconds a second by kind of process (see `mbaas.bench.cpu.kind_of`), busiest first, while
            all trials were in their windows.
        trial_us: CPU microseconds of a trial's own process a sample.
        peak_bytes: largest sum of PSS.
        spilled_bytes: that Ray wrote to disk because its object store was full.
        epochs, missing, repeated: see `TrialResult`; summed over trials.
        error: why the row has no result, or "".
    """

    row: str
    trials: int
    batch: int
    samples_per_s: float = 0.0
    cores_by_kind: tuple[tuple[str, float], ...] = ()
    trial_us: float = 0.0
    peak_bytes: int = 0
    spilled_bytes: int = 0
    epochs: int = 0
    missing: int = 0
    repeated: int = 0
    error: str = ""

    @property
    def busy_cores(self) -> float:
        """CPU seconds a second of all processes of the row."""
        return sum(cores for _, cores in self.cores_by_kind)

    @property
    def cpu_s_per_1000(self) -> float:
        """CPU seconds of the whole tree for 1,000 delivered samples."""
        return 1000 * self.busy_cores / self.samples_per_s


def run_row(spec: RowSpec) -> RowRun:
    """Run a row in a process of its own.

    A row that fails or takes too long is a `RowRun` with an error, never an exception.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as results, tempfile.TemporaryFile() as log:
        host = subprocess.Popen(
            [sys.executable, "-m", "mbaas.bench.host", str(writing)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            host.communicate(pickle.dumps(spec), timeout=spec.timeout_s)
            return pickle.load(results)
        except subprocess.TimeoutExpired:
            return failed(spec, f"took longer than timeout_s = {spec.timeout_s:g} s\n{_tail(log)}")
        except EOFError:
            return failed(spec, f"its process ended with exit code {host.returncode}\n{_tail(log)}")
        finally:
            if host.poll() is None:
                kill_tree(host.pid)
                host.wait()


def failed(spec: RowSpec, error: str) -> RowRun:
    """A run without a result, and why."""
    return RowRun(spec.trial.row, spec.trials, spec.trial.batch, error=error)


def _tail(log: IO[bytes], size: int = 4000) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - size))
    return log.read().decode(errors="replace")


def kill_tree(pid: int) -> None:
    """Kill a process, if it still runs, and all below it.

    The resource tracker of multiprocessing is left: it ends when the others have, and cleans up after them.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in part for part in process.cmdline()):
                    process.kill()
