"""The charts of the documents: which table each shows, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.charts import drawing
from benchmarks.charts.drawing import Bar, Kind, Panel, Wait
from benchmarks.charts.results import Row, source, table
from benchmarks.charts.structure import structure
from mbaas.model.quantity import Quantity
from mbaas.tools.analysis import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "images"


@dataclass(frozen=True)
class Chart:
    """A chart of a table.

    Attributes:
        name: name of the file, without suffix.
        table: name of the table in ``docs/results``; "" for a drawing without figures.
        said: description for screen readers.
        draw: draws the rows; the second argument is the line with machine and date.
    """

    name: str
    table: str
    said: str
    draw: Callable[[Sequence[Row], str], Figure]

    def figure(self) -> Figure:
        return self.draw(table(self.table), source(self.table).line) if self.table else self.draw([], "")

    def svg(self) -> str:
        return drawing.svg(self.figure(), name=self.name, said=self.said)


def write() -> list[Path]:
    """Draw all charts and return their files."""
    FOLDER.mkdir(exist_ok=True)
    written = []
    for chart in CHARTS:
        written.append(FOLDER / f"{chart.name}.svg")
        written[-1].write_text(chart.svg(), encoding="utf-8")
    return written


def _is_mbaas(name: str) -> bool:
    return any(word in name for word in ("mbaas", "feed", "shared", "decoded", "partitioned"))


def _kind(name: str) -> Kind:
    if name.startswith(("bound", "prep alone")):
        return "bound"
    return "mbaas" if _is_mbaas(name) else "other"


def _bar(row: Row, name: str, column: str, unit: str, *, ratio: str = "", beside: str = "") -> Bar:
    value = float(row[column])
    figure = f"{row[column] if '.' in row[column] else f'{value:,.0f}'}{unit}"
    return Bar(name=row[name], value=value, figure=figure, kind=_kind(row[name]), ratio=ratio, beside=beside)


def _times(value: float) -> str:
    return "1x" if value == 1 else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def _faster(rows: Sequence[Row], name: str, column: str, unit: str, first: str) -> list[Bar]:
    """Return bars of rates, with each rate relative to the one of ``first``."""
    (base,) = (float(row[column]) for row in rows if row[name] == first)
    return [_bar(row, name, column, unit, ratio=_times(float(row[column]) / base)) for row in rows]


def _shorter(rows: Sequence[Row], name: str, column: str, unit: str, first: str) -> list[Bar]:
    """Return bars of times or costs, with the gain over ``first``."""
    (base,) = (float(row[column]) for row in rows if row[name] == first)
    return [_bar(row, name, column, unit, ratio=_times(base / float(row[column]))) for row in rows]


EACH = "a DataLoader for each trial"


def _trials(rows: Sequence[Row], line: str) -> Figure:
    names = ("one mbaas feed", "one mbaas feed, no decoded cache", EACH, "DALI (CPU) for each trial")
    chosen = [row for name in names for row in rows if row["loader"] == name]
    rates = _faster(chosen, "loader", "samples_per_s", " samples/s", EACH)
    costs = _shorter(chosen, "loader", "cpu_s_per_1000", " CPU-s", EACH)
    panels = [Panel("Samples per second, all trials together", rates), Panel("CPU time of 1,000 samples", costs)]
    return drawing.bars(f"Eight trials: {rates[0].ratio} the rate of DataLoaders", panels, source=line)


def _peers(rows: Sequence[Row], line: str) -> Figure:
    chosen = [row for row in rows if "alone" not in row["loader"]]
    rates = _faster(chosen, "loader", "samples_per_s", " samples/s", EACH)
    panel = Panel("Samples per second, all trials together", rates)
    return drawing.bars("Loaders for eight trials", [panel], source=line)


def _gpu(rows: Sequence[Row], line: str) -> Figure:
    panels = []
    for trials, heading in (("8", "8 trials, samples per second together"), ("1", "1 trial, samples per second")):
        for date in dict.fromkeys(row["date"] for row in rows):
            chosen = [
                row for row in rows if (row["trials"], row["date"]) == (trials, date) and "alone" not in row["loader"]
            ]
            bars = _faster(chosen, "loader", "samples_per_s", " samples/s", EACH)
            panels.append(Panel(f"{heading}, {date}", bars))
    return drawing.bars("Preparation on a GPU", panels, source=line)


def _costs(rows: Sequence[Row], line: str) -> Figure:
    times = _shorter(rows, "loader", "s_per_epoch", " s", EACH)
    costs = _shorter(rows, "loader", "cpu_s_per_epoch", " CPU-s", EACH)
    panels = [Panel("Time per epoch of a trial", times), Panel("CPU time per epoch of a trial", costs)]
    return drawing.bars("An ASHA search of 32 trials, 4 at a time", panels, source=line)


def _ladder(rows: Sequence[Row], line: str) -> Figure:
    panels = []
    for consumers in dict.fromkeys(row["consumers"] for row in rows):
        group = [row for row in rows if row["consumers"] == consumers]
        base = float(group[0]["samples_per_s"])
        panels.append(
            Panel(
                f"{consumers}, samples per second",
                [
                    _bar(
                        row, "step", "samples_per_s", "/s", ratio=_times(float(row["samples_per_s"]) / base),
                        beside=_paper(row),
                    )
                    for row in group
                ],
            )
        )  # fmt: skip
    return drawing.bars("Storage of 15 MB/s, half of the dataset cached", panels, source=line)


def _search(rows: Sequence[Row], line: str) -> Figure:
    panels = []
    for storage in dict.fromkeys(row["storage"] for row in rows):
        group = [row for row in rows if row["storage"] == storage]
        base = float(group[0]["seconds"])
        panels.append(
            Panel(
                storage,
                [
                    _bar(row, "step", "seconds", " s", ratio=_times(base / float(row["seconds"])), beside=_paper(row))
                    for row in group
                ],
            )
        )
    return drawing.bars("HyperBand, 16 trials, 75 % cached", panels, source=line)


def _paper(row: Row) -> str:
    return f"paper: {row['paper']}" if row["paper"] else ""


NODE_LOADERS = {"feed": "one feed", "alone": "each node loads for itself"}


def _nodes(rows: Sequence[Row], line: str) -> Figure:
    panels = []
    for nodes in ("2", "4"):
        chosen = [
            {**row, "loader": NODE_LOADERS[row["loader"]]}
            for row in rows
            if row["nodes"] == nodes and row["caches_percent"] == "50"
        ]
        for heading, column, unit in (
            (f"{nodes} nodes, time of an epoch", "later_epoch_s", " s"),
            (f"{nodes} nodes, read from storage in an epoch", "storage_later_mb", " MB"),
        ):
            panels.append(Panel(heading, _shorter(chosen, "loader", column, unit, NODE_LOADERS["alone"])))
    return drawing.bars("One trial per node, half of the data cached", panels, source=line)


def _pipelines(rows: Sequence[Row], line: str) -> Figure:
    panels = []
    for images in dict.fromkeys(row["images"] for row in rows):
        group = [row for row in rows if row["images"] == images]
        panels.append(
            Panel(
                f"{int(images):,} images, read in an epoch, % of the dataset",
                [
                    Bar(
                        name=_pipelines_named(row),
                        value=float(row["read_percent_of_dataset"]),
                        figure=f"{row['read_percent_of_dataset']} %",
                        kind="mbaas" if row["shared"] == "yes" else "other",
                    )
                    for row in group
                ],
            )
        )
    return drawing.bars("Trials with their own pipelines, half cached", panels, source=line)


def _pipelines_named(row: Row) -> str:
    if row["shared"] == "no":
        return f"{row['pipelines']} pipelines without sharing"
    return "1 pipeline" if row["pipelines"] == "1" else f"{row['pipelines']} pipelines on one feed"


def _coordinator(rows: Sequence[Row], line: str) -> Figure:
    full = [
        Bar(
            name="1 trial" if row["trials"] == "1" else f"{row['trials']} trials" if row["trials"].isdigit()
            else "a trial per node",
            value=float(row["full_from_nodes"]), figure=f"{row['full_from_nodes']} nodes", kind="mbaas",
        )
        for row in rows
    ]  # fmt: skip
    panel = Panel("Nodes at which the coordinator keeps one core busy", full)
    return drawing.bars("Limit of one coordinator, modelled", [panel], source=line)


def _allocation(rows: Sequence[Row], line: str) -> Figure:
    panels = []
    for jobs in ("8", "64"):
        group = [row for row in rows if row["jobs"] == jobs]
        panels.append(Panel(f"Time until all of {jobs} jobs have ended", _shorter(
            group, "policy", "makespan_s", " s", "a pool for each job"
        )))  # fmt: skip
    return drawing.bars("Jobs that share prep workers", panels, source=line)


def _predictions(rows: Sequence[Row], line: str) -> Figure:
    caches = [row for row in rows if not row["setting"]]
    predicted = [(float(row["cache_mb"]), _quantity(row, "predicted_per_s", "low", "high")) for row in caches]
    found = [
        (float(row["cache_mb"]), _quantity(row, "found_per_s", "found_low", "found_high"), f"{row['error_percent']} %")
        for row in caches
    ]
    figure = plots.lines({"predicted": predicted}, title="", x="cache, MB", y="samples/s of a trial", measured=found)
    return drawing.framed(figure, "Predicted and measured speed", source=line)


def _quantity(row: Row, value: str, low: str, high: str) -> Quantity:
    low_per_s, high_per_s = (float(row[f"{bound}_per_s"]) for bound in (low, high))
    return Quantity(float(row[value]), low=low_per_s, high=high_per_s, unit="samples/s")


def _faults(rows: Sequence[Row], line: str) -> Figure:
    ordered = sorted(rows, key=lambda row: float(row["median_wait_s"]))
    waits = [Wait(row["fault"], float(row["median_wait_s"]), float(row["longest_wait_s"])) for row in ordered]
    heading = "Median (bar) and longest (line) wait of a trial"
    happened = sum(int(row["happened"]) for row in rows)
    return drawing.waits(f"{happened} injected faults, no sample lost", heading, waits, source=line)


CHARTS = (
    Chart("architecture", "", "The path of a minibatch from storage to trials", lambda *_: structure()),
    Chart("trials", "trials", "Rate and CPU time of eight trials with mbaas, DataLoaders and DALI", _trials),
    Chart("peers", "trials", "Rates of six loaders for eight trials", _peers),
    Chart("gpu", "gpu", "Rates of eight trials and of one trial with preparation on a GPU", _gpu),
    Chart("costs", "costs", "Time and CPU time of an ASHA search with mbaas and with DataLoaders", _costs),
    Chart("ladder", "ladder", "Rates with CoorDL's mechanisms one after the other, and the paper's speed-ups", _ladder),
    Chart(
        "search", "search", "Times of a HyperBand search on a hard disk and an SSD, and the paper's speed-ups", _search
    ),
    Chart("nodes", "nodes", "Epoch times and bytes read of nodes that share a feed, and of nodes that do not", _nodes),
    Chart("pipelines", "pipelines", "Bytes read by trials with their own pipelines", _pipelines),
    Chart("coordinator", "coordinator", "Number of nodes at which one coordinator is full", _coordinator),
    Chart("allocation", "allocation", "Makespans of jobs that share prep workers by six rules", _allocation),
    Chart("predictions", "predictions", "Predicted and measured samples/s for eight cache sizes", _predictions),
    Chart("faults", "faults", "Median and longest wait of a trial after each kind of fault", _faults),
)
"""All charts, in the order of the documents."""
