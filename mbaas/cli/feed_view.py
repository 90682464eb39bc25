"""Render a feed for a terminal: figures, consumers, workers, nodes, and rates from successive snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from mbaas.base.units import count, counted, duration, number, percent, seconds, size
from mbaas.cli.console import Cell, Rows, facts, stack
from mbaas.errors import FeedRestartingError, MbaasError, WaitTimeoutError
from mbaas.model.sharing import words
from mbaas.model.waits import CLASSES

if TYPE_CHECKING:
    from mbaas.status import ConsumerStatus, DiskStatus, FeedStatus
    from mbaas.wire.consumers import ConsumerReport
    from mbaas.wire.samples import FetchCounts

WINDOW_S = 15.0
"""Averaging time of rates: consumers report every few seconds, so a shorter window would show steps."""

STATE_STYLES = {"busy": "green", "waiting": "yellow", "resting": "dim", "reserved": "dim"}
FEED_STYLES = {"serving": "green", "waiting": "yellow", "failed": "bold red"}
BAR_CELLS = 10
STALL_ALARM = 0.1
"""Stall share above which a consumer is coloured."""

NO_FEED = Text("no feed runs on this cluster", "dim")

SHOWN_CONSUMERS = 12
"""Number of consumers shown by a running `mbaas serve`."""

DETAILS = (">held", ">fetch/prep/peer")
"""Columns of consumers that are left out on a narrow terminal."""

FEW = 5
"""Number of skipped samples and notes shown; ``--json`` has all that the feed stores."""


@dataclass(frozen=True)
class Flow:
    """A feed's totals over some seconds.

    Attributes:
        over_s: length of the time, above 0.
        prepared, delivered: samples prepared, and delivered to consumers, summed over consumers.
        fetched: the prepared samples, by source.
        is_recent: True for the last seconds; False for the whole time since the feed's start.
    """

    over_s: float
    prepared: int
    delivered: int
    fetched: FetchCounts
    is_recent: bool

    @classmethod
    def since_start(cls, now: FeedStatus) -> Flow:
        up = max(now.uptime_s, 1e-9)  # 0 if the feed has just opened
        return cls(up, now.prepared_samples, now.delivered_samples, now.fetched, is_recent=False)

    @classmethod
    def between(cls, before: FeedStatus, now: FeedStatus) -> Flow:
        """Return the totals between two snapshots, or since the start if they are less than a second apart."""
        start, passed = cls.since_start(now), now.uptime_s - before.uptime_s
        if passed < 1.0:  # in less time, the rate would depend on one or two blocks
            return start
        prepared, delivered = start.prepared - before.prepared_samples, start.delivered - before.delivered_samples
        return cls(passed, prepared, delivered, start.fetched - before.fetched, is_recent=True)

    @property
    def prepared_per_s(self) -> float:
        return self.prepared / self.over_s

    @property
    def delivered_per_s(self) -> float:
        return self.delivered / self.over_s


@dataclass
class RateWindow:
    """The last snapshots of one feed; the oldest is at least `WINDOW_S` old once enough time has passed."""

    _seen: deque[FeedStatus] = field(default_factory=deque)

    @property
    def first(self) -> FeedStatus:
        """The oldest snapshot; requires at least one."""
        return self._seen[0]

    def add(self, status: FeedStatus) -> Flow:
        """Add a snapshot, and return the totals since the oldest."""
        if self._seen and status.uptime_s < self._seen[-1].uptime_s:
            self._seen.clear()  # another feed has the name now
        self._seen.append(status)
        while len(self._seen) > 2 and status.uptime_s - self._seen[1].uptime_s >= WINDOW_S:
            self._seen.popleft()
        return Flow.between(self.first, status)


def state_of(error: MbaasError) -> str:
    """Return the state of a feed without a snapshot, in one word."""
    if isinstance(error, FeedRestartingError):
        return "starting"
    return "silent" if isinstance(error, WaitTimeoutError) else "ended"


def feeds(rows: Mapping[str, tuple[FeedStatus, Flow] | MbaasError]) -> RenderableType:
    """Return a table of all feeds of a cluster by name, with the reasons for waits.

    Feeds without a status have an error instead.
    """
    if not rows:
        return NO_FEED
    headings = "feed", "state", ">trials", ">prepared/s", ">delivered/s", ">staged", ">hits", ">up"
    table = _table(headings, (_feed_cells(*row) for row in rows.items()))
    waits = [
        Text.assemble((name, "bold"), (" waits: ", "yellow"), wait)
        for name, row in rows.items()
        for wait in ([str(row)] if isinstance(row, MbaasError) else row[0].waits_for)
    ]
    return Group(table, *waits) if waits else table


def _feed_cells(name: str, row: tuple[FeedStatus, Flow] | MbaasError) -> dict[str, Cell]:
    if isinstance(row, MbaasError):
        return {"feed": (name, "bold"), "state": (state_of(row), "yellow")}
    status, flow = row
    reserved = _reserved(status)
    return {
        "feed": (name, "bold"),
        "state": (status.state, FEED_STYLES[status.state]),
        "trials": f"{len(_present(status))}{f' (+{reserved} reserved)' if reserved else ''}",
        "prepared/s": count(flow.prepared_per_s),
        "delivered/s": count(flow.delivered_per_s),
        "staged": size(status.staged_bytes),
        "hits": percent(status.hit_rate),
        "up": duration(status.uptime_s, parts=1),
    }


def _table(headings: Iterable[str], rows: Iterable[Mapping[str, Cell]]) -> Table:
    """Return a table of the values under its ``headings``; missing ones are empty."""

    def cell_of(name: str) -> Callable[[Mapping[str, Cell]], Cell]:
        return lambda row: row.get(name, "")

    return Rows(rows).table(*((heading, cell_of(heading.lstrip(">"))) for heading in headings))


def feed(status: FeedStatus, flow: Flow) -> RenderableType:
    notes = _section("last notes", map(Text, status.notes[-FEW:])) if status.notes else None
    bad = _bad_samples(status) if status.skipped_total else None
    pipelines = _pipelines(status) if len(status.pipelines) > 1 else None
    changes = _worker_changes(status) if status.worker_changes else None
    nodes = _nodes(status), _disks(status)
    tables = _consumers(status), _waits(status), _ranks(status), pipelines, _workers(status), changes, *nodes
    return stack([headline(status), _facts(status, flow), *tables, bad, notes])


def compact(status: FeedStatus, flow: Flow) -> RenderableType:
    """Return the page of a running `mbaas serve`, with at most `SHOWN_CONSUMERS`."""
    foot = [Text(note, no_wrap=True, overflow="ellipsis") for note in status.notes[-1:]]
    foot.append(Text("Ctrl-C ends the feed, and so does `mbaas stop` from elsewhere", "dim"))
    return stack([headline(status), _facts(status, flow), _consumers(status, SHOWN_CONSUMERS), Group(*foot)])


def one_line(status: FeedStatus, flow: Flow) -> str:
    """Return the figures on one line, for a log."""
    # Without reservations, whose 0 % would lower the mean.
    stalls = [m.report.stall_share for m in status.consumers if m.state != "reserved"]
    stall = f", stall {percent(sum(stalls) / len(stalls))}" if stalls else ""
    reserved = _reserved(status)
    return (
        f"{status.name}: {counted(len(_present(status)), 'trial')}{f', {reserved} reserved' if reserved else ''}, "
        f"prepared {count(status.prepared_samples)} ({count(flow.prepared_per_s)}/s), "
        f"delivered {count(status.delivered_samples)} ({count(flow.delivered_per_s)}/s), "
        f"staged {size(status.staged_bytes)} of {size(status.staging_bytes)}, "
        f"cache hits {percent(status.hit_rate)}{stall}, up {duration(status.uptime_s)}"
        + (f", waits: {'; '.join(status.waits_for)}" if status.waits_for else "")
    )


def headline(status: FeedStatus) -> Text:
    text = Text.assemble((status.name, "bold"), " ")  # not markup: names may contain brackets
    text.append(status.state, FEED_STYLES[status.state])
    text.append(f" · {count(status.samples)} samples · minibatches of {status.batch_size}", "dim")
    shared = f" with DALI for {percent(status.dali_share)}" if status.dali_share < 1 else ""
    text.append(f" · {status.engine} engine{shared} · up {duration(status.uptime_s)}", "dim")
    if status.failed:
        text.append(f"\n{status.failed}", "red")
    for wait in status.waits_for:
        text.append(f"\nwaits: {wait}", "yellow")
    return text


def _facts(status: FeedStatus, flow: Flow) -> RenderableType:
    return facts(_figures(status, flow), Column(justify="right", no_wrap=True), Column(style="dim"))


def _figures(status: FeedStatus, flow: Flow) -> Iterator[tuple[str | Text, str, str | Text]]:
    over = f"last {seconds(flow.over_s)}" if flow.is_recent else "mean since the start"
    remade = f", {counted(status.remade_blocks, 'block')} re-made" if status.remade_blocks else ""
    yield from _first_epoch(status, flow)
    if status.engine_choice is not None and status.engine_choice.cpu_per_s is not None:
        yield "engine", status.engine, status.engine_choice.reason
    yield "prepared", count(status.prepared_samples), f"{count(flow.prepared_per_s)}/s, {over}{remade}"
    yield "delivered", count(status.delivered_samples), f"{count(flow.delivered_per_s)}/s, {words(status.sharing)}"
    kept = ", kept for all epochs" if status.keeps_all else ""
    of_staging = f" of {size(status.staging_bytes)} in {counted(status.staged_blocks, 'block')}{kept}"
    staged = bar(status.staged_bytes, status.staging_bytes).append(of_staging)
    yield "staged", size(status.staged_bytes), staged
    of_cache = (
        f" of {size(status.cache_bytes)}, {count(status.cached_samples)} samples, {percent(status.hit_rate)} hits"
    )
    yield "cached", size(status.cached_bytes), bar(status.cached_bytes, status.cache_bytes).append(of_cache)
    yield from _decoded(status)
    if firsts := _first_batches(status):
        waited = f"median of {counted(len(firsts), 'trial')}, at most {seconds(max(firsts))}, from joining"
        yield "first batch", seconds(median(firsts)), waited
    yield from _lending(status)
    if moves_s := status.moves_s:
        moved = f"median of {counted(len(moves_s), 'worker')} from other feeds, decision to first part"
        yield "moves", seconds(median(moves_s)), moved
    yield from _costs(status)
    if status.skipped_total:
        yield Text("skipped", "yellow"), count(status.skipped_total), "bad samples left out"
    if status.inexact_epochs:
        name = Text("inexact", "bold red")
        yield name, count(status.inexact_epochs), "epochs with missing or repeated samples"


def _decoded(status: FeedStatus) -> Iterator[tuple[str, str, str]]:
    amounts = [(status.decoded, "of the cache"), (status.decoded_on_disk, "on disk")]
    places = [f"{counted(amount.samples, 'sample')} {place}" for amount, place in amounts if amount.samples]
    if places:
        share = percent(status.fetched.decoded.samples / max(1, status.fetched.all.samples))
        nbytes = sum(amount.nbytes for amount, _ in amounts)
        yield "decoded", size(nbytes), f"{' and '.join(places)}, for {share} of prepared samples"


def _lending(status: FeedStatus) -> Iterator[tuple[str, str, str]]:
    # Only for a feed that has loans, or whose options about loans are not the default.
    lending = status.lending
    if lending is None:
        return
    shared = [f"{workers} from {feed}" for feed, workers in lending.borrowed.items()]
    shared += [f"{workers} to {feed}" for feed, workers in lending.lent.items()]
    quota = "" if lending.max_borrowed is None else f", borrows at most {lending.max_borrowed}"
    bounds = f"keeps at least {lending.min_workers}{quota}, weight {number(lending.weight)}"
    if shared or quota or lending.min_workers > 1 or lending.weight != 1:
        moved = sum((*lending.borrowed.values(), *lending.lent.values()))
        yield "loans", f"{moved}", f"{', '.join(shared) or 'none'}; {bounds}"


def _costs(status: FeedStatus) -> Iterator[tuple[str, str, str]]:
    # Compared with the least cost of a DataLoader in each trial. Unknown before the first sample.
    costs = status.costs
    if not costs.sample_cpu_s or not costs.alone_sample_cpu_s:
        return
    price, per_h = costs.price(costs.cpu_s), costs.cpu_price_per_h
    money = f", {number(price)} at {number(per_h)} an hour" if price is not None and per_h is not None else ""
    each, alone = seconds(costs.sample_cpu_s), seconds(costs.alone_sample_cpu_s)
    pays = costs.pays_from(status.prepared_samples)
    from_trials = f"; pays from {counted(pays, 'trial')} on" if pays is not None else ""
    remark = (
        f"of the CPU time of a DataLoader in each trial: {each} instead of at least {alone} for a delivered sample, "
        f"{seconds(costs.cpu_s)} in all{money}{from_trials}"
    )
    yield "cost", percent(1 / costs.ratio), remark


def _first_epoch(status: FeedStatus, flow: Flow) -> Iterator[tuple[str, str, Text]]:
    # Caches fill in the first epoch, so it is slower than later ones, and its progress is shown.
    left = status.samples - status.prepared_samples
    if left <= 0 or status.restarts:  # a restarted coordinator counts from 0, and caches may be full
        return
    remaining = f", about {duration(left / flow.prepared_per_s, parts=1)} left" if flow.prepared_per_s else ""
    made = bar(status.prepared_samples, status.samples).append(f" of {count(status.samples)} samples{remaining}")
    yield "first epoch", percent(status.prepared_samples / status.samples), made


def _first_batches(status: FeedStatus) -> list[float]:
    """Return each trial's seconds from joining to the first minibatch; the maximum over its ranks."""
    found: dict[str, float] = {}
    for consumer in status.consumers:
        if consumer.report.time_to_first_batch_s:
            found[consumer.trial] = max(found.get(consumer.trial, 0.0), consumer.report.time_to_first_batch_s)
    return list(found.values())


def _consumers(status: FeedStatus, most: int | None = None) -> RenderableType:
    if not status.consumers:
        return _section("consumers", [Text(f'none; they join with mbaas.join("{status.name}")', "dim")])
    shown = status.consumers[:most]
    headings = [
        "consumer", "state", ">epoch", ">block", ">held", ">samples", ">stall", ">fetch/prep/peer", "last epoch",
    ]  # fmt: skip
    # Most feeds have one cohort, so the column is useless; if all blocks are kept, each consumer has its own.
    cohorts = not status.keeps_all and len({consumer.cohort for consumer in status.consumers}) > 1
    pipelines = ["pipeline"] if any(consumer.pipeline for consumer in status.consumers) else []
    headings += [*([">cohort"] if cohorts else []), *pipelines]
    fewer = [heading for heading in headings if heading not in DETAILS]
    table = _FirstThatFits(consumer_table(headings, shown), consumer_table(fewer, shown))
    rest = len(status.consumers) - len(shown)
    lines = [Text(f"and {rest} more", "dim")] if rest else []
    lines += [Text.assemble((m.name, "bold"), (" waits: ", "yellow"), m.waits_for) for m in shown if m.waits_for]
    lines += [Text.assemble((m.name, "bold"), (" split off: ", "dim"), m.apart) for m in shown if cohorts and m.apart]
    return Group(table, *(Padding(text, (0, 0, 0, 2)) for text in lines))


class _FirstThatFits:
    """The first table that fits on the terminal, or the last one; the names in others would be folded."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widest = options.update(width=10_000)  # otherwise a table is measured as folded
        for table in self._tables:
            if table is self._tables[-1] or Measurement.get(console, widest, table).maximum <= options.max_width:
                yield table
                return


def consumer_table(
    headings: Sequence[str],
    consumers: Iterable[ConsumerStatus],
    reports: Mapping[str, ConsumerReport] = MappingProxyType({}),
) -> Table:
    """Return a table of consumers; ``headings`` are keys of `_cells`.

    Args:
        reports: consumer -> totals to show; by default the totals since it joined.
    """
    return _table(headings, (_cells(each, reports.get(each.name, each.report)) for each in consumers))


def _cells(consumer: ConsumerStatus, report: ConsumerReport) -> dict[str, Cell]:
    busy_s = report.wait_s + report.step_s
    stalls_s = report.prep_stall_s, report.fetch_stall_s, report.peer_stall_s
    prep, fetch, peer = (percent(part_s / busy_s) if busy_s else "-" for part_s in stalls_s)
    parts = "/".join(share.removesuffix(" %") for share in (fetch, prep, peer)) + " %" if report.wait_s else "-"
    return {
        "consumer": (consumer.name, "bold"),
        "state": (consumer.state, STATE_STYLES.get(consumer.state, "")),
        "epoch": consumer.epoch,
        "block": f"{consumer.block}/{consumer.blocks_per_epoch}",
        "done": percent(consumer.block / consumer.blocks_per_epoch),
        "held": consumer.held_blocks,
        "samples": count(report.samples),
        "samples/s": count(report.samples / busy_s) if busy_s else "-",
        "stall": (percent(report.stall_share) if busy_s else "-", "yellow" if report.stall_share > STALL_ALARM else ""),
        "prep": (prep, "dim"),
        "fetch": (fetch, "dim"),
        "peer": (peer, "dim"),
        "fetch/prep/peer": (parts, "dim"),
        "last epoch": _last_epoch(consumer),
        "cohort": consumer.cohort,
        "pipeline": consumer.pipeline or "the feed's",
        "waits for": (consumer.waits_for, "yellow"),
    }


def _last_epoch(consumer: ConsumerStatus) -> Text:
    ledger = consumer.last_ledger
    if ledger is None:
        return Text("-", "dim")
    if ledger.exact:
        return Text(f"{ledger.epoch} exact", "green")
    # In capitals, because logs have no colours.
    return Text(f"{ledger.epoch} INEXACT: {count(ledger.samples)} of {count(ledger.expected_samples)}", "bold red")


SHOWN_WAITS = (("<1 ms", 1), ("<10 ms", 3), ("<100 ms", 5), ("<1 s", 7), ("<10 s", 9), ("longer", CLASSES))
"""Columns of the table of waits -> index after the last class in the column (`mbaas.model.waits`)."""


def _waits(status: FeedStatus) -> RenderableType | None:
    """Return a table of each consumer's minibatches by wait, in percent; None before the first minibatch."""
    found = [each for each in status.consumers if each.report.waits.total]
    if not found:
        return None

    def share(first: int, end: int) -> Callable[[ConsumerStatus], Cell]:
        def cell(consumer: ConsumerStatus) -> Cell:
            waits = consumer.report.waits
            minibatches = sum(waits.counts[first:end])
            return percent(minibatches / waits.total) if minibatches else ("-", "dim")

        return cell

    firsts = (0, *(end for _, end in SHOWN_WAITS))
    columns = ((f">{name}", share(first, end)) for first, (name, end) in zip(firsts, SHOWN_WAITS, strict=False))
    return Rows(found).table(
        ("waits for minibatches", lambda each: each.name),
        (">number", lambda each: count(each.report.waits.total)),
        *columns,
    )


def _ranks(status: FeedStatus) -> RenderableType | None:
    """Return a table of uneven steps in data-parallel trials; None without such trials."""
    if not status.rank_steps:
        return None
    return Rows(status.rank_steps).table(
        ("data-parallel trial", lambda each: each.trial),
        (">ranks", lambda each: each.ranks),
        (">steps", lambda each: count(each.steps)),
        (">uneven", lambda each: percent(each.uneven / each.steps) if each.steps else "-"),
    )


def _pipelines(status: FeedStatus) -> RenderableType:
    return Rows(status.pipelines).table(
        ("pipeline", lambda each: each.pipeline or "the feed's"),
        (">trials", lambda each: len(each.trials)),
        (">prepared", lambda each: count(each.samples)),
        (">worker time", lambda each: seconds(each.prep_s)),
        (">a sample", lambda each: seconds(each.prep_s / each.samples) if each.samples else "-"),
        ("difference", lambda each: each.difference),
    )


def _workers(status: FeedStatus) -> RenderableType:
    return Rows(status.workers).table(
        ("worker", lambda worker: worker.name),
        (">pid", lambda worker: worker.pid),
        (">tasks", lambda worker: worker.tasks),
        (">samples", lambda worker: count(worker.samples)),
        (">samples/s", lambda worker: count(worker.samples_per_s) if worker.samples_per_s else "-"),
    )


def _worker_changes(status: FeedStatus) -> RenderableType:
    return Rows(status.worker_changes[-FEW:]).table(
        ("workers", lambda change: " and ".join(change.causes)),
        (">number", lambda change: f"{change.before} to {change.after}"),
        (">ago", lambda change: duration(max(0.0, status.uptime_s - change.at_s), parts=1)),
        (">predicted", lambda change: _gain(change.predicted_per_s)),
        (">gained", lambda change: "-" if change.gained_per_s is None else _gain(change.gained_per_s)),
        ("prediction", lambda change: change.basis),
    )


def _gain(per_s: float) -> str:
    return f"{'-' if per_s < 0 else '+'}{count(abs(per_s))}/s"


def _nodes(status: FeedStatus) -> RenderableType:
    return Rows(status.nodes).table(
        ("node", lambda node: node.node[:8]),
        (">workers", lambda node: node.workers),
        (">fetch threads", lambda node: node.fetch_threads),
        (">cached", lambda node: size(node.cached_bytes)),
        (">decoded", lambda node: count(node.decoded.samples + node.decoded_on_disk.samples)),
        (">read ahead", lambda node: size(node.readahead_bytes)),
        (">storage/s", lambda node: size(node.speeds.storage) if node.speeds.storage is not None else "-"),
    )


def _disks(status: FeedStatus) -> RenderableType | None:
    """Return a table of the nodes' disks; None without any."""
    found = [(node.node, disk) for node in status.nodes for disk in node.disks]
    if not found:
        return None
    return Rows(found).table(
        ("disk", lambda each: each[1].path),
        ("node", lambda each: each[0][:8]),
        (">used", lambda each: size(each[1].used_bytes)),
        (">at most", lambda each: size(each[1].max_bytes)),
        (">thread/s", lambda each: "-" if each[1].bytes_per_s is None else size(each[1].bytes_per_s)),
        ("state", lambda each: _disk_state(each[1])),
        text_folds=True,
    )


def _disk_state(disk: DiskStatus) -> Cell:
    if disk.failure:
        return f"{'stores no more' if disk.is_used else 'dropped'}: {disk.failure}", "yellow"
    return "used" if disk.is_used else "not used: no faster than storage"


def _bad_samples(status: FeedStatus) -> RenderableType:
    lines = [
        Text.assemble(bad.uri, (f": {bad.reason}", "yellow"), (f", {counted(bad.times, 'time')}", "dim"))
        for bad in status.skipped[:FEW]
    ]
    if len(status.skipped) > FEW:
        lines.append(Text(f"and {count(len(status.skipped) - FEW)} more", "dim"))
    return _section("bad samples", lines)


def _section(title: str, lines: Iterable[Text]) -> RenderableType:
    return Group(Text(title, "bold"), *(Padding(text, (0, 0, 0, 2)) for text in lines))


def bar(part: int, whole: int) -> Text:
    """Return a bar of `BAR_CELLS` cells."""
    filled = min(BAR_CELLS, round(BAR_CELLS * part / whole)) if whole else 0
    return Text.assemble(("━" * filled, "green"), ("━" * (BAR_CELLS - filled), "bright_black"))


def _present(status: FeedStatus) -> set[str]:
    """Return the trials that have joined; all ranks of a trial count as one."""
    return {consumer.trial for consumer in status.consumers if consumer.state != "reserved"}


def _reserved(status: FeedStatus) -> int:
    return sum(consumer.state == "reserved" for consumer in status.consumers)
