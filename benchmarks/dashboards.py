"""Grafana dashboards of the metrics that feeds export through Ray: one for a feed, one for all feeds of a search.

They are generated from the table of metrics, so they contain existing metrics only. ``python -m benchmarks dashboards``
writes them to ``cluster/grafana/``. Grafana's library makes the JSON, by the schema of Grafana's types.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from mbaas.ray_cluster.metrics import METRICS, Metric

FOLDER = Path(__file__).parents[1] / "cluster" / "grafana"

_BY_NAME = {metric.name: metric for metric in METRICS}
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_SELECTED = '{feed=~"$feed"}'
_SELECTED_ONE = '{feed="$feed"}'  # for a single feed: a name is not a pattern
HEIGHT = 8
"""Height of a panel, in rows of Grafana's grid, which has 24 columns."""

SAMPLES_PER_S = "suffix: samples/s"

FEED = "{{feed}}"
"""Placeholder for the feed's name in a legend."""


@dataclass(frozen=True)
class Series:
    """A line of a panel.

    Attributes:
        expr: a query in PromQL.
        legend: name of the line; ``{{feed}}`` stands for the feed's name.
        metrics: names of the metrics in the query.
    """

    expr: str
    legend: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """A chart over time, or with ``is_number`` one large number for each series.

    Attributes:
        title: one line.
        unit: one of Grafana's units, or "suffix: ..." for a custom one.
        series: its lines.
        says: description, before the descriptions of its metrics.
        is_stacked: whether lines are parts of a whole.
        is_number: whether it shows the latest values instead of a chart.
        columns: its width.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    says: str = ""
    is_stacked: bool = False
    is_number: bool = False
    columns: int = 12

    @property
    def description(self) -> str:
        """Meaning of the panel and of its metrics."""
        named = dict.fromkeys(name for each in self.series for name in each.metrics)
        meanings = (f"`{_BY_NAME[name].exported}`: {_BY_NAME[name].description}" for name in named)
        return "\n\n".join(filter(None, [self.says, *meanings]))


@dataclass(frozen=True)
class Row:
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A page of rows.

    Attributes:
        name: of its file, and in its address.
        title: shown in Grafana.
        about: a sentence on its purpose.
        takes_several: whether several feeds can be chosen.
        rows: from the top down.
    """

    name: str
    title: str
    about: str
    takes_several: bool
    rows: tuple[Row, ...]


def _metric(name: str, kind: str) -> Metric:
    metric = _BY_NAME[f"mbaas_{name}"]
    assert metric.kind == kind, f"{metric.name} is a {metric.kind}"
    return metric


def per_second(name: str, legend: str = FEED) -> Series:
    """Return the rate of a counter, for each feed."""
    metric = _metric(name, "counter")
    # Summed, because a restarted coordinator counts from 0 in a new series.
    return Series(f"sum by (feed) (rate({metric.exported}{_SELECTED}[$__rate_interval]))", legend, (metric.name,))


def grown(name: str, legend: str = FEED) -> Series:
    """Return the growth of a counter in the shown time range, for each feed."""
    metric = _metric(name, "counter")
    return Series(f"sum by (feed) (increase({metric.exported}{_SELECTED}[$__range]))", legend, (metric.name,))


def now(name: str, legend: str = FEED) -> Series:
    """Return the value of a gauge, for each feed."""
    metric = _metric(name, "gauge")
    # The maximum: the value of a dead coordinator is exported for a while, next to the value of its successor.
    return Series(f"max by (feed) ({metric.exported}{_SELECTED})", legend, (metric.name,))


def within(share: float, name: str, legend: str = FEED) -> Series:
    """Return the value below which a share of a histogram's observations lie, for each feed."""
    metric = _metric(name, "histogram")
    rates = f"sum by (feed, le) (rate({metric.exported}{_SELECTED}[$__rate_interval]))"
    return Series(f"histogram_quantile({share:g}, {rates})", legend, (metric.name,))


def summed(series: Sequence[Series], legend: str = FEED) -> Series:
    """Return the sum of the rates of several counters, for each feed."""
    # Ray exports a counter only once it is above 0. A missing term would make the whole sum missing, so it counts as 0.
    always = per_second("samples_prepared").expr
    terms = [each.expr if each.expr == always else f"({each.expr} or 0 * {always})" for each in series]
    metrics = tuple(dict.fromkeys(name for each in series for name in each.metrics))
    return Series(" + ".join(terms), legend, metrics)


def ratio(part: Series, whole: Sequence[Series], legend: str = FEED) -> Series:
    """Return the rate of one counter divided by the sum of several, for each feed."""
    over, under = summed([part]), summed(whole)
    return Series(f"{over.expr} / ({under.expr})", legend, tuple(dict.fromkeys(over.metrics + under.metrics)))


DELIVERED, PREPARED = per_second("samples_delivered", "delivered"), per_second("samples_prepared", "prepared")
FOR_PREP, FOR_BYTES = per_second("prep_stall_seconds", "for prep"), per_second("fetch_stall_seconds", "for bytes")
FOR_OTHERS = per_second("peer_stall_seconds", "for other trials")
HITS, MISSES = per_second("cache_hits"), per_second("cache_misses")
DECODED = per_second("decoded_samples")
CPU_SECONDS = per_second("cpu_seconds", "CPUs")

WAITING = "Mean number of waiting trials: each waiting trial adds one second per second."
CPUS = "Mean number of CPUs that the processes of a feed keep busy. Prep workers reserve one each."
PRICE = "CPU time of the feed's processes per delivered sample."
SHARING = "Number of trials served by each prepared sample."
HIT_SHARE = (
    "Hits: fraction of samples read from their node's memory rather than from storage. Decoded: fraction of prepared "
    "samples that were cached after decoding."
)

UNEVEN = (
    "Fraction of the steps of data-parallel trials in which the ranks' waits differed by more than 10 % of the step. "
    "All ranks wait for the slowest."
)

HEALTH = Row(
    "Health",
    (
        Panel("Inexact epochs", "none", (now("inexact_epochs"),), is_number=True, columns=6),
        Panel("Bugs met", "none", (grown("internal_errors"),), is_number=True, columns=6),
        Panel("Coordinator restarts", "none", (grown("coordinator_restarts"),), is_number=True, columns=6),
        Panel("Error of the last prediction", "percentunit", (now("prediction_error"),), is_number=True, columns=6),
    ),
)

OF_A_FEED = Dashboard(
    name="feed",
    title="mbaas: a feed",
    about="One feed: samples, waits of trials, bytes, memory and health.",
    takes_several=False,
    rows=(
        Row(
            "Samples",
            (
                Panel("Samples a second", SAMPLES_PER_S, (DELIVERED, PREPARED)),
                Panel("Trials that wait", "none", (FOR_PREP, FOR_BYTES, FOR_OTHERS), WAITING, is_stacked=True),
                Panel("Uses of a prepared sample", "none", (ratio(DELIVERED, [PREPARED], "trials"),), SHARING),
                Panel("Prep workers", "none", (now("prep_workers", "workers"),), columns=6),
                Panel(
                    "Speed of a prep worker",
                    SAMPLES_PER_S,
                    (now("prep_worker_samples_per_second", "while it prepares"),),
                    columns=6,
                ),
                Panel(
                    "Wait for a minibatch",
                    "s",
                    (
                        within(0.5, "minibatch_wait_seconds", "median"),
                        within(0.95, "minibatch_wait_seconds", "95 %"),
                        within(0.99, "minibatch_wait_seconds", "99 %"),
                    ),
                ),
                Panel(
                    "Steps in which ranks wait unequally",
                    "percentunit",
                    (ratio(per_second("uneven_rank_steps"), [per_second("rank_steps")], "uneven"),),
                    UNEVEN,
                ),
            ),
        ),
        Row(
            "Bytes",
            (
                Panel(
                    "Raw bytes, by where they came from",
                    "Bps",
                    (
                        per_second("cache_hit_bytes", "memory of the node"),
                        per_second("remote_bytes", "other nodes"),
                        per_second("disk_bytes", "disk tiers"),
                        per_second("storage_bytes", "storage"),
                    ),
                    is_stacked=True,
                ),
                Panel(
                    "Cache hits",
                    "percentunit",
                    (ratio(HITS, [HITS, MISSES], "hits"), ratio(DECODED, [PREPARED], "decoded")),
                    HIT_SHARE,
                    columns=6,
                ),
                Panel("Staged minibatches", "bytes", (now("staged_bytes", "staged"),), columns=6),
            ),
        ),
        Row(
            "CPU time",
            (
                Panel("CPUs at work", "none", (CPU_SECONDS,), CPUS),
                Panel("CPU time of a sample", "s", (ratio(CPU_SECONDS, [DELIVERED], "of a sample"),), PRICE),
            ),
        ),
        HEALTH,
    ),
)
"""Shows every metric of one feed."""

OF_A_SEARCH = Dashboard(
    name="search",
    title="mbaas: a search",
    about="The feeds of a search side by side: do its trials wait for data, do they share, are they healthy?",
    takes_several=True,
    rows=(
        Row(
            "Do trials wait for data?",
            (
                Panel(
                    "Trials that wait", "none", (summed([FOR_PREP, FOR_BYTES, FOR_OTHERS]),), WAITING, is_stacked=True
                ),
                Panel("Samples delivered a second", SAMPLES_PER_S, (per_second("samples_delivered"),), is_stacked=True),
                Panel("Wait for prep", "none", (per_second("prep_stall_seconds"),), columns=8),
                Panel("Wait for bytes", "none", (per_second("fetch_stall_seconds"),), columns=8),
                Panel("Wait for other trials", "none", (per_second("peer_stall_seconds"),), columns=8),
            ),
        ),
        Row(
            "What does it cost?",
            (
                Panel("Uses of a prepared sample", "none", (ratio(DELIVERED, [PREPARED]),), SHARING),
                Panel("CPU time of a sample", "s", (ratio(CPU_SECONDS, [DELIVERED]),), PRICE),
                Panel("Samples prepared a second", SAMPLES_PER_S, (per_second("samples_prepared"),), is_stacked=True),
                Panel("CPUs at work", "none", (per_second("cpu_seconds"),), CPUS, is_stacked=True),
                Panel("Prep workers", "none", (now("prep_workers"),), is_stacked=True, columns=8),
                Panel("Read from storage", "Bps", (per_second("storage_bytes"),), is_stacked=True, columns=8),
                Panel("Staged minibatches", "bytes", (now("staged_bytes"),), is_stacked=True, columns=8),
            ),
        ),
        HEALTH,
    ),
)
"""Compares the feeds of a search."""

DASHBOARDS = (OF_A_FEED, OF_A_SEARCH)


def as_json(board: Dashboard) -> str:
    """Return the JSON of a dashboard."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"mbaas-{board.name}")
        .description(board.about)
        .tags(["mbaas", "ray"])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_feeds(several=board.takes_several))
    )
    ids = itertools.count(1)
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            drawn = _number(panel) if panel.is_number else _chart(panel)
            made = made.with_panel(drawn.id(next(ids)))
    text = JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"
    if board.takes_several:
        return text
    pattern, name = (json.dumps(each)[1:-1] for each in (_SELECTED, _SELECTED_ONE))
    return text.replace(pattern, name)


def _feeds(*, several: bool) -> dashboard.QueryVariable:
    """Return the variable that selects the shown feeds."""
    exported = _metric("prep_workers", "gauge").exported
    return (
        dashboard.QueryVariable("feed")
        .label("Feeds" if several else "Feed")
        .datasource(SOURCE)
        .query(f"label_values({exported}, feed)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(several)
        .include_all(several)
    )


def _chart(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().title(panel.title).description(panel.description).unit(panel.unit)
    made = made.datasource(SOURCE).height(HEIGHT).span(panel.columns).min(0).fill_opacity(20 if panel.is_stacked else 0)
    legend = common.VizLegendOptions().show_legend(True).display_mode(common_models.LegendDisplayMode.LIST)
    made = made.legend(legend.placement(common_models.LegendPlacement.BOTTOM))
    made = made.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode("multi")))
    if panel.is_stacked:
        made = made.stacking(common.StackingConfig().mode(common_models.StackingMode("normal")))
    for number, series in enumerate(panel.series):
        made = made.with_target(_query(series, number))
    return made


def _number(panel: Panel) -> stat.Panel:
    made = stat.Panel().title(panel.title).description(panel.description).unit(panel.unit).no_value("0")
    made = made.datasource(SOURCE).height(HEIGHT // 2).span(panel.columns)
    made = made.text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)
    made = made.graph_mode(common_models.BigValueGraphMode.NONE)
    made = made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    for number, series in enumerate(panel.series):
        made = made.with_target(_query(series, number).instant())
    return made


def _query(series: Series, number: int) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(series.expr).legend_format(series.legend)
    return made.ref_id(chr(ord("A") + number)).datasource(SOURCE)


def write() -> list[Path]:
    """Write all dashboards; return their files."""
    FOLDER.mkdir(exist_ok=True)
    files = []
    for board in DASHBOARDS:
        files.append(FOLDER / f"{board.name}.json")
        files[-1].write_text(as_json(board))
    return files
