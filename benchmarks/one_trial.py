"""Measures one trial on a feed that prepares with DALI, next to a trial that runs DALI itself.

Each row runs in new processes. Engine rows have no Ray, no cache and no trial; feed rows have all three. On a machine
without a GPU, DALI uses its CPU operators, and trials take NumPy arrays: that tests the command, but its rates say
nothing about a GPU.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import mbaas
from mbaas.base.units import count, counted, percent, seconds
from mbaas.memory import slots
from mbaas.prep.engines import Batch, make_engine
from mbaas.ray_cluster import connection
from mbaas.samples.fields import IMAGE
from mbaas.tools.bench.render import figure_table
from mbaas.tools.bench.rows import BenchSettings, RowSpec
from mbaas.tools.bench.rows.prep import locked_like
from mbaas.tools.bench.tasks import TASKS
from mbaas.tools.bench.tasks.base import Data

BLOCK = 512
"""Samples in a call of the engine, as in a feed's block."""

BATCH = 64
WORKERS = 2
ANSWER_S = 120.0
"""Time for a process to start, warm up and end, beyond its measurement."""

STEPS = ("headers and plan", "feed", "wait for DALI", "deliver")
"""Steps of a worker's thread in `DaliEngine.prepare`."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        per_s: samples/s.
        cpu_s: CPU-seconds of the engine's processes for a sample; 0 if they are not counted.
        notes: further figures by name, as text.
    """

    name: str
    per_s: float
    cpu_s: float
    notes: Mapping[str, str]


def measure(data: Data, *, gpu: bool, window_s: float, tell: Callable[[str], None]) -> list[Row]:
    """Run all rows, each for ``window_s`` after a warm-up."""
    found: list[Row] = []
    for row in _rows(data, gpu=gpu, window_s=window_s):
        tell(f"{row.name}: {count(row.per_s)} samples/s")
        found.append(row)
    return found


def _rows(data: Data, *, gpu: bool, window_s: float) -> Iterator[Row]:
    for processes in (1, WORKERS):
        for in_flight in (1, 2):
            yield engine_row(data, processes, in_flight, gpu=gpu, window_s=window_s)
    yield engine_row(data, WORKERS, 2, gpu=gpu, window_s=window_s, locked=False)
    for threads in (1, 10):
        yield dali_row(data, threads, gpu=gpu, window_s=window_s)
    for workers in (1, WORKERS, WORKERS + 1):
        with _feed(data, workers, gpu=gpu) as feed:
            name = f"feed, {counted(workers, 'worker')}, one trial"
            if workers == WORKERS and gpu:
                yield _trial(feed, f"{name} on the CPU", None, window_s)
            yield _trial(feed, name, "cuda" if gpu else None, window_s)


def table(rows: list[Row]) -> Table:
    """Return the rows as a table."""
    found = figure_table(
        "One trial and DALI", ("row", "samples/s", "CPU a sample", "figures"), ("row", "figures"), ("figures",)
    )
    for row in rows:
        notes = ", ".join(f"{name} {value}" for name, value in row.notes.items())
        found.add_row(row.name, count(row.per_s), seconds(row.cpu_s) if row.cpu_s else "", notes)
    return found


# ---- in processes without Ray ----


def engine_row(data: Data, processes: int, in_flight: int, *, gpu: bool, window_s: float, locked: bool = True) -> Row:
    """Prepare blocks with the dali engine in ``processes`` processes; ``locked`` page-locks the results' memory."""
    name = f"engine, {counted(processes, 'worker')}, {in_flight} in flight"
    found = in_processes(processes, _prepare, data.folder, in_flight, window_s=window_s, gpu=gpu, locked=locked)
    per_s = sum(samples / took_s for samples, took_s, _, _ in found)
    samples = sum(samples for samples, *_ in found)
    steps = {step: seconds(sum(spent[step] for *_, spent in found) / samples) for step in STEPS}
    pages = "" if locked else ", pages not locked"
    return Row(name + pages, per_s, sum(cpu_s for _, _, cpu_s, _ in found) / samples, steps)


def dali_row(data: Data, threads: int, *, gpu: bool, window_s: float) -> Row:
    """Run DALI's own reader and pipeline with ``threads`` threads."""
    ((per_s, cpu_s),) = in_processes(1, _run_dali, data, threads, window_s=window_s, gpu=gpu)
    return Row(f"DALI alone in the trial, {counted(threads, 'thread')}", per_s, cpu_s, {})


def in_processes(processes: int, work: Callable[..., None], *args: Any, window_s: float, **options: Any) -> list[Any]:
    """Return the results of ``work`` in ``processes`` processes, which begin together and measure for ``window_s``."""
    options["window_s"] = window_s
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(processes), context.SimpleQueue()
    running = [context.Process(target=work, args=(begin, results, *args), kwargs=options) for _ in range(processes)]
    try:
        for process in running:
            process.start()
        return [_next(results, running, ANSWER_S + window_s) for _ in running]
    finally:
        for process in running:
            process.join(ANSWER_S)
            process.kill()


def _next(results: Any, running: list[Any], wait_s: float) -> Any:
    end = time.monotonic() + wait_s
    while results.empty():
        if time.monotonic() > end or any(process.exitcode for process in running):
            raise RuntimeError(f"a process of the benchmark failed, or took longer than {seconds(wait_s)}")
        time.sleep(0.05)
    return results.get()


def _prepare(
    begin: Any, results: Any, folder: Path, in_flight: int, *, window_s: float, gpu: bool, locked: bool
) -> None:
    """Prepare blocks in one array, like a worker; put (samples, seconds, CPU-seconds, seconds of each step)."""
    from mbaas.prep.engines import cpu, dali_runs

    spent = dict.fromkeys(STEPS, 0.0)
    owners: tuple[tuple[Any, str], ...] = (
        (cpu.ImagePart, "__init__"),
        (dali_runs.GraphRuns, "_start"),
        (dali_runs.GraphRuns, "_results"),
        (dali_runs.GraphRuns, "_hand_on"),
    )
    for step, (owner, method) in zip(STEPS, owners, strict=True):
        _time(owner, method, spent, step)
    dali_runs.IN_FLIGHT = in_flight
    task = TASKS["images"]
    files = [np.fromfile(file, np.uint8) for file in task.samples(Data(folder)).files]
    engine = make_engine("dali", task.pipeline(), seed=0, device_id=0 if gpu else None)
    out = task.made.empty(BLOCK)
    if gpu and locked:
        out = locked_like(out)
    numbers = np.arange(BLOCK)
    at = 0

    def block() -> None:
        nonlocal at
        ids = (at + numbers) % len(files)
        at += BLOCK
        engine.prepare(Batch([files[i] for i in ids.tolist()], ids, at // len(files), {}), out)

    for _ in range(3):
        block()
    begin.wait(ANSWER_S)
    spent.update(dict.fromkeys(STEPS, 0.0))
    began, cpu_s, first = time.monotonic(), time.process_time(), at
    while time.monotonic() - began < window_s:
        block()
    results.put((at - first, time.monotonic() - began, time.process_time() - cpu_s, spent))
    engine.close()


def _time(owner: Any, method: str, spent: dict[str, float], step: str) -> None:
    function = getattr(owner, method)

    def timed(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given, **options)
        finally:
            spent[step] += time.perf_counter() - began

    setattr(owner, method, timed)


def _run_dali(begin: Any, results: Any, data: Data, threads: int, *, window_s: float, gpu: bool) -> None:
    """Run DALI's own reader and pipeline; put (samples/s, CPU-seconds of a sample)."""
    from mbaas.tools.bench.rows import dali

    pipe = dali.build(RowSpec(BenchSettings(gpu=gpu), "dali", 1, data, BATCH), threads)
    for _ in range(10):
        pipe.run()
    begin.wait(ANSWER_S)
    began, cpu_s, samples = time.monotonic(), time.process_time(), 0
    while (took_s := time.monotonic() - began) < window_s:
        pipe.run()
        samples += BATCH
    results.put((samples / took_s, (time.process_time() - cpu_s) / samples))


# ---- a feed with one trial ----


@contextmanager
def _feed(data: Data, workers: int, *, gpu: bool) -> Iterator[mbaas.Feed]:
    task = TASKS["images"]
    options: dict[str, Any] = {"gpus_per_worker": None if gpu else 0, "cache_decoded": False}
    with connection.separate_ray(max(workers + 1, 4)):
        with mbaas.serve(
            "one trial",
            task.dataset(data),
            task.pipeline(),
            batch_size=BATCH,
            engine="dali",
            prep_workers=workers,
            **options,
        ) as feed:
            yield feed


def _trial(feed: mbaas.Feed, name: str, device: str | None, window_s: float) -> Row:
    """Read for ``window_s`` in this process, and wait for each minibatch on the device, as ``mbaas bench`` does."""
    loader = mbaas.join(feed.name, consumer=name, format="torch" if device else "numpy", device=device)
    samples = in_slots = minibatches = 0
    ends_s = 0.0
    with loader:
        for _ in range(3):
            for batch in loader:
                _wait_for(batch, device)
        before, began = feed.status(), time.monotonic()
        last = began
        while time.monotonic() - began < window_s:
            for number, batch in enumerate(loader):
                _wait_for(batch, device)
                now = time.monotonic()
                ends_s += (now - last) * (number == 0)
                last = now
                samples, minibatches = samples + len(batch["sample_id"]), minibatches + 1
                # A tensor on a device is a copy, so only arrays show their source.
                in_slots += device is None and slots.room_of(batch[IMAGE]) is not None
        took_s, after = time.monotonic() - began, feed.status()
    workers = len(after.workers)
    busy_s, fetch_s = after.prep_s - before.prep_s, after.fetch_s - before.fetch_s
    prepared = after.prepared_samples - before.prepared_samples
    notes = {
        "workers prepare": percent(busy_s / took_s / workers),
        "wait for bytes": percent(fetch_s / took_s / workers),
        "a worker at work, samples/s": count(prepared / busy_s if busy_s else 0.0),
        "prepared samples/s": count(prepared / took_s),
        "wait for epochs' first minibatches": percent(ends_s / took_s),
        "samples in a block": count(after.block_samples),
    }
    if device is None:
        notes["minibatches in shared memory"] = percent(in_slots / minibatches)
    return Row(name, samples / took_s, 0.0, notes)


def _wait_for(batch: dict[str, Any], device: str | None) -> None:
    if device is not None:
        import torch

        batch[IMAGE].max()  # reads the whole tensor
        torch.cuda.synchronize()
