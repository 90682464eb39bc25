"""Settings, results and checks of the benchmark on several nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mbaas.base.units import counted, rate
from mbaas.errors import ConfigError
from mbaas.tools.bench.render import figure_table, machine_line
from mbaas.tools.bench.report import Machine

STORAGE_TOLERANCE = 0.01
BALANCE_TOLERANCE = 0.05
CROSSING_TOLERANCE = 0.05
THROTTLE_TOLERANCE = 0.05
"""Relative tolerances: bytes read, bytes cached, bytes that crossed nodes, and bandwidth of storage."""


@dataclass(frozen=True, kw_only=True)
class NodesSettings:
    """Options of `run`.

    Attributes:
        data: a folder of JPEG, PNG or WebP files; None: generate ``images`` photographs.
        cache_dir: folder where generated photographs are stored for later runs.
        images: number of generated photographs.
        nodes: numbers of nodes.
        storage_bytes_per_s: storage bandwidth of each node.
        cache_shares: memory of all caches together as fractions of the dataset, each tried with each number of nodes.
        epochs: number of epochs, at least 2, because the first is reported separately.
        batch: samples in a minibatch.
        seed: of the order and the transforms.

    Raises:
        ConfigError: an option out of range.
    """

    data: Path | None = None
    cache_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "mbaas-bench")
    images: int = 400
    nodes: tuple[int, ...] = (1, 2, 4)
    storage_bytes_per_s: float = 8e6
    cache_shares: tuple[float, ...] = (1.0, 0.5)
    epochs: int = 3
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"images": (self.images, 1), "epochs": (self.epochs, 2), "batch": (self.batch, 1)}
        least["nodes"] = (min(self.nodes, default=0), 1)
        for name, (value, bound) in least.items():
            if value < bound:
                raise ConfigError(f"{name} must be at least {bound}, got {value}")
        if self.storage_bytes_per_s <= 0:
            raise ConfigError(f"storage_bytes_per_s must be above 0, got {self.storage_bytes_per_s}")
        if not self.cache_shares or not all(0 <= share <= 1 for share in self.cache_shares):
            shares = ", ".join(f"{share:g}" for share in self.cache_shares) or "nothing"
            raise ConfigError(f"cache shares must be from 0 to 1, got {shares}")


@dataclass(frozen=True)
class Loading:
    """Results of all nodes together, each training on the whole dataset in every epoch.

    Attributes:
        epoch_s: seconds of each epoch, until the last node finished it.
        storage_bytes: bytes read from storage in each epoch by all nodes, from the log of the storage.
        fastest_bytes_per_s: highest bandwidth of one node in any two seconds.
        remote_bytes: raw bytes that crossed between nodes, in each epoch.
        prepared_bytes: bytes prepared in an epoch by all nodes.
        cached_bytes: raw bytes cached on each node.
        missing, repeated: samples that were missing from, or repeated in, an epoch of a trial; summed.
    """

    epoch_s: tuple[float, ...]
    storage_bytes: tuple[int, ...]
    fastest_bytes_per_s: float
    remote_bytes: tuple[int, ...]
    prepared_bytes: float
    cached_bytes: tuple[int, ...]
    missing: int
    repeated: int

    @property
    def first_epoch_s(self) -> float:
        """Seconds of the first epoch."""
        return self.epoch_s[0]

    @property
    def later_epoch_s(self) -> float:
        """Median seconds of the later epochs."""
        return median(self.epoch_s[1:])


@dataclass(frozen=True)
class NodesResult:
    """Results for a number of nodes and a cache share.

    Attributes:
        nodes, cache_share: the run.
        cache_bytes: cache capacity of each node.
        dataset_bytes: encoded bytes of all samples.
        sample_bytes: bytes of a prepared sample.
        samples: in the dataset.
        limit_bytes_per_s: configured storage bandwidth of a node.
        measured_bytes_per_s: measured bandwidth with threads that only read.
        sharing, alone: results with one feed, and without.
        spilled_bytes: bytes that Ray spilled to disk.
        remade: parts of blocks that the feed made more than once.
    """

    nodes: int
    cache_share: float
    cache_bytes: int
    dataset_bytes: int
    sample_bytes: int
    samples: int
    limit_bytes_per_s: float
    measured_bytes_per_s: float
    sharing: Loading
    alone: Loading
    spilled_bytes: int
    remade: int

    @property
    def faults(self) -> tuple[str, ...]:
        """Failed checks, as sentences."""
        return tuple(_faults(self))

    @property
    def is_sound(self) -> bool:
        """True if all checks passed."""
        return not self.faults


@dataclass(frozen=True)
class NodesReport:
    """Settings, machine, and a result for each number of nodes and cache share."""

    settings: NodesSettings
    machine: Machine
    results: tuple[NodesResult, ...]

    @property
    def is_sound(self) -> bool:
        """True if every result is sound."""
        return all(result.is_sound for result in self.results)


def _faults(result: NodesResult) -> Iterator[str]:
    sharing, dataset = result.sharing, result.dataset_bytes
    cached = sharing.cached_bytes
    # the first epoch reads every sample once, later ones only samples that are not cached
    due = [dataset] + [dataset - sum(cached)] * (len(sharing.storage_bytes) - 1)
    for epoch, (read, wanted) in enumerate(zip(sharing.storage_bytes, due, strict=True), 1):
        if abs(read - wanted) > STORAGE_TOLERANCE * dataset:
            yield f"epoch {epoch} read {read / 1e6:.2f} MB from storage, {wanted / 1e6:.2f} MB were due"
    if len(cached) != result.nodes:
        yield f"{len(cached)} of {result.nodes} nodes have a cache"
    elif max(cached) - min(cached) > BALANCE_TOLERANCE * sum(cached) / len(cached):
        yield f"nodes cache {min(cached) / 1e6:.2f} to {max(cached) / 1e6:.2f} MB, which differs by more than 5 %"
    for epoch, crossed in enumerate(sharing.remote_bytes, 1):
        if crossed > CROSSING_TOLERANCE * dataset:
            yield f"{crossed / 1e6:.2f} raw MB crossed nodes in epoch {epoch}, more than 5 % of {dataset / 1e6:.2f} MB"
    limit = result.limit_bytes_per_s
    if abs(result.measured_bytes_per_s / limit - 1) > THROTTLE_TOLERANCE:
        yield f"storage delivered {result.measured_bytes_per_s / 1e6:.2f} MB/s instead of {limit / 1e6:.2f} MB/s"
    for name, loading in (("sharing", sharing), ("alone", result.alone)):
        if loading.fastest_bytes_per_s > (1 + THROTTLE_TOLERANCE) * limit:
            yield f"{name}: storage delivered {loading.fastest_bytes_per_s / 1e6:.2f} MB/s to a node for two seconds"
        if loading.missing or loading.repeated:
            yield f"{name}: {loading.missing} samples were missing, {loading.repeated} were repeated"
    if result.remade:
        yield f"{result.remade} parts of blocks were made more than once"
    if result.spilled_bytes:
        yield f"Ray wrote {result.spilled_bytes / 1e6:.0f} MB to disk"


def figures(report: NodesReport) -> dict[str, Any]:
    """Return the report as plain values."""
    results = [{**asdict(result), "faults": result.faults} for result in report.results]
    return {**asdict(report), "results": results, "is_sound": report.is_sound}


def tables(report: NodesReport) -> RenderableType:
    """Return a table for each cache share, and the failed checks."""
    return Group(*_table_parts(report))


def _table_parts(report: NodesReport) -> Iterator[RenderableType]:
    first = report.results[0]
    yield Text(
        f"{first.samples:,} images, {first.dataset_bytes / 1e6:.1f} MB; each node reads at "
        f"{rate(report.settings.storage_bytes_per_s)}; every node trains on all images\n{machine_line(report.machine)}"
    )
    for share in report.settings.cache_shares:
        yield _nodes_table([result for result in report.results if result.cache_share == share], share)
    for result in report.results:
        for fault in result.faults:
            yield Text(f"{_size(result)}: {fault}", style="bold red")
    yield Text(
        "feed: all nodes on one mbaas feed. alone: each node loads its data itself. first, later: seconds of the first "
        "epoch and median of the others, until the last node finished. storage, later: MB read in the first epoch and "
        "in the others. prepared: MB per epoch. crossed: most raw MB between nodes in an epoch. All are sums over "
        "nodes. cached: raw MB on each node.",
        style="dim",
    )


def _size(result: NodesResult) -> str:
    return f"{counted(result.nodes, 'node')}, caches for {result.cache_share:.0%}"


def _nodes_table(results: list[NodesResult], share: float) -> Table:
    headings = ("nodes", "", "first", "later", "storage", "later", "prepared", "crossed", "cached")
    table = figure_table(f"all caches together hold {share:.0%} of the images", headings, words=("",))
    for result in results:
        table.add_row(str(result.nodes), "feed", *_loading_cells(result.sharing), style="bold")
        table.add_row("", "alone", *_loading_cells(result.alone))
    return table


def _loading_cells(loading: Loading) -> list[str]:
    low, high = min(loading.cached_bytes) / 1e6, max(loading.cached_bytes) / 1e6
    return [
        f"{loading.first_epoch_s:.1f} s",
        f"{loading.later_epoch_s:.1f} s",
        f"{loading.storage_bytes[0] / 1e6:.1f}",
        f"{max(loading.storage_bytes[1:]) / 1e6:.1f}",
        f"{loading.prepared_bytes / 1e6:.1f}",
        f"{max(loading.remote_bytes) / 1e6:.1f}",
        f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}-{high:.1f}",
    ]
