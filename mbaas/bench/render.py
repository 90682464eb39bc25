"""The benchmark's tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mbaas.bench.bookkeeping import Cost
from mbaas.bench.node_report import Loading, NodesReport, NodesResult
from mbaas.bench.ready import Readiness
from mbaas.bench.report import BenchReport, Machine, RowResult
from mbaas.bench.scale_check import Checked
from mbaas.bench.scale_plan import Outlook, Scaling

NAMES = {
    "prep": "P, prep alone",
    "dataloader": "DataLoader per trial",
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
    settings = report.settings
    return (
        f"{report.samples:,} images, random-resized-crop 224 and flip; medians of {settings.rounds} rounds\n"
        f"{_machine(report.machine, settings.cores)}"
    )


def _machine(machine: Machine, cores: int | None = None) -> str:
    return (
        f"{machine.cpu}, {cores or machine.cpus} of {machine.cpus} CPUs used, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"Python {machine.python}, {', '.join(machine.libraries)}; {machine.when}"
    )


def _table(report: BenchReport, trials: int, batch: int) -> Table:
    headings = ("", "samples/s", "of NxP", "by CPU", "CPU-s", "cores", "GB", "faults")
    table = _empty_table(f"{trials} trial{'s' * (trials > 1)}, batches of {batch}", headings, words=("",))
    for result in report.results:
        if (result.trials, result.batch) == (trials, batch):
            table.add_row(NAMES[result.row], *_cells(result), style="bold" if result.row == "mbaas" else None)
    return table


def _empty_table(title: str, headings: Iterable[str], words: Collection[str] = ()) -> Table:
    """A table of figures that fits 80 columns; columns of ``words`` begin at the left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=True)
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
        ", ".join(_faults(result)) or "none",
    ]


def _faults(result: RowResult) -> Iterator[str]:
    if result.missing:
        yield f"{result.missing:,} missing"
    if result.repeated:
        yield f"{result.repeated:,} repeated"
    if result.spilled_bytes:
        yield f"{result.spilled_bytes / 1e6:,.0f} MB spilled"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _notes(report: BenchReport) -> str:
    epochs = sum(result.epochs for result in report.results)
    array = "read-only numpy views" if report.settings.array == "numpy" else "private torch tensors"
    return (
        "samples/s: delivered, summed over trials, in whole epochs after a warm-up as long. "
        "P: what all cores prepare without any transport; "
        "NxP: what N trials would get if each sample were prepared once and given to all for nothing. "
        "by CPU: the same share from CPU seconds, which other programs on the machine hardly change. "
        "CPU-s: of all processes of the row, daemons included, for 1,000 delivered samples. "
        "cores: that were busy. GB: peak memory of all processes, shared pages counted once, page cache not counted. "
        f"faults: samples missing or repeated in {epochs:,} epochs, each checked sample by sample, and bytes that Ray "
        "spilled to disk.\n"
        "No row reads storage: files are in the page cache for DataLoader and DALI, in the feed's cache for mbaas, "
        "in the processes for P. The same decode code runs in P, DataLoader and mbaas; "
        f"mbaas trials get {array}."
    )


def render_costs(costs: list[Cost]) -> Table:
    """A line for each size of dataset."""
    table = _empty_table("order and bookkeeping, ns a sample", ("samples", *costs[0].ns_per_sample))
    for cost in costs:
        table.add_row(f"{cost.samples:,}", *(f"{ns:.1f}" for ns in cost.ns_per_sample.values()))
    return table


def render_readiness(results: list[Readiness]) -> Table:
    """A line for each format."""
    title = "a trial whose data is always ready, against a loop over memory"
    table = _empty_table(title, ("format", "batch", "step", "loss", "least", "most"))
    for result in results:
        losses = (f"{loss:.1%}" for loss in (result.loss, min(result.losses), max(result.losses)))
        table.add_row(result.array, str(result.batch), f"{1e3 * result.step_s:.0f} ms", *losses)
    return table


def render_nodes(report: NodesReport) -> RenderableType:
    """A table for each cache share, and what is wrong."""
    return Group(*_nodes_parts(report))


def _nodes_parts(report: NodesReport) -> Iterator[RenderableType]:
    first = report.results[0]
    yield Text(
        f"{first.samples:,} images, {first.dataset_bytes / 1e6:.1f} MB; storage gives each node "
        f"{report.settings.storage_mb_s:g} MB/s; every node trains on all images\n{_machine(report.machine)}"
    )
    for share in report.settings.cache_shares:
        yield _nodes_table([result for result in report.results if result.cache_share == share], share)
    for result in report.results:
        for fault in result.faults:
            yield Text(f"{_size(result)}: {fault}", style="bold red")
    yield Text(
        "feed: all nodes on one mbaas feed; alone: each node loads all that it trains on. "
        "first, later: seconds of the first epoch, and median of the others, until the last node was done. "
        "MB of an epoch, all nodes together: read from storage in the first and in the others, prepared, and raw bytes "
        "that crossed nodes (the most of any epoch). cached: raw MB that each node keeps.",
        style="dim",
    )


def _size(result: NodesResult) -> str:
    return f"{result.nodes} node{'s' * (result.nodes > 1)}, caches for {result.cache_share:.0%}"


def _nodes_table(results: list[NodesResult], share: float) -> Table:
    headings = ("nodes", "", "first", "later", "storage", "later", "prepared", "crossed", "cached")
    table = _empty_table(f"all caches together hold {share:.0%} of the images", headings, words=("",))
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


def render_scaling(scaling: Scaling) -> RenderableType:
    """Costs, the check against real runs, and what the model says of larger systems."""
    return Group(*_scaling_parts(scaling))


def _scaling_parts(scaling: Scaling) -> Iterator[RenderableType]:
    yield Text(_machine(scaling.machine))
    yield _costs_text(scaling)
    if scaling.checked:
        yield _check_table(scaling.checked)
    yield _outlook_table(scaling.outlooks)
    site = scaling.site
    for trials, nodes in scaling.full_at.items():
        who = "as many trials as nodes" if not trials else f"{trials} trial{'s' * (trials > 1)}"
        yield Text(f"one coordinator is full: {who}, from {nodes} nodes on" if nodes else f"{who}: never full")
    yield Text(
        f"A node: {site.workers} prep workers of {1 / site.prep_s:.0f} samples/s, a link of "
        f"{site.link_bytes_per_s / 1e9:.3g} GB/s; all caches together hold the dataset of {site.samples:,} samples; "
        f"{site.staging_bytes / 2**30:.0f} GiB of staging. A trial alone trains on "
        f"{site.trial_samples_per_s:.0f} samples/s. full: what has no time left; coordinator: how busy it is; "
        "otherwise: the rate that all but the coordinator allow; lanes: coordinators that this takes.",
        style="dim",
    )


def _costs_text(scaling: Scaling) -> Text:
    costs = scaling.costs
    shown = {
        "part": costs.part_s,
        "call": costs.ask_s,
        "delivery": costs.delivery_s,
        "part in a delivery": costs.ref_s,
        "fetch": costs.fetch_s,
        "block in a trial": costs.open_s,
        "part in a trial": costs.open_part_s,
        "pull": costs.pull_s,
    }
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in shown.items())
    return Text(
        f"{times}; cutting a block: {1e6 * costs.cut_node_s:.0f} us and {1e9 * costs.cut_s:.0f} ns a sample, for each "
        f"node. The coordinator's CPU seconds are explained to {scaling.cost_error:.0%}."
    )


def _check_table(checked: tuple[Checked, ...]) -> Table:
    title = "the model against real feeds on this machine, samples/s of each trial"
    table = _empty_table(title, ("full", "nodes", "real", "model", "error", "cores of others"), words=("full",))
    for one in sorted(checked, key=lambda one: one.case):
        real, said = f"{one.real_samples_per_s:,.0f}", f"{one.said_samples_per_s:,.0f}"
        table.add_row(one.case, str(one.nodes), real, said, f"{one.error:+.0%}", f"{one.others_cores:.1f}")
    return table


def _outlook_table(outlooks: tuple[Outlook, ...]) -> Table:
    title = "larger systems, samples/s of each trial with one coordinator"
    headings = ("nodes", "trials", "rate", "full", "coordinator", "otherwise", "lanes", "epoch")
    table = _empty_table(title, headings, words=("full",))
    for one in outlooks:
        table.add_row(
            f"{one.nodes:,}",
            f"{one.trials:,}",
            f"{one.samples_per_s:,.0f}",
            one.full,
            f"{one.busy['coordinator']:.0%}",
            f"{one.otherwise_samples_per_s:,.0f}",
            f"{one.lanes:,}",
            f"{one.epoch_s / 3600:,.0f} h",
        )
    return table
