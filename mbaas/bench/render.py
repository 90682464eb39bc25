"""The benchmark's tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mbaas.bench.bookkeeping import Cost
from mbaas.bench.ready import Readiness
from mbaas.bench.report import BenchReport, RowResult

NAMES = {
    "prep": "P: prep alone, all cores",
    "dataloader": "PyTorch DataLoader per trial",
    "dali": "DALI per trial",
    "mbaas": "one mbaas feed",
}


def render(report: BenchReport) -> RenderableType:
    """A table for each number of trials and batch size, and what the figures mean."""
    return Group(*_parts(report))


def _parts(report: BenchReport) -> Iterator[RenderableType]:
    settings = report.settings
    yield Text(_heading(report))
    for trials in settings.trials:
        for batch in settings.batches:
            yield _table(report, trials, batch)
    for result in report.results:
        if result.row == "mbaas" and result.rounds:
            yield Text(_breakdown(result))
    for result in report.results:
        for error in result.errors:
            yield Text(f"{_named(result)}, failed:\n{error.strip()}")
    yield Text(_notes(report), style="dim")


def _breakdown(result: RowResult) -> str:
    """Where the CPU seconds of a delivered sample go."""
    busy = ((kind, 1e6 * cores / result.samples_per_s) for kind, cores in result.cores_by_kind)
    parts = ", ".join(f"{kind} {us:.1f}" for kind, us in busy if us >= 0.05)
    return f"{_named(result)}, CPU-us a delivered sample: {parts}"


def _named(result: RowResult) -> str:
    return f"{NAMES[result.row]}, {result.trials} trial{'s' * (result.trials > 1)}, batches of {result.batch}"


def _heading(report: BenchReport) -> str:
    machine, settings = report.machine, report.settings
    return (
        f"{report.samples:,} images, random-resized-crop 224 and flip; medians of {settings.rounds} rounds\n"
        f"{machine.cpu}, {settings.cores} of {machine.cpus} CPUs used, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"Python {machine.python}, {', '.join(machine.libraries)}; {machine.when}"
    )


def _table(report: BenchReport, trials: int, batch: int) -> Table:
    table = Table(title=f"{trials} trial{'s' * (trials > 1)}, batches of {batch}", title_justify="left")
    table.add_column("")
    for heading in (
        "samples/s",
        "of N x P",
        "by CPU",
        "CPU-s per 1,000",
        "cores busy",
        "peak GB",
        "missing",
        "repeated",
        "spilled",
    ):
        table.add_column(heading, justify="right")
    for result in report.results:
        if (result.trials, result.batch) == (trials, batch):
            table.add_row(NAMES[result.row], *_cells(result), style="bold" if result.row == "mbaas" else None)
    return table


def _cells(result: RowResult) -> list[str]:
    if not result.rounds:
        return ["failed"]
    return [
        f"{result.samples_per_s:,.0f}",
        _percent(result.share),
        _percent(result.cpu_share),
        f"{result.cpu_s_per_1000:.2f}",
        f"{result.busy_cores:.2f}",
        f"{result.peak_bytes / 1e9:.2f}",
        f"{result.missing:,}",
        f"{result.repeated:,}",
        f"{result.spilled_bytes / 1e6:,.0f} MB" if result.row == "mbaas" else "",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _notes(report: BenchReport) -> str:
    epochs = sum(result.epochs for result in report.results)
    array = "read-only numpy views" if report.settings.array == "numpy" else "private torch tensors"
    return (
        "samples/s: delivered, summed over trials, in whole epochs after a warm-up as long. "
        "N x P: what N trials would get if each sample were prepared once and given to all for nothing. "
        "by CPU: the same share from CPU seconds, which other programs on the machine hardly change. "
        "CPU-s: of all processes of the row, daemons included, for 1,000 delivered samples. "
        "peak: memory of all processes, shared pages counted once, page cache not counted. "
        f"missing, repeated: over {epochs:,} epochs, each checked sample by sample.\n"
        "No row reads storage: files are in the page cache for DataLoader and DALI, in the feed's cache for mbaas, "
        "in the processes for P. The same decode code runs in P, DataLoader and mbaas; "
        f"mbaas trials get {array}."
    )


def render_costs(costs: list[Cost]) -> Table:
    """A line for each size of dataset."""
    table = Table(title="order and bookkeeping, ns a sample", title_justify="left")
    for heading in ("samples", *costs[0].ns_per_sample):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(f"{cost.samples:,}", *(f"{ns:.1f}" for ns in cost.ns_per_sample.values()))
    return table


def render_readiness(results: list[Readiness]) -> Table:
    """A line for each format."""
    table = Table(title="a trial whose data is always ready, against a loop over memory", title_justify="left")
    for heading in ("format", "batch", "step", "loss", "least", "most"):
        table.add_column(heading, justify="right")
    for result in results:
        losses = (f"{loss:.1%}" for loss in (result.loss, min(result.losses), max(result.losses)))
        table.add_row(result.array, str(result.batch), f"{1e3 * result.step_s:.0f} ms", *losses)
    return table
