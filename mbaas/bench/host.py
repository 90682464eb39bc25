"""A row of the benchmark, run in a process of its own: the host.

The host serves what a row needs served, starts its trials and watches all of it. Everything that a row costs hangs
below it, so its CPU seconds and memory can be counted, and nothing of a row is left when the next begins.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

import psutil

from mbaas.bench.cpu import TreeWatch
from mbaas.bench.rows import TrialSpec, open_service
from mbaas.bench.trial import Failed, Gate, Message, TrialResult, Warm, Window, run_trial
from mbaas.units import seconds

HOST = "from mbaas.bench.host import main; main()"
"""The host's program. ``-m`` would have this module twice in that process, and each would pickle classes of its own."""

STOP_S = 30.0
"""How long a trial may take to close before it is killed."""


@dataclass(frozen=True)
class RowSpec:
    """A row to run: ``trials`` processes that each open ``trial``, its number replaced, and take minibatches.

    Attributes:
        trial: what each of them opens.
        trials: how many there are.
        window: how long each is measured.
        timeout_s: the row is given up after this long.
        python: the interpreter that runs it, which must have mbaas and what the row needs.
    """

    trial: TrialSpec
    trials: int
    window: Window
    timeout_s: float
    python: str = sys.executable


@dataclass(frozen=True)
class RowRun:
    """What one run of a row showed.

    Attributes:
        row, trials, batch: which row it is; for "prep", trials are the processes of P.
        samples_per_s: delivered samples, summed over trials, each in its own window.
        cores_by_kind: CPU seconds a second by kind of process (see `mbaas.bench.cpu.kind_of`), busiest first, while
            all trials were in their windows.
        trial_us: CPU microseconds of a trial's own process for a sample.
        peak_bytes: the largest sum of PSS.
        spilled_bytes: what Ray wrote to disk because its object store was full.
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
    # a pipe of its own, because libraries write to stdout what is not a result
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as results, tempfile.TemporaryFile() as log, _own_temporary_files() as environment:
        host = subprocess.Popen(
            [spec.python, "-c", HOST, str(writing)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
            env=environment,
        )
        os.close(writing)  # the host has the only other copy: if it dies, reading ends instead of waiting
        try:
            assert host.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once; why, its log says
                host.stdin.write(pickle.dumps(spec))
                host.stdin.flush()
            host.wait(spec.timeout_s)  # its stdin stays open: when it is closed, the host ends
            return pickle.load(results)
        except subprocess.TimeoutExpired:
            return failed(
                spec, f"took longer than {seconds(spec.timeout_s)}, the most that a row may take\n{_tail(log)}"
            )
        except EOFError:
            return failed(spec, f"its process ended with exit code {host.returncode}\n{_tail(log)}")
        finally:
            if host.poll() is None:
                kill_tree(host.pid)
                host.wait()
            assert host.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                host.stdin.close()


@contextmanager
def _own_temporary_files() -> Iterator[dict[str, str]]:
    """Make a folder for the temporary files of all processes of a row, so that none is left when they are killed.

    Yield their environment. Ray's logs stay where they always are: paths of its sockets may not become longer.
    """
    usual = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="mbaas-", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": usual, **os.environ, "TMPDIR": folder}


def failed(spec: RowSpec, error: str) -> RowRun:
    """Make the run of a row that has no result, and say why."""
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


# ---- in the host ----


def main() -> None:
    """Be the host: read a pickled `RowSpec` on standard input, write a pickled `RowRun` to the descriptor in argv."""
    spec: RowSpec = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="mbaas-end-with-parent", daemon=True).start()
    try:
        run = measure(spec)
    except Exception:  # of any library that a row uses: it goes into the report, and other rows go on
        run = failed(spec, traceback.format_exc())
    with os.fdopen(int(sys.argv[1]), "wb") as results:
        pickle.dump(run, results)


def _end_with_parent() -> None:
    """End this process and all below it when the one that started it has ended, however that came: it closes stdin."""
    # By the descriptor: a thread that waits in a file of Python's holds its lock, and Python could not end.
    while os.read(0, 4096):
        pass
    end_host()


def end_host() -> NoReturn:
    """End this process and all below it, from any thread; for whoever runs the row the host has then failed."""
    for child in psutil.Process().children():
        kill_tree(child.pid)
    os._exit(1)


def measure(spec: RowSpec) -> RowRun:
    """Run a row below this process."""
    with open_service(spec.trial, spec.trials) as service, TreeWatch() as watch:
        trial = replace(spec.trial, address=service.address) if service is not None else spec.trial
        with _tasks(spec, trial) as (connections, gate):
            results, cores = _collect(connections, watch)
            gate.stop.set()
        spilled_bytes = service.spilled_bytes() if service is not None else 0
        return _summary(spec, results, cores, watch.peak_bytes, spilled_bytes)


@contextmanager
def _tasks(spec: RowSpec, trial: TrialSpec) -> Iterator[tuple[list[Connection[Any, Message]], Gate]]:
    """Start the trials; at the end they are waited for, and killed if they do not stop."""
    context = mp.get_context("spawn")  # a fork of a process with threads, as a server of Ray has, may hang
    gate = Gate(context.Barrier(spec.trials), context.Event())
    connections, processes = [], []
    for index in range(spec.trials):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_trial, args=(replace(trial, trial=index), spec.window, gate, theirs))
        process.start()
        theirs.close()  # so that the trial's end closes the connection, and `_received` hears of it
        connections.append(ours)
        processes.append(process)
    try:
        yield connections, gate
        for process in processes:
            process.join(STOP_S)
    finally:
        for process in processes:
            if process.pid is not None:
                kill_tree(process.pid)
            process.join()


def _collect(
    connections: Sequence[Connection[Any, Message]], watch: TreeWatch
) -> tuple[list[TrialResult], dict[str, float]]:
    """Wait for the results of all trials; also return the cores kept busy, by kind of process, meanwhile.

    These are measured from the last `Warm` to the last `TrialResult`: all trials are at work then, those that have
    finished too.
    """
    results: list[TrialResult] = []
    warm, open_ones = 0, list(connections)
    began = watch.cpu()
    while open_ones:
        for ready in wait(open_ones):
            connection: Any = ready
            message = _received(connection)
            if isinstance(message, TrialResult):
                results.append(message)
                open_ones.remove(connection)
                continue
            warm += 1
            if warm == len(connections):
                began = watch.cpu()
    return results, began.cores_until(watch.cpu())


def _received(connection: Connection[Any, Message]) -> Warm | TrialResult:
    try:
        message = connection.recv()
    except EOFError:
        raise RuntimeError("a trial's process ended without a word") from None
    if isinstance(message, Failed):
        raise RuntimeError(message.reason)
    return message


def _summary(
    spec: RowSpec, results: Sequence[TrialResult], cores: dict[str, float], peak_bytes: int, spilled_bytes: int
) -> RowRun:
    return RowRun(
        spec.trial.row,
        spec.trials,
        spec.trial.batch,
        samples_per_s=sum(result.samples / result.seconds for result in results),
        cores_by_kind=tuple(cores.items()),
        trial_us=1e6 * sum(result.cpu_s for result in results) / sum(result.samples for result in results),
        peak_bytes=peak_bytes,
        spilled_bytes=spilled_bytes,
        epochs=sum(result.epochs for result in results),
        missing=sum(result.missing for result in results),
        repeated=sum(result.repeated for result in results),
    )
