"""Runs of single cells: storage, feed and trials together, from the first epoch to the counts of the last."""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import mbaas
from benchmarks.ladder.cells import (
    NODES,
    RANKS,
    Cell,
    CellResult,
    Mode,
    Plan,
    Record,
    Workload,
    append_record,
    commit,
    read_records,
    unfinished,
)
from benchmarks.ladder.metered import ANY_NODE, MeteredDataset, Sockets
from benchmarks.ladder.storage import Policy, ReadCounts, StorageClient, StorageSettings, served_storage
from benchmarks.ladder.trials import (
    FEED,
    FEED_STEPS,
    LOADER_STEPS,
    EpochCounts,
    Trials,
    TrialSpec,
    faults,
    processes,
    ranks,
)
from benchmarks.local_cluster import local_cluster
from mbaas.base.units import count, number, percent, rate
from mbaas.ray_cluster import connection
from mbaas.tools.bench.cpu import TreeCpu
from mbaas.tools.bench.report import Machine
from mbaas.tools.bench.rows.dataloader import workers_for
from mbaas.tools.bench.tasks.images import Images, make_photos

HEADROOM = 1.01
"""Factor for caches that hold the whole dataset together: nodes do not divide samples."""

DECODED_BYTES = 500 * 400 * 3
"""Mean size of a decoded photograph (`mbaas.tools.bench.tasks.images`)."""

STAGING_BYTES = 96 << 20
"""Staging memory of a feed on local nodes, which share the memory of this machine."""

STORE_ROOM = 2.5
"""Object store of a local node, as a multiple of cache and staging, which may fill only a part."""

UNMEASURED_EPOCHS = 2
"""The first fills the caches. After the second, a feed is as far ahead of its trials as after any later one, so the
reads in the measured epochs are as many as these epochs need."""

NO_READS = ReadCounts()


@dataclass(frozen=True)
class Bench:
    """Data of all cells.

    Attributes:
        workload: sizes and rates.
        folder: the photographs.
        dataset: the same, as a dataset.
    """

    workload: Workload
    folder: Path
    dataset: mbaas.Dataset


@dataclass(frozen=True)
class NodeStores:
    """The storage of all nodes of a cell.

    Attributes:
        sockets: paths of their sockets, by node.
    """

    sockets: Sockets

    def counts(self) -> ReadCounts:
        """Return the reads of all nodes so far."""
        total = NO_READS
        for path in self.sockets.values():
            with contextlib.closing(StorageClient(path)) as client:
                total += client.counts()
        return total


def run_all(
    plan: Plan | None, workload: Workload, *, cache_dir: Path, results: Path, report: Callable[[str], None]
) -> list[Record]:
    """Measure the cells of the plan that the file ``results`` lacks; return its records for this workload.

    If a cell fails, the error is reported, and the other cells are measured.
    """
    todo = [] if plan is None else unfinished(plan.cells(), workload, read_records(results))
    if todo:
        folder = make_photos(cache_dir, workload.images, seed=workload.seed, report=report)
        bench = Bench(workload, folder, mbaas.read_images(folder))
        _read_once(bench)
    for index, cell in enumerate(todo, 1):
        began = time.monotonic()
        try:
            result = run_cell(cell, bench)
        except Exception:  # from any library: cells are independent, and a long run should not end with the first error
            report(f"{index}/{len(todo)}, {cell} failed:\n{traceback.format_exc()}")
            continue
        append_record(results, Record(cell, workload, result, Machine(), commit()))
        report(f"{index}/{len(todo)}, {described(cell, result)}; took {time.monotonic() - began:.0f} s")
    return [record for record in read_records(results) if record.workload == workload]


def described(cell: Cell, result: CellResult) -> str:
    """Describe a result in one line."""
    storage = "instant storage" if cell.storage_bytes_per_s is None else rate(cell.storage_bytes_per_s)
    return (
        f"{cell.mode}, {storage}, {percent(cell.cached)} cached, {cell.step}: {count(result.samples_per_s)} samples/s, "
        f"{number(result.epoch_s)} s an epoch, {number(result.storage_bytes / result.rounds / 1e6)} MB read"
    )


def _read_once(bench: Bench) -> None:
    """Read all photographs, so that the kernel has them in memory and only the model takes time."""
    reader = bench.dataset.reader()
    for sample, length in enumerate(bench.dataset.lengths(np.arange(len(bench.dataset))).tolist()):
        reader.read_into(sample, np.empty(length, np.uint8))


def run_cell(cell: Cell, bench: Bench) -> CellResult:
    """Measure a cell.

    Raises:
        RuntimeError: a trial failed.
    """
    if cell.mode == "hyperband":
        from benchmarks.ladder.search import run_search  # Ray Tune takes a second to import

        return run_search(cell, bench)
    return (_run_nodes if cell.mode == "nodes" else _run_one_node)(cell, bench)


def cache_bytes(cell: Cell, bench: Bench) -> int:
    """Return the capacity of each node's cache."""
    nodes = NODES if cell.mode == "nodes" else 1
    whole = len(bench.dataset) * DECODED_BYTES if cell.step == "decoded" else bench.dataset.total_bytes
    return int(whole * cell.cached * (HEADROOM if nodes * cell.cached >= 1 else 1.0))


def storage_settings(cell: Cell, bench: Bench) -> StorageSettings:
    """Return the storage of each node: a feed with its own cache reads from the disk itself."""
    policy: Policy = "page_cache" if cell.step in ("dataloader", "prep-page-cache") else "minio"
    is_cached = cell.step in (*LOADER_STEPS, "prep-page-cache")
    capacity = cache_bytes(cell, bench) if is_cached else 0
    sizes = tuple(bench.dataset.lengths(np.arange(len(bench.dataset))).tolist())
    return StorageSettings(cell.storage_bytes_per_s, policy, capacity, sizes)


@contextmanager
def storage_of(cell: Cell, bench: Bench, nodes: Sequence[str] = (ANY_NODE,)) -> Iterator[NodeStores]:
    """Run the storage of each node."""
    with ExitStack() as stack:
        # Sockets need short paths.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mbaas-", dir="/tmp")))
        settings = storage_settings(cell, bench)
        servers = (served_storage(folder, f"{index}", settings) for index in range(len(nodes)))
        yield NodeStores(dict(zip(nodes, map(stack.enter_context, servers), strict=True)))


@contextmanager
def feed_of(cell: Cell, bench: Bench, stores: NodeStores, **more: Any) -> Iterator[mbaas.Feed]:
    """Serve a cell's feed on the connected cluster."""
    data = MeteredDataset.around(bench.dataset, sockets=stores.sockets)
    with mbaas.serve(
        FEED,
        data,
        Images().pipeline(),
        batch_size=bench.workload.batch,
        seed=bench.workload.seed,
        engine="cpu",
        cache_bytes=0 if cell.step == "prep-page-cache" else cache_bytes(cell, bench),
        cache_decoded=cell.step == "decoded",
        **more,
    ) as feed:
        yield feed


def with_cache(result: CellResult, feed: mbaas.Feed) -> CellResult:
    """Add the contents of a feed's cache."""
    status = feed.status()
    return replace(
        result,
        cached_bytes=status.cached_bytes,
        cached_samples=status.cached_samples,
        decoded_samples=status.decoded.samples,
    )


def _run_one_node(cell: Cell, bench: Bench) -> CellResult:
    workload, trials, ranks = bench.workload, bench.workload.trials_in(cell.mode), RANKS.get(cell.mode, 1)
    spec = TrialSpec(
        cell.step, workload, bench.folder, workers=workers_for(workload.cores, trials * ranks), world_size=ranks
    )
    specs = [replace(spec, trial=trial, rank=rank) for trial in range(trials) for rank in range(ranks)]
    with storage_of(cell, bench) as stores, ExitStack() as stack:
        if cell.step not in FEED_STEPS:
            specs = [replace(each, socket=stores.sockets[ANY_NODE]) for each in specs]
            return _measure(stack.enter_context(processes(specs)), stores, cell.mode, workload)
        address = stack.enter_context(connection.separate_ray(workload.cores))
        feed = stack.enter_context(feed_of(cell, bench, stores, prep_workers=workload.cores))
        specs = [replace(each, ray_address=address) for each in specs]
        # They begin the same epoch, as in a search. The ranks of a trial share its name.
        mbaas.announce(FEED, list(dict.fromkeys(each.consumer for each in specs)))
        return with_cache(_measure(stack.enter_context(processes(specs)), stores, cell.mode, workload), feed)


def _run_nodes(cell: Cell, bench: Bench) -> CellResult:
    workload = bench.workload
    spec = TrialSpec(cell.step, workload, bench.folder, workers=workers_for(workload.cores, NODES))
    with ExitStack() as stack:
        if cell.step not in FEED_STEPS:
            stores = stack.enter_context(storage_of(cell, bench, [f"node-{rank}" for rank in range(NODES)]))
            specs = [
                replace(spec, rank=rank, world_size=NODES, socket=path)
                for rank, path in enumerate(stores.sockets.values())
            ]
            return _measure(stack.enter_context(processes(specs)), stores, cell.mode, workload)
        store_bytes = int(STORE_ROOM * (cache_bytes(cell, bench) + STAGING_BYTES))
        cluster = stack.enter_context(local_cluster(NODES, store_bytes=store_bytes))
        stores = stack.enter_context(storage_of(cell, bench, cluster.node_ids))
        options = {"prep_workers": NODES, "staging_bytes": STAGING_BYTES}
        feed = stack.enter_context(feed_of(cell, bench, stores, **options))
        return with_cache(_measure(stack.enter_context(ranks(spec, cluster)), stores, cell.mode, workload), feed)


def _measure(trials: Trials, stores: NodeStores, mode: Mode, workload: Workload) -> CellResult:
    """Train without measuring until the caches are full, then measure."""
    first = trials.train(UNMEASURED_EPOCHS)
    with TreeCpu() as cpu:
        before, began = stores.counts(), time.monotonic()
        later = trials.train(workload.epochs)
        seconds, cpu_s, reads = time.monotonic() - began, cpu.seconds(), stores.counts() - before
    ranks = RANKS.get(mode, 1)
    counts = by_trial([np.concatenate(each) for each in zip(first, later, strict=True)], ranks)
    missing, repeated = faults(np.concatenate(counts))
    return CellResult(
        seconds=seconds,
        rounds=workload.epochs,
        epochs=workload.epochs * len(counts),
        samples=int(sum(each[UNMEASURED_EPOCHS:].sum() for each in counts)),
        compute_s=workload.images / workload.samples_per_s / ranks,
        storage_bytes=reads.read_bytes,
        storage_reads=reads.reads,
        cpu_s=cpu_s - reads.cpu_us / 1e6,
        checked_epochs=sum(len(each) for each in counts),
        missing=missing,
        repeated=repeated,
    )


def by_trial(counts: Sequence[EpochCounts], ranks: int) -> list[EpochCounts]:
    """Add the deliveries of the ranks of each trial, which follow each other in ``counts``."""
    return [np.sum(counts[first : first + ranks], axis=0) for first in range(0, len(counts), ranks)]
