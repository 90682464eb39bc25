"""Measure the page cache's hits at several shares of the data, and compare them with `mbaas.model.page_cache`.

The data is read in a process of its own, inside a memory cgroup (`memory_limit`). Hits are counted from the bytes that
the block layer read from the disk for that process, so read-ahead of bytes that are never used counts as misses.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks import rows
from benchmarks.page_cache import reader
from benchmarks.page_cache.memory_limit import MemoryLimit, memory_limit
from mbaas.base.units import count, counted, interval, percent, size
from mbaas.errors import MbaasError
from mbaas.model.page_cache import PAGE_BYTES, PageCache, page_cache_hits

Layout = Literal["files", "packed", "packed_random"]
LAYOUTS: tuple[Layout, ...] = ("files", "packed", "packed_random")

MEAN_BYTES, SIGMA = 110_000, 0.5
"""Sizes of samples, log-normal as for photographs: mean, and standard deviation of the logarithm."""

WARM_UP = 3
"""First epochs, which fill the cache and settle its lists. The limit is adjusted after each one."""

LRU_GEN = Path("/sys/kernel/mm/lru_gen/enabled")
"""Bits of the multi-generational LRU; missing if the kernel has only the two lists."""


@dataclass(frozen=True)
class PageCacheRun:
    """One run; shares and hits are fractions of the dataset's bytes, rounded up to pages.

    Attributes:
        layout: each sample is a file; or all are packed into one file and read at offsets, with the kernel's read-ahead
            or, for "packed_random", without it.
        threads: readers.
        trials: each reads all samples in an order of its own, in step with the others.
        wanted_share: share that the limit was to leave room for.
        limit_bytes, other_bytes: limit of the cgroup, and its memory that is not page cache, in the last epoch.
        cached_share, active_share: page cache and its active list, means over the ends of the measured epochs.
        hits: of each epoch, 1 - bytes read from the disk / bytes requested; negative if read-ahead read more.
        model_hits: of each epoch, by the model, in the same orders and with a capacity of ``cached_share``.
    """

    layout: Layout
    threads: int
    trials: int
    wanted_share: float
    limit_bytes: int
    other_bytes: int
    cached_share: float
    active_share: float
    hits: list[float]
    model_hits: list[float]

    @property
    def mean_hits(self) -> float:
        return mean(self.hits[WARM_UP:])

    @property
    def mean_model_hits(self) -> float:
        return mean(self.model_hits[WARM_UP:])

    @property
    def formula_hits(self) -> float:
        return page_cache_hits(self.cached_share, trials=self.trials)


@dataclass(frozen=True)
class PageCacheFigures:
    """All runs on one machine.

    Attributes:
        kernel: release of the kernel, and whether it has the multi-generational LRU.
        read_ahead_kib: most that the kernel reads ahead from the disk.
        samples, dataset_bytes: of the dataset.
        runs: one for each layout, number of threads and share.
    """

    kernel: str
    read_ahead_kib: int
    samples: int
    dataset_bytes: int
    runs: list[PageCacheRun]


def measure(
    *,
    samples: int,
    shares: Sequence[float],
    threads: Sequence[int],
    trials: Sequence[int],
    epochs: int,
    folder: Path | None,
    seed: int,
    tell: Callable[[str], None],
) -> PageCacheFigures:
    """Measure one trial with each layout and number of threads, and several trials with files, at each share.

    Args:
        samples: number of samples, with sizes like photographs.
        shares: shares of the dataset that the page cache has room for.
        threads: numbers of readers.
        trials: numbers of trials; several read with the most threads.
        epochs: epochs of a run, each in a new order; the first `WARM_UP` do not count.
        folder: folder on the disk to measure, for temporary files.
        seed: seed of the sizes and orders.
        tell: receives progress.
    """
    with memory_limit():
        pass  # fails before the dataset is written
    random = np.random.default_rng(seed)
    drawn = random.lognormal(0, SIGMA, samples)
    sizes = np.maximum(1, drawn * (MEAN_BYTES * samples / drawn.sum())).astype(np.int64)
    orders = {
        count: [np.stack([random.permutation(samples) for _ in range(count)], axis=1).ravel() for _ in range(epochs)]
        for count in {1, *trials}
    }
    runs = []
    for layout in LAYOUTS:
        several = [(max(threads), count) for count in trials if count > 1 and layout == "files"]
        with _written(layout, sizes, folder, random) as task:
            for (readers, count), share in product([*((each, 1) for each in threads), *several], shares):
                tell(f"{layout}, {counted(readers, 'thread')}, {counted(count, 'trial')}, {percent(share)} cached")
                runs.append(_run(task, layout, sizes, orders[count], threads=readers, trials=count, share=share))
    return PageCacheFigures(_kernel(), _read_ahead_kib(folder), samples, int(sizes.sum()), runs)


def _kernel() -> str:
    generations = LRU_GEN.read_text().strip() if LRU_GEN.exists() else "0x0000"
    return f"{platform.release()}, {'two lists' if int(generations, 16) & 1 == 0 else 'multi-generational LRU'}"


def _read_ahead_kib(folder: Path | None) -> int:
    number = (folder or Path(tempfile.gettempdir())).stat().st_dev
    return int(Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb").read_text())


@contextmanager
def _written(
    layout: Layout, sizes: NDArray[np.int64], folder: Path | None, random: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Write the samples to the disk, and yield the fields of a `reader.Task`."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        if layout == "files":
            paths, offsets = [Path(made, str(sample)) for sample in range(len(sizes))], [0] * len(sizes)
            for path, nbytes in zip(paths, sizes, strict=True):
                path.write_bytes(random.bytes(int(nbytes)))
        else:
            paths, offsets = [Path(made, "packed")], [0, *np.cumsum(sizes)[:-1].tolist()]
            with paths[0].open("wb") as file:
                file.writelines(random.bytes(int(nbytes)) for nbytes in sizes)
        is_random = layout == "packed_random"
        yield {
            "paths": [str(path) for path in paths],
            "offsets": offsets,
            "sizes": sizes.tolist(),
            "is_random": is_random,
        }


def _run(
    task: dict[str, Any],
    layout: Layout,
    sizes: NDArray[np.int64],
    orders: Sequence[NDArray[np.int64]],
    *,
    threads: int,
    trials: int,
    share: float,
) -> PageCacheRun:
    drop(task["paths"])
    dataset_bytes = _paged_bytes(layout, sizes)
    wanted_bytes = round(share * dataset_bytes)
    hits, caches, actives = [], [], []
    with memory_limit() as limit, _reader(limit, {**task, "threads": threads}) as read:
        limit_bytes = wanted_bytes + limit.use().other_bytes
        limit.set(limit_bytes)
        for epoch, order in enumerate(orders):
            hits.append(1 - read(order.tolist()) / (trials * dataset_bytes))
            use = limit.use()
            if epoch < WARM_UP:
                # Memory of the kernel, such as inodes of cached files, grows with the cache and is charged, too.
                limit_bytes = wanted_bytes + use.other_bytes
                limit.set(limit_bytes)
            else:
                caches.append(use.file_bytes / dataset_bytes)
                actives.append(use.active_bytes / dataset_bytes)
    # The model rounds each sample up to pages, which changes the size of a packed dataset but not the share.
    model = PageCache(capacity_bytes=mean(caches) * _paged_bytes("files", sizes), sizes=sizes)
    model_hits = [float(np.average(model.read(order), weights=sizes[order])) for order in orders]
    return PageCacheRun(
        layout, threads, trials, share, limit_bytes, use.other_bytes, mean(caches), mean(actives), hits, model_hits
    )


def _paged_bytes(layout: Layout, sizes: NDArray[np.int64]) -> int:
    whole = sizes if layout == "files" else sizes.sum(keepdims=True)
    return int((-(-whole // PAGE_BYTES)).sum()) * PAGE_BYTES


def drop(paths: Sequence[str]) -> None:
    """Write the files to the disk and drop them from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


@contextmanager
def _reader(limit: MemoryLimit, task: dict[str, Any]) -> Iterator[Callable[[list[int]], int]]:
    """Start a reader in the cgroup, and yield a function that reads an order and returns the bytes from the disk."""
    command = [sys.executable, "-I", reader.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(plain: object) -> None:
            requests.write(json.dumps(plain) + "\n")
            requests.flush()

        def read(order: list[int]) -> int:
            ask(order)
            answer = answers.readline()
            if not answer:
                raise MbaasError(f"the reader ended with exit code {process.wait()}")
            return int(answer)

        limit.add(process.pid)
        ask(task)
        try:
            read([])  # the task is parsed and its memory allocated
            yield read
        finally:
            requests.close()


def table(found: PageCacheFigures) -> Table:
    """Return a table with a row for each run."""
    kernel = f"kernel {found.kernel}, read-ahead {found.read_ahead_kib:,} KiB"
    return rows(
        f"{found.samples:,} samples, {size(found.dataset_bytes)}, {kernel}",
        found.runs,
        {
            "layout": lambda run: run.layout,
            "threads": lambda run: str(run.threads),
            "trials": lambda run: str(run.trials),
            "cached": lambda run: percent(run.cached_share),
            "hits": lambda run: percent(run.mean_hits),
            "epochs": lambda run: interval(100 * min(run.hits[WARM_UP:]), 100 * max(run.hits[WARM_UP:]), count),
            "model": lambda run: percent(run.mean_model_hits),
            "formula": lambda run: percent(run.formula_hits),
        },
        words=("layout",),
    )


def figures(found: PageCacheFigures) -> dict[str, Any]:
    """Return the figures as JSON values."""
    means = ("mean_hits", "mean_model_hits", "formula_hits")
    runs = [{**asdict(run), **{name: getattr(run, name) for name in means}} for run in found.runs]
    return {**asdict(found), "warm_up": WARM_UP, "runs": runs}
