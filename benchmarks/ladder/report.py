"""The table of the ladder: figures of each cell, stalls, speed-ups, and the paper's speed-ups next to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.ladder.cells import Cell, CellResult, Mode, Record, Stalls, Step, differential
from mbaas.base.units import count, number, percent, rate
from mbaas.tools.bench.render import figure_table, machine_line

TITLES: dict[Mode, str] = {
    "one": "one trial",
    "eight": "{trials} trials with the same step time",
    "ranks-2": "data-parallel trials of 2 ranks, {trials} ranks in all, on one node",
    "ranks-4": "data-parallel trials of 4 ranks, {trials} ranks in all, on one node",
    "ranks-8": "data-parallel trials of 8 ranks, {trials} ranks in all, on one node",
    "hyperband": "Ray Tune, HyperBand, {search_samples} trials, {trials} at a time (figures of the whole search)",
    "nodes": "one data-parallel trial on two nodes (cached: share of the dataset in each node's memory)",
}

HEADINGS = ("step", "samples/s", "gain", "s", "MB", "prep", "fetch", "other", "CPU-s", "faults")

HDD, SSD = 15e6, 530e6
"""Random reads of the paper's hard disk and SSD, in bytes/s (Mohan et al., VLDB 2021)."""


@dataclass(frozen=True)
class Claim:
    """A speed-up of the paper.

    Attributes:
        where: figure or section.
        what: the comparison, in words.
        paper: the published figure, or "".
        mode, step, against: our cells; the speed-up of ``step`` over ``against``.
        storage_bytes_per_s: only cells with this storage; None: all with a limit.
    """

    where: str
    what: str
    paper: str
    mode: Mode
    step: Step
    against: Step = "dataloader"
    storage_bytes_per_s: float | None = None


CLAIMS = (
    Claim("Fig. 13a", "MinIO instead of the page cache, one server", "1.8x, 2.1x", "one", "minio"),
    Claim("Fig. 13b", "partitioned cache, two servers", "up to 15x", "nodes", "prep"),
    Claim("Fig. 13d", "8 trials, fetch and prep shared", "3x (audio 5.6x)", "eight", "prep"),
    Claim("Fig. 13e", "8 trials, only fetch shared", "", "eight", "fetch"),
    Claim("Fig. 13e", "8 trials, prep shared in addition to fetch", "", "eight", "prep", "fetch"),
    Claim("Fig. 13f", "trials of 2 ranks, fetch and prep shared", "", "ranks-2", "prep"),
    Claim("Fig. 13f", "trials of 4 ranks", "", "ranks-4", "prep"),
    Claim("Fig. 13f", "trials of 8 ranks", "", "ranks-8", "prep"),
    Claim("C.2.3", "HyperBand on HDD, prep shared", "2.5x", "hyperband", "prep-page-cache", storage_bytes_per_s=HDD),
    Claim("C.2.3", "HyperBand on HDD, prep shared and MinIO", "5.5x", "hyperband", "prep", storage_bytes_per_s=HDD),
    Claim("C.2.3", "HyperBand on SSD, prep shared and MinIO", "1.9x", "hyperband", "prep", storage_bytes_per_s=SSD),
    Claim("future work", "8 trials, decoded cache in addition", "", "eight", "decoded", "prep"),
)


@dataclass(frozen=True)
class Row:
    """A cell with the figures that need other cells.

    Attributes:
        record: the cell.
        speed_up: relative to a DataLoader for each trial over the page cache, with the same storage and capacity;
            None if that cell is missing.
        stalls: None if a reference is missing.
    """

    record: Record
    speed_up: float | None
    stalls: Stalls | None


class Results:
    """The records of a workload, the last of each cell."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = {record.cell: record for record in records}

    def rows(self) -> list[Row]:
        """Return the cells with limited storage, in the order of the file."""
        limited = [each for each in self._records.values() if each.cell.storage_bytes_per_s is not None]
        return [Row(each, self.speed_up(each.cell, "dataloader"), self._stalls(each)) for each in limited]

    def speed_up(self, cell: Cell, against: Step) -> float | None:
        """Return the ratio of samples/s to another step with the same mode, storage and capacity."""
        ours, other = self._found(cell), self._found(Cell(cell.mode, against, cell.storage_bytes_per_s, cell.cached))
        return None if ours is None or other is None else ours.samples_per_s / other.samples_per_s

    def speed_ups(self, claim: Claim) -> list[float]:
        """Return the speed-ups of all cells that a claim is about."""
        cells = [
            cell
            for cell in self._records
            if (cell.mode, cell.step) == (claim.mode, claim.step)
            and cell.storage_bytes_per_s is not None
            and claim.storage_bytes_per_s in (None, cell.storage_bytes_per_s)
        ]
        return [ratio for cell in cells if (ratio := self.speed_up(cell, claim.against)) is not None]

    def _found(self, cell: Cell) -> CellResult | None:
        record = self._records.get(cell)
        return None if record is None else record.result

    def _stalls(self, record: Record) -> Stalls | None:
        cached = self._found(record.cell.reference)
        compute_s = record.result.compute_s
        if record.cell.mode == "hyperband":
            compute = self._found(Cell("hyperband", "compute", None, 1.0))
            if compute is None:
                return None
            compute_s = compute.epoch_s
        if cached is None:
            return None
        return differential(record.result.epoch_s, cached_epoch_s=cached.epoch_s, compute_s=compute_s)


def figures(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return all cells as plain values, with speed-ups and stalls where the cells that they need are there."""
    rows = {row.record.cell: row for row in Results(records).rows()}
    plain = []
    for record in records:
        row = rows.get(record.cell)
        more = {"speed_up": row.speed_up, "stalls": row.stalls and asdict(row.stalls)} if row is not None else {}
        plain.append({**asdict(record), **more})
    return plain


def tables(records: Sequence[Record]) -> RenderableType:
    """Return a table for each mode, and the paper's speed-ups."""
    return Group(*_parts(records))


def _parts(records: Sequence[Record]) -> Iterator[RenderableType]:
    if not records:
        yield Text("no cell is finished")
        return
    results, last = Results(records), records[-1]
    workload = last.workload
    commits = ", ".join(dict.fromkeys(record.commit for record in records))
    yield Text(
        f"{count(workload.images)} photographs of about 100 kB; {count(workload.samples_per_s)} samples/s in a trial "
        f"that never waits; minibatches of {workload.batch}; {workload.epochs} measured epochs\n"
        f"{machine_line(last.machine, workload.cores)}; commit {commits}"
    )
    for mode, title in TITLES.items():
        groups: dict[str, list[Row]] = {}
        for row in results.rows():
            if row.record.cell.mode == mode:
                groups.setdefault(_place(row.record.cell), []).append(row)
        if groups:
            yield Text(title.format(**asdict(workload)), style="bold")
        for place, rows in groups.items():
            table = figure_table(place, HEADINGS, words=("step", "faults"))
            for row in rows:
                table.add_row(*cells_of(row))
            yield table
    yield _claims_table(results)
    yield Text(
        "gain: speed-up over a DataLoader for each trial over the page cache, with the same storage and capacity. "
        "s, MB: time and bytes read from storage, in an epoch of all trials together. prep, fetch, other: parts of "
        "the time, by differences between runs: steps alone, everything cached, this cell; other is the rest. "
        "CPU-s: CPU seconds of all processes for 1,000 delivered samples, without the model of the storage.",
        style="dim",
    )


def _place(cell: Cell) -> str:
    return f"{rate(cell.storage_bytes_per_s or 0.0)}, {percent(cell.cached)} cached"


def cells_of(row: Row) -> list[str]:
    """Return a row's texts, in the order of `HEADINGS`."""
    cell, result = row.record.cell, row.record.result
    stalls = row.stalls
    parts = () if stalls is None else (stalls.prep_s, stalls.fetch_s, stalls.other_s)
    return [
        cell.step,
        count(result.samples_per_s),
        "" if row.speed_up is None else f"{row.speed_up:.1f}x",
        number(result.epoch_s),
        number(result.storage_bytes / result.rounds / 1e6),
        *([f"{part / result.epoch_s:.0%}" for part in parts] or [""] * 3),
        number(result.cpu_s_per_1000),
        _faults(result),
    ]


def _faults(result: CellResult) -> str:
    named = {"missing": result.missing, "repeated": result.repeated}
    return ", ".join(f"{count(amount)} {name}" for name, amount in named.items() if amount) or "none"


def _claims_table(results: Results) -> Table:
    table = figure_table(
        "beside the paper", ("where", "what", "paper", "here"), words=("where", "what"), wrapped=("what",)
    )
    for claim in CLAIMS:
        found = results.speed_ups(claim)
        table.add_row(claim.where, claim.what, claim.paper, _range(found))
    return table


def _range(found: Sequence[float]) -> str:
    if not found:
        return "not measured"
    low, high = (f"{ratio:.1f}x" for ratio in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"
