"""Renders the benchmark's tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mbaas.base import units
from mbaas.tools.bench.peers import PEERS
from mbaas.tools.bench.report import DECODED_ROWS, READ_ROW, BenchReport, Machine, RowResult
from mbaas.tools.bench.tasks import TASKS

NAMES = {
    "prep": "P, prep alone",
    "prep-decoded": "P', of decoded",
    "memory": "reading alone",
    "dataloader": "DataLoader per trial",
    "dali": "DALI per trial",
    **{row: peer.name for row, peer in PEERS.items()},
    "mbaas": "one mbaas feed",
    "mbaas-decoded": "one feed, decoded",
}

FEEDS = ("mbaas", "mbaas-decoded")


def render(report: BenchReport) -> RenderableType:
    """Render a table for each number of trials and batch size, with notes that explain the figures."""
    return Group(*_parts(report))


def _parts(report: BenchReport) -> Iterator[RenderableType]:
    settings = report.settings
    yield Text(_heading(report))
    for trials in settings.trials:
        for batch in settings.batch:
            yield _table(report, trials, batch)
    for result in report.results:
        if result.row in FEEDS and result.rounds:
            yield Text(_breakdown(result))
    for result in report.results:
        for error in result.errors:
            yield Text(f"{_named(result)}, failed:\n{error.strip()}")
    for sentence in report.left_out:
        yield Text(sentence)
    yield Text(_notes(report), style="dim")


def _breakdown(result: RowResult) -> str:
    busy = ((kind, 1e6 * cores / result.samples_per_s) for kind, cores in result.cores_by_kind)
    parts = ", ".join(f"{kind} {units.number(us)}" for kind, us in busy if us >= 0.05)
    return f"{_named(result)}{_shares(result)} CPU-us a delivered sample: {parts}"


def _shares(result: RowResult) -> str:
    shares = []
    if result.decoded_share is not None and result.decoded_cpu_share is not None:
        by_cpu = units.percent(result.decoded_cpu_share)
        shares.append(f"{units.percent(result.decoded_share)} of N x P' ({by_cpu} by CPU)")
    if result.best_share is not None and result.best_cpu_share is not None:
        by_cpu = units.percent(result.best_cpu_share)
        shares.append(f"{units.percent(result.best_share)} of what the machine could carry at best ({by_cpu} by CPU)")
    return f": {', '.join(shares)};" if shares else ","


def _named(result: RowResult) -> str:
    return f"{NAMES[result.row]}, {units.counted(result.trials, 'trial')}, batches of {result.batch}"


def _heading(report: BenchReport) -> str:
    settings = report.settings
    task = TASKS[settings.task]
    return (
        f"{report.samples:,} {task.things}, {task.work}; medians of {settings.rounds} rounds\n"
        f"{machine_line(report.machine, settings.cores)}"
    )


def machine_line(machine: Machine, cores: int | None = None) -> str:
    gpu = f"{machine.gpu}; " if machine.gpu else ""
    return (
        f"{gpu}{machine.cpu}, {cores or machine.cpus} of {machine.cpus} CPUs used, {units.size(machine.memory_bytes)}; "
        f"Python {machine.python}, {', '.join(machine.libraries)}; {machine.when}"
    )


def _table(report: BenchReport, trials: int, batch: int) -> Table:
    headings = ("", "samples/s", "of NxP", "by CPU", "CPU-s", "cores", "GB", "faults")
    table = figure_table(
        f"{units.counted(trials, 'trial')}, batches of {batch}", headings, words=("",), wrapped=("faults",)
    )
    for result in report.results:
        if (result.trials, result.batch) == (trials, batch):
            table.add_row(NAMES[result.row], *_cells(result), style="bold" if result.row in FEEDS else None)
    return table


def figure_table(
    title: str, headings: Iterable[str], words: Collection[str] = (), wrapped: Collection[str] = ()
) -> Table:
    """Make a table of figures that fits 80 columns; columns of ``words`` are left-aligned, some may be ``wrapped``."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=heading not in wrapped)
    return table


def _cells(result: RowResult) -> list[str]:
    if not result.rounds:
        return ["failed"]
    return [
        units.count(result.samples_per_s),
        _percent(result.share),
        _percent(result.cpu_share),
        units.number(result.cpu_s_per_1000),
        units.number(result.busy_cores),
        units.number(result.peak_bytes / 1e9),
        ", ".join(_faults(result)) or "none",
    ]


def _faults(result: RowResult) -> Iterator[str]:
    if result.missing:
        yield f"{result.missing:,} missing"
    if result.repeated:
        yield f"{result.repeated:,} repeated"
    if result.spilled_bytes:
        yield f"{units.size(result.spilled_bytes)} spilled"


def _percent(share: float | None) -> str:
    return "" if share is None else units.percent(share)


def _notes(report: BenchReport) -> str:
    epochs = sum(result.epochs for result in report.results)
    return (
        "samples/s: delivered, summed over trials, in whole epochs after a warm-up as long. "
        f"P: what {_who_prepares(report)} without any transport; "
        "NxP: what N trials would get if each sample were prepared once and given to all for nothing. "
        f"{_of_decoded(report)}{_of_reading(report)}"
        "by CPU: the same share from CPU seconds, which other programs on the machine hardly change. "
        "CPU-s: of all processes of the row, daemons included, for 1,000 delivered samples. "
        "cores: that were busy. GB: peak memory of all processes, shared pages counted once, page cache not counted. "
        f"faults: samples missing or repeated in {epochs:,} epochs, each checked sample by sample, and bytes that Ray "
        "spilled to disk.\n"
        "No row reads storage: files are in the page cache for DataLoader and DALI, in the feed's cache for mbaas, "
        f"in the processes for P. {_of_code(report)}{_of_peers(report)}"
    )


def _who_prepares(report: BenchReport) -> str:
    return (
        "as many workers of the dali engine as a feed has prepare on the GPU"
        if report.settings.gpu
        else "all cores prepare"
    )


def _of_code(report: BenchReport) -> str:
    if report.settings.gpu:
        return (
            "The same code prepares on the GPU in P and mbaas; DALI decodes and crops there, each DataLoader on CPUs. "
            "Trials get tensors on the GPU, and wait for each until it was read there."
        )
    array = "read-only numpy views" if report.settings.array == "numpy" else "private torch tensors"
    return f"The same code prepares in P, DataLoader and mbaas; mbaas trials get {array}."


def _of_decoded(report: BenchReport) -> str:
    if not set(DECODED_ROWS) & set(report.settings.rows):
        return ""
    return (
        "P': the same from decoded samples in memory, so N x P' is the limit of a feed that keeps samples decoded. Its "
        "shares are of N x P, too, and may be above 100 %. "
    )


def _of_reading(report: BenchReport) -> str:
    if READ_ROW not in report.settings.rows:
        return ""
    what = "a byte of each page" if report.settings.read == "pages" else "every byte"
    return (
        f"Reading alone: N processes read minibatches in shared memory as trials do, {what}. At best the machine "
        "could carry what is left when each sample is prepared once, without transport, and every trial reads it. "
    )


def _of_peers(report: BenchReport) -> str:
    if not report.peers:
        return ""
    return (
        f"\nPeers: {', '.join(report.peers)}. They promise less of an epoch, so samples that are missing there, or "
        "repeated, do not make the benchmark fail. TensorSocket and Ray Data prepare by the code of mbaas, the tf.data "
        "service by TensorFlow's operators. Ray Data shares by an actor that holds two epochs in memory."
    )
