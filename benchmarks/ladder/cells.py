"""The cells of the table, their results, and the file that keeps the results of finished cells."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from annotated_types import Ge, Gt

from mbaas.base.validation import options
from mbaas.errors import ConfigError
from mbaas.tools.bench.report import Machine
from mbaas.tools.bench.rows import usable_cores

Step = Literal["compute", "dataloader", "minio", "fetch", "prep-page-cache", "prep", "decoded"]
"""Source of minibatches.

- "compute": none; trials only take their training steps.
- "dataloader": a DataLoader for each trial, over the page cache of the node.
- "minio": the same over a MinIO cache of the node.
- "fetch": one feed that shares reads and cache; each trial has a pipeline of its own.
- "prep-page-cache": one feed that shares preparation, without a cache of its own, over the page cache.
- "prep": one feed that shares reads, cache and preparation.
- "decoded": the same, with decoded samples in the cache where that saves more. The capacity is a share of the decoded
  dataset, about six times as large as the stored one. With the capacity of the other steps, nothing is kept decoded.
"""

Mode = Literal["one", "eight", "ranks-2", "ranks-4", "ranks-8", "hyperband", "nodes"]
"""Consumers.

- "one": one trial.
- "eight": `Workload.trials` trials with the same step time, which start together.
- "ranks-2", "ranks-4", "ranks-8": the same number of processes, as ranks of data-parallel trials of 2, 4 or 8 ranks.
- "hyperband": a Ray Tune search by HyperBand (Mohan et al., VLDB 2021, appendix C.2.3).
- "nodes": a data-parallel trial with a rank on each of two nodes; each node has storage and a cache of its own.
"""

STEPS: dict[Mode, tuple[Step, ...]] = {
    "one": ("dataloader", "minio", "fetch", "prep", "decoded"),
    "eight": ("dataloader", "minio", "fetch", "prep", "decoded"),
    "ranks-2": ("dataloader", "prep"),
    "ranks-4": ("dataloader", "prep"),
    "ranks-8": ("dataloader", "prep"),
    "hyperband": ("dataloader", "minio", "fetch", "prep-page-cache", "prep", "decoded"),
    "nodes": ("dataloader", "minio", "prep", "decoded"),
}
"""Steps of the ladder in each mode. "fetch" needs several trials with pipelines of their own."""

NODES = 2

RANKS: dict[Mode, int] = {"ranks-2": 2, "ranks-4": 4, "ranks-8": 8, "nodes": NODES}
"""Ranks of each trial; modes that are not listed have one process for each trial."""


@options()
class Workload:
    """Sizes and rates that influence all cells.

    Attributes:
        images: number of photographs, of about 100 kB each.
        batch: samples in a minibatch; the ranks of a data-parallel trial divide it.
        epochs: measured epochs; unmeasured ones fill the caches first.
        trials: trials of "eight", ranks of all trials of "ranks-2" to "ranks-8", and concurrent trials of "hyperband".
        search_samples: trials of "hyperband".
        search_epochs: max_t of "hyperband", in epochs.
        samples_per_s: G, the rate of a trial or a rank that never waits. The default is above slow storage (15 and 50
            MB/s are 150 and 500 samples/s), so one trial stalls on fetching. It is below P of two cores
            (1,800), so one trial hardly stalls on preparation. Eight trials want more than four times P.
        cores: prep workers of a feed, and worker processes of all DataLoaders together, at least one for each.
        seed: of the order and the transforms.
    """

    images: Annotated[int, Ge(1)] = 800
    batch: Annotated[int, Ge(max(RANKS.values()))] = 64
    epochs: Annotated[int, Ge(1)] = 3
    trials: Annotated[int, Ge(1)] = 8
    search_samples: Annotated[int, Ge(1)] = 16
    search_epochs: Annotated[int, Ge(1)] = 9
    samples_per_s: Annotated[float, Gt(0)] = 1000.0
    cores: Annotated[int, Ge(1)] = field(default_factory=usable_cores)
    seed: int = 0

    def trials_in(self, mode: Mode) -> int:
        """Return the number of concurrent trials; raise a ConfigError if ranks cannot be divided evenly."""
        if mode in ("one", "nodes"):
            return 1
        ranks = RANKS.get(mode, 1)
        if self.trials % ranks:
            raise ConfigError(f"trials must be a multiple of {ranks} for mode {mode}, got {self.trials}")
        return self.trials // ranks


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        mode, step: the consumers, and the source of their minibatches.
        storage_bytes_per_s: speed of each node's storage; None: reading takes no time.
        cached: capacity of each node's cache, as a fraction of the dataset.
    """

    mode: Mode
    step: Step
    storage_bytes_per_s: float | None
    cached: float

    @property
    def reference(self) -> Cell:
        """The same step with everything cached and storage that takes no time."""
        return Cell(self.mode, self.step, None, 1.0)


@dataclass(frozen=True)
class CellResult:
    """Figures of a cell.

    Attributes:
        seconds: length of the measured window; for a search, of the search.
        rounds: epochs that each trial trained in the window; 1 for a search, which is one unit.
        epochs: epochs of all trials in the window; the ranks of a trial count once.
        samples: samples delivered in the window, over all trials.
        compute_s: time that a trial's steps take in an epoch without waiting; for a search 0, as it is measured.
        storage_bytes, storage_reads: read from the disks of all nodes in the window.
        cpu_s: CPU seconds of all processes in the window, without the model of the storage.
        checked_epochs: epochs of all trials, unmeasured ones included.
        missing, repeated: samples absent from an epoch, and deliveries after the first in an epoch.
        cached_bytes: bytes in all caches of the feed at the end; 0 without a feed.
        cached_samples, decoded_samples: samples in these, and those among them that are decoded.
    """

    seconds: float
    rounds: int
    epochs: int
    samples: int
    compute_s: float
    storage_bytes: int
    storage_reads: int
    cpu_s: float
    checked_epochs: int
    missing: int
    repeated: int
    cached_bytes: int = 0
    cached_samples: int = 0
    decoded_samples: int = 0

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch of all trials; for a search, of the whole search."""
        return self.seconds / self.rounds

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def cpu_s_per_1000(self) -> float:
        """CPU seconds for 1,000 delivered samples."""
        return 1000 * self.cpu_s / self.samples


@dataclass(frozen=True)
class Record:
    """A line of the file: a finished cell, with the machine, the date (in `Machine.when`) and the commit."""

    cell: Cell
    workload: Workload
    result: CellResult
    machine: Machine
    commit: str


@dataclass(frozen=True)
class Stalls:
    """Parts of an epoch's time in seconds, measured by differences (DS-Analyzer; Mohan et al., VLDB 2021, section 4.2).

    Attributes:
        compute_s: training steps alone.
        prep_s: added when minibatches are prepared, with all samples in memory.
        fetch_s: added when the samples come from storage through a cache of limited size.
        other_s: the rest. It is negative if the run with all samples in memory was slower, which is noise.
    """

    compute_s: float
    prep_s: float
    fetch_s: float
    other_s: float


def differential(epoch_s: float, *, cached_epoch_s: float, compute_s: float) -> Stalls:
    """Divide an epoch's time.

    Args:
        epoch_s: the epoch.
        cached_epoch_s: the same epoch with all samples in memory.
        compute_s: the training steps alone.
    """
    prep_s = max(0.0, cached_epoch_s - compute_s)
    fetch_s = max(0.0, epoch_s - cached_epoch_s)
    return Stalls(compute_s, prep_s, fetch_s, epoch_s - compute_s - prep_s - fetch_s)


@dataclass(frozen=True)
class Plan:
    """The requested part of the table."""

    storage_bytes_per_s: tuple[float, ...]
    cached: tuple[float, ...]
    modes: tuple[Mode, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.cached or not all(0 < share <= 1 for share in self.cached):
            shares = ", ".join(f"{share:g}" for share in self.cached) or "nothing"
            raise ConfigError(f"cached shares must be above 0 and at most 1, got {shares}")

    def cells(self) -> Iterator[Cell]:
        """List all cells, in running order. The references of a mode come first, because its stalls need them."""
        for mode in self.modes:
            steps = [step for step in STEPS[mode] if step in self.steps]
            if mode == "hyperband":
                yield Cell(mode, "compute", None, 1.0)
            yield from (Cell(mode, step, None, 1.0) for step in steps)
            for rate, cached, step in product(self.storage_bytes_per_s, self.cached, steps):
                yield Cell(mode, step, rate, cached)


@dataclass(frozen=True)
class Preset:
    """Defaults of the command's options, as on its command line."""

    storage: str
    cached: str
    modes: str
    images: int
    epochs: int


LONG = Preset("15MB/s,50MB/s,530MB/s", "0.35,0.5,0.75,1", ",".join(STEPS), images=800, epochs=3)
"""The whole table."""

SHORT = Preset("15MB/s", "0.5", "eight", images=200, epochs=2)
"""Some minutes on two cores."""


def read_records(file: Path) -> list[Record]:
    """Read the finished cells. A missing file has none.

    Raises:
        ConfigError: a line has another form.
    """
    try:
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [msgspec.json.decode(line, type=Record) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} must contain results of this version of the benchmark: {error}") from None


def append_record(file: Path, record: Record) -> None:
    """Add a finished cell; the file and its folder are created."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(record) + b"\n")


def unfinished(cells: Iterable[Cell], workload: Workload, records: Sequence[Record]) -> list[Cell]:
    """Return the cells without a result for this workload."""
    done = {record.cell for record in records if record.workload == workload}
    return [cell for cell in cells if cell not in done]


def commit() -> str:
    """Return the commit of this checkout, with a "+" if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
