"""The host: the process that serves what a row needs served, starts its trials and watches all of it.

``python -m mbaas.bench.host FD`` reads a pickled `RowSpec` on standard input and writes a pickled `RowRun` to the
descriptor FD.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mbaas.bench.cpu import TreeWatch
from mbaas.bench.row import RowRun, RowSpec, failed, kill_tree
from mbaas.bench.source import TrialSpec
from mbaas.bench.trial import Failed, Gate, Message, TrialResult, Warm, run_trial

STOP_S = 30.0
"""How long a trial may take to close before it is killed."""


def main() -> None:
    """Be the host."""
    spec: RowSpec = pickle.load(sys.stdin.buffer)
    try:
        run = measure(spec)
    except Exception:
        run = failed(spec, traceback.format_exc())
    with os.fdopen(int(sys.argv[1]), "wb") as results:
        pickle.dump(run, results)


def measure(spec: RowSpec) -> RowRun:
    """Run a row below this process."""
    with _service(spec.trial, spec.trials) as service, TreeWatch() as watch:
        trial = replace(spec.trial, address=service.address)
        with _tasks(spec, trial) as (connections, gate):
            results, cores = _collect(connections, watch)
            gate.stop.set()
        return _summary(spec, results, cores, watch.peak_bytes, service.spilled_bytes())


class _NoService:
    """What rows without a service have instead of one."""

    address = ""

    def spilled_bytes(self) -> int:
        return 0


@contextmanager
def _service(trial: TrialSpec, trials: int) -> Iterator[Any]:
    if trial.row != "mbaas":
        yield _NoService()
        return
    from mbaas.bench.shared import Service

    with Service(trial, trials) as service:
        yield service


@contextmanager
def _tasks(spec: RowSpec, trial: TrialSpec) -> Iterator[tuple[list[Connection[Any, Message]], Gate]]:
    """The trials, started; they are asked to stop, and waited for, at the end."""
    context = mp.get_context("spawn")
    gate = Gate(context.Barrier(spec.trials), context.Event())
    connections, processes = [], []
    for index in range(spec.trials):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_trial, args=(replace(trial, trial=index), spec.window, gate, theirs))
        process.start()
        theirs.close()
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
    """Results of all trials, and the cores kept busy, by kind of process, from the last `Warm` to the last
    `TrialResult`: all trials are at work then, those that have finished too.
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


if __name__ == "__main__":
    main()
