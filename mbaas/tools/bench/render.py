"""Renders the benchmark's tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mbaas.base import units
from mbaas.tools.bench.peers import PEERS
from mbaas.tools.bench.report import BenchReport, Machine, RowResult
from mbaas.tools.bench.rows import DECODED_ROWS, READ_ROW
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
    settings, results = report.settings, report.results
    return Group(
        Text(_heading(report)),
        *(_table(report, trials, batch) for trials, batch in product(settings.trials, settings.batch)),
        *(Text(_breakdown(result)) for result in results if result.row in FEEDS and result.rounds),
        *(Text(f"{_named(each)}, failed:\n{error.strip()}") for each in results for error in each.errors),
        *map(Text, report.left_out),
        Text(_notes(report), style="dim"),
    )


def _breakdown(result: RowResult) -> str:
    busy = ((kind, 1e6 * cores / result.samples_per_s) for kind, cores in result.cores_by_kind)
    parts = ", ".join(f"{kind} {units.number(us)}" for kind, us in busy if us >= 0.05)
    return f"{_named(result)}{_shares(result)} CPU-us a delivered sample: {parts}"


def _shares(result: RowResult) -> str:
    shares = [
        f"{units.percent(share)} of {whole} ({units.percent(by_cpu)} by CPU)"
        for share, by_cpu, whole in (
            (result.decoded_share, result.decoded_cpu_share, "N x P'"),
            (result.best_share, result.best_cpu_share, "what the machine could carry at best"),
        )
        if share is not None and by_cpu is not None
    ]
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
    shares = ("" if share is None else units.percent(share) for share in (result.share, result.cpu_share))
    counts = {"missing": result.missing, "repeated": result.repeated}
    faults = [f"{count:,} {name}" for name, count in counts.items() if count]
    if result.spilled_bytes:
        faults.append(f"{units.size(result.spilled_bytes)} spilled")
    return [
        units.count(result.samples_per_s),
        *shares,
        *map(units.number, (result.cpu_s_per_1000, result.busy_cores, result.peak_bytes / 1e9)),
        ", ".join(faults) or "none",
    ]


def _notes(report: BenchReport) -> str:
    settings, epochs = report.settings, sum(result.epochs for result in report.results)
    sharing = "N trials"
    if settings.pipelines > 1:
        sharing = f"the trials of each of {settings.pipelines} pipelines (N of them share one, which P goes through)"
    on_gpu = "as many workers of the dali engine as a feed has prepare on the GPU"
    decoded = (
        "P': the same from decoded samples in memory, so N x P' is the limit of a feed that keeps samples decoded. Its "
        "shares are of N x P, too, and may be above 100 %. "
    )
    what = "a byte of each page" if settings.read == "pages" else "every byte"
    reading = (
        f"Reading alone: N processes read minibatches in shared memory as trials do, {what}. At best the machine "
        "could carry what is left when each sample is prepared once, without transport, and every trial reads it. "
    )
    code = "The same code prepares in P, DataLoader and mbaas; mbaas trials get read-only numpy views."
    if settings.gpu:
        code = (
            "The same code prepares on the GPU in P and mbaas; DALI decodes and crops there, each DataLoader on CPUs. "
            "Trials get tensors on the GPU, and wait for each until it was read there."
        )
    peers = (
        f"\nPeers: {', '.join(report.peers)}. They promise less of an epoch, so samples that are missing there, or "
        "repeated, do not make the benchmark fail. TensorSocket and Ray Data prepare by the code of mbaas, the tf.data "
        "service by TensorFlow's operators. Ray Data shares by an actor that holds two epochs in memory."
    )
    return (
        "samples/s: delivered, summed over trials, in whole epochs after a warm-up as long. "
        f"P: what {on_gpu if settings.gpu else 'all cores prepare'} without any transport; "
        f"NxP: what {sharing} would get if each sample were prepared once and given to all for nothing. "
        f"{decoded if {*DECODED_ROWS} & {*settings.rows} else ''}{reading if READ_ROW in settings.rows else ''}"
        "by CPU: the same share from CPU seconds, which other programs on the machine hardly change. "
        "CPU-s: of all processes of the row, daemons included, for 1,000 delivered samples. "
        "cores: that were busy. GB: peak memory of all processes, shared pages counted once, page cache not counted. "
        f"faults: samples missing or repeated in {epochs:,} epochs, each checked sample by sample, and bytes that Ray "
        "spilled to disk.\n"
        "No row reads storage: files are in the page cache for DataLoader and DALI, in the feed's cache for mbaas, "
        f"in the processes for P. {code}{peers if report.peers else ''}"
    )
