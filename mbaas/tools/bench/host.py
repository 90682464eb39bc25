"""Runs one row of the benchmark in its own process, the host, with its trials.

The host starts the row's service and trials, and watches them. All processes of a row are its descendants, so their
costs can be measured, and none is left when the next row begins.

A trial, the consumer of all rows, takes minibatches and reads their arrays. It warms up for whole epochs, for the
length of its window. The window follows without a pause, so that no row starts it with a full buffer. Then the trial
continues, unmeasured, until all other trials have finished; otherwise the last trials would have the machine to
themselves.
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
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier, Event
from typing import IO, Any, NoReturn

import numpy as np
import psutil
from numpy.typing import NDArray

from mbaas.base.units import seconds
from mbaas.tools.bench.cpu import TreeWatch
from mbaas.tools.bench.rows import BenchSettings, Epoch, Minibatch, RowSpec, open_loader, open_service, spilled_bytes

PAGE_BYTES = 4096


@dataclass(frozen=True)
class WarmedUp:
    """A trial has finished its warm-up."""


@dataclass(frozen=True)
class TrialFailure:
    """A trial has failed; ``reason`` is its traceback."""

    reason: str


@dataclass(frozen=True)
class TrialResult:
    """Measurements of a trial.

    Attributes:
        samples: samples taken in the window.
        seconds: length of the window.
        cpu_s: CPU seconds of the trial's process in the window, including threads, but not worker processes.
        epochs: epochs checked for missing and repeated samples, including the warm-up.
        missing: samples absent from an epoch, summed over epochs.
        repeated: deliveries of a sample after the first in an epoch, summed over epochs.
    """

    samples: int
    seconds: float
    cpu_s: float
    epochs: int
    missing: int
    repeated: int


Message = WarmedUp | TrialFailure | TrialResult


@dataclass(frozen=True)
class Gate:
    """Synchronizes the start and stop of trials."""

    start: Barrier
    stop: Event


class Ledger:
    """Counts deliveries; not `mbaas.client.ledger`, because a benchmark must not check mbaas by mbaas.

    ``use`` is called with every array.
    """

    def __init__(self, samples: int, use: Callable[[Any], int] | None = None) -> None:
        self.epochs = self.missing = self.repeated = 0
        self._counts, self._use = np.zeros(samples, np.int64), use or touch

    def take(self, minibatches: Iterator[Minibatch]) -> int:
        """Use and count all minibatches; return the number of samples."""
        samples = 0
        for values, sample_ids in minibatches:
            for array in values:
                self._use(array)
            self.add(sample_ids)
            samples += len(sample_ids)
            del values, array, sample_ids  # holding a minibatch while taking the next one occupies staging
        return samples

    def add(self, sample_ids: NDArray[np.int64]) -> None:
        np.add.at(self._counts, sample_ids, 1)  # not `+= 1`, which would count a repeated id once

    def close_epoch(self) -> None:
        self.epochs += 1
        self.missing += int((self._counts == 0).sum())
        self.repeated += int(np.maximum(self._counts - 1, 0).sum())
        self._counts[:] = 0


def touch(array: NDArray[Any]) -> int:
    """Return the sum of one byte per page, read like a trial that uses its data; ValueError unless in C order."""
    if not array.flags.c_contiguous:
        raise ValueError("a row must deliver its arrays in C order")
    return int(array.reshape(-1).view(np.uint8)[::PAGE_BYTES].sum())


def read(array: NDArray[Any]) -> int:
    """Read every byte, like a trial that computes with all of its data; return the largest."""
    return int(array.reshape(-1).view(np.uint8).max(initial=0))


def touch_on_gpu(tensor: Any) -> int:
    """Wait for the GPU."""
    return int(tensor.reshape(-1)[::PAGE_BYTES].sum())


def read_on_gpu(tensor: Any) -> int:
    """Wait for the GPU."""
    return int(tensor.max())


def run_trial(spec: RowSpec, gate: Gate, host: Any) -> None:
    """Run a trial in its process; send `WarmedUp` and then `TrialResult`, or `TrialFailure`, to ``host``."""
    connection: Connection[Message, None] = host
    try:
        on_host, on_gpu = (read, read_on_gpu) if spec.settings.read == "all" else (touch, touch_on_gpu)
        with open_loader(spec) as epoch:
            ledger = Ledger(len(spec.samples().files), on_gpu if spec.settings.gpu else on_host)
            consume(epoch, ledger, spec.settings, gate, connection)
    except Exception:  # from any library: without a message, the host would wait
        connection.send(TrialFailure(f"trial {spec.trial}: {traceback.format_exc()}"))


def consume(epoch: Epoch, ledger: Ledger, window: BenchSettings, gate: Gate, host: Connection[Message, None]) -> None:
    """Warm up, measure, and continue until all other trials are done."""
    gate.start.wait()  # together: a single trial would warm up with the machine to itself
    _measure(epoch, ledger, window)
    host.send(WarmedUp())
    host.send(_measure(epoch, ledger, window))
    while not gate.stop.is_set():
        ledger.take(_until(gate.stop, epoch()))


def _measure(epoch: Epoch, ledger: Ledger, window: BenchSettings) -> TrialResult:
    samples = epochs = 0
    began, began_cpu = time.monotonic(), time.process_time()
    # whole epochs, so that the cost between two epochs is included, and every epoch is checked
    while not window.is_over(epochs, time.monotonic() - began):
        samples += ledger.take(epoch())
        ledger.close_epoch()
        epochs += 1
    seconds, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    return TrialResult(samples, seconds, cpu_s, ledger.epochs, ledger.missing, ledger.repeated)


def _until(stop: Event, minibatches: Iterator[Any]) -> Iterator[Any]:
    for minibatch in minibatches:
        yield minibatch
        del minibatch
        if stop.is_set():
            return


HOST = "from mbaas.tools.bench.host import main; main()"
"""Program of the host. With ``-m`` this module would exist twice there, and its classes would not unpickle."""

STOP_S = 30.0
"""Seconds that a trial may take to close before it is killed."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a row, from one run or several.

    Attributes:
        row, trials, batch: the row; for "prep", trials is the number of P's processes.
        samples_per_s: delivered samples, summed over trials, each in its own window.
        cores_by_kind: busy cores by kind of process (see `mbaas.tools.bench.cpu.kind_of`), busiest first, while all
            trials were in their windows.
        trial_us: CPU microseconds of a trial's process per sample.
        peak_bytes: peak of the sum of PSS: shared pages count once.
        spilled_bytes: bytes written to disk by Ray because its object store was full.
        epochs, missing, repeated: see `TrialResult`; summed over trials and runs.
    """

    row: str = field(kw_only=False)
    trials: int = field(kw_only=False)
    batch: int = field(kw_only=False)
    samples_per_s: float = 0.0
    cores_by_kind: tuple[tuple[str, float], ...] = ()
    trial_us: float = 0.0
    peak_bytes: int = 0
    spilled_bytes: int = 0
    epochs: int = 0
    missing: int = 0
    repeated: int = 0

    @property
    def busy_cores(self) -> float:
        return sum(cores for _, cores in self.cores_by_kind)


@dataclass(frozen=True, kw_only=True)
class RowRun(Figures):
    """Result of one run of a row; ``error`` is the reason why there is no result, or ""."""

    error: str = ""

    @property
    def cpu_s_per_1000(self) -> float:
        """CPU seconds of the whole process tree per 1,000 delivered samples."""
        return 1000 * self.busy_cores / self.samples_per_s


def run_row(spec: RowSpec) -> RowRun:
    """Run a row in its own process. If it fails or times out, the result has an error; nothing is raised."""
    # a separate pipe, because libraries write other output to stdout
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
        os.close(writing)  # now only the host holds it: if the host dies, reading ends instead of waiting
        try:
            assert host.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once; its log contains the reason
                host.stdin.write(pickle.dumps(spec))
                host.stdin.flush()
            host.wait(spec.settings.timeout_s)  # its stdin stays open: closing it ends the host
            return pickle.load(results)
        except subprocess.TimeoutExpired:
            return failed(
                spec, f"took longer than {seconds(spec.settings.timeout_s)}, the most that a row may take\n{_tail(log)}"
            )
        except EOFError:
            return failed(spec, f"its process ended with exit code {host.returncode}\n{_tail(log)}")
        finally:
            if host.poll() is None:
                kill_tree(host.pid)
                host.wait()
            assert host.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # unread input
                host.stdin.close()


@contextmanager
def _own_temporary_files() -> Iterator[dict[str, str]]:
    # So that no temporary files are left when the row's processes are killed. Ray's logs keep their usual folder,
    # because the paths of its sockets must stay short.
    usual = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="mbaas-", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": usual, **os.environ, "TMPDIR": folder}


def failed(spec: RowSpec, error: str) -> RowRun:
    return RowRun(spec.row, spec.trials, spec.batch, error=error)


def _tail(log: IO[bytes], size: int = 4000) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - size))
    return log.read().decode(errors="replace")


def kill_tree(pid: int) -> None:
    """Kill a process, if it still runs, and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                # It ends after the others, and cleans up after them.
                if not any("resource_tracker" in part for part in process.cmdline()):
                    process.kill()


# ---- in the host ----


def main() -> None:
    """Run as the host: read a pickled `RowSpec` from stdin, write a pickled `RowRun` to the descriptor in argv."""
    spec: RowSpec = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="mbaas-end-with-parent", daemon=True).start()
    try:
        run = measure(spec)
    except Exception:  # from any library: report it, and let other rows run
        run = failed(spec, traceback.format_exc())
    with os.fdopen(int(sys.argv[1]), "wb") as results:
        pickle.dump(run, results)


def _end_with_parent() -> None:
    """End this process and its descendants when the parent ends for any reason, which closes stdin."""
    # Read the descriptor: a thread that waits in a Python file object holds its lock, and the interpreter could not
    # exit.
    while os.read(0, 4096):
        pass
    end_host()


def end_host() -> NoReturn:
    """End this process and its descendants, from any thread; the row's run then fails."""
    for child in psutil.Process().children():
        kill_tree(child.pid)
    os._exit(1)


def measure(spec: RowSpec) -> RowRun:
    with open_service(spec) as address, TreeWatch() as watch:
        with _trials(replace(spec, address=address)) as (connections, gate):
            results, cores = _collect(connections, watch)
            gate.stop.set()
        return RowRun(
            spec.row,
            spec.trials,
            spec.batch,
            samples_per_s=sum(result.samples / result.seconds for result in results),
            cores_by_kind=tuple(cores.items()),
            trial_us=1e6 * sum(result.cpu_s for result in results) / sum(result.samples for result in results),
            peak_bytes=watch.peak_bytes,
            spilled_bytes=spilled_bytes(spec.row),
            epochs=sum(result.epochs for result in results),
            missing=sum(result.missing for result in results),
            repeated=sum(result.repeated for result in results),
        )


@contextmanager
def _trials(spec: RowSpec) -> Iterator[tuple[list[Connection[Any, Message]], Gate]]:
    context = mp.get_context("spawn")  # forking a process with threads, such as a Ray server, may hang
    gate = Gate(context.Barrier(spec.trials), context.Event())
    connections, processes = [], []
    for index in range(spec.trials):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_trial, args=(replace(spec, trial=index), gate, theirs))
        process.start()
        theirs.close()  # so that the trial's end closes the connection, which `received` detects
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
    # Cores are measured from the last `WarmedUp` to the last `TrialResult`: all trials work during this time, including
    # those that have finished.
    results: list[TrialResult] = []
    open_ones: list[Any] = list(connections)
    warm = 0
    began = watch.cpu()
    while open_ones:
        for ready in wait(open_ones):
            message = received(ready)
            if isinstance(message, TrialResult):
                results.append(message)
                open_ones.remove(ready)
                continue
            warm += 1
            if warm == len(connections):
                began = watch.cpu()
    return results, began.cores_until(watch.cpu())


def received(connection: Any) -> Any:
    """Return a message of a trial; raise RuntimeError if its process has ended, or if it sent its failure."""
    try:
        message = connection.recv()
    except EOFError:
        raise RuntimeError("a trial's process ended without a word") from None
    if isinstance(message, TrialFailure):
        raise RuntimeError(message.reason)
    return message
