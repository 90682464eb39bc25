"""Dashboards match the table of metrics and Grafana's schema, and query only metrics that feeds export.

`tests/service/test_metrics.py` reads these metrics at Ray's endpoint.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from mbaas.ray_cluster.metrics import METRICS

pytest.importorskip("grafana_foundation_sdk", reason="Grafana's library needs Python 3.11")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from benchmarks import dashboards

KINDS = {metric.exported: metric.kind for metric in METRICS}
SELECTED = r'\{feed=~?"\$feed"\}'
COUNTED = re.compile(rf"sum by \(feed\) \((?:rate|increase)\((\w+){SELECTED}\[(?:\$__rate_interval|\$__range)\]\)\)")
LEVEL = re.compile(rf"max by \(feed\) \((\w+){SELECTED}\)")
WITHIN = re.compile(
    rf"histogram_quantile\(0\.\d+, sum by \(feed, le\) \(rate\((\w+){SELECTED}\[\$__rate_interval\]\)\)\)"
)
TERMS = re.compile(r"\(*(TERM|0 \* TERM)(?: (?:\+|/|or) \(*(TERM|0 \* TERM)\)*)*\)*")

BOARDS = pytest.mark.parametrize("board", dashboards.DASHBOARDS, ids=lambda board: board.name)


def shipped(board: dashboards.Dashboard) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((dashboards.FOLDER / f"{board.name}.json").read_text())
    return content


def panels(board: dashboards.Dashboard) -> list[dict[str, Any]]:
    return [panel for panel in shipped(board)["panels"] if panel["type"] != "row"]


def queries(board: dashboards.Dashboard) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


@BOARDS
def test_the_file_is_what_the_metrics_make_of_it(board: dashboards.Dashboard) -> None:
    """After a change, run: python -m benchmarks dashboards."""
    assert (dashboards.FOLDER / f"{board.name}.json").read_text() == dashboards.as_json(board)


@BOARDS
def test_grafanas_schema_knows_everything_in_it(board: dashboards.Dashboard) -> None:
    """The file is parsed into the schema's classes and serialized again without loss."""
    register_default_plugins()
    read = Dashboard.from_json(shipped(board))
    assert json.loads(JSONEncoder().encode(read)) == shipped(board)


@BOARDS
def test_queries_are_about_metrics_that_feeds_export(board: dashboards.Dashboard) -> None:
    """Queries are rates of counters, levels of gauges, quantiles of histograms, and their sums and ratios."""
    for query in queries(board):
        assert {*re.findall(r"ray_\w+", query)} <= KINDS.keys()
        assert {KINDS[name] for name in COUNTED.findall(query)} <= {"counter"}
        assert {KINDS[name] for name in LEVEL.findall(query)} <= {"gauge"}
        assert {KINDS[name] for name in WITHIN.findall(query)} <= {"histogram"}
        form = WITHIN.sub("TERM", LEVEL.sub("TERM", COUNTED.sub("TERM", query)))
        assert TERMS.fullmatch(form), query
        assert form.count("(") == form.count(")"), query


def test_a_feed_of_any_name_can_be_chosen() -> None:
    """A single feed is matched by its literal name; for several, Grafana makes a pattern."""
    assert all('{feed="$feed"}' in query and "=~" not in query for query in queries(dashboards.OF_A_FEED))
    assert all('{feed=~"$feed"}' in query for query in queries(dashboards.OF_A_SEARCH))
    for board in dashboards.DASHBOARDS:
        _, variable = shipped(board)["templating"]["list"]
        (metric,) = re.findall(r"^label_values\((\w+), feed\)$", variable["query"])
        assert metric in KINDS
        assert (variable["multi"], variable["includeAll"]) == (board.takes_several, board.takes_several)


def test_the_dashboard_of_a_feed_shows_every_metric() -> None:
    assert {name for query in queries(dashboards.OF_A_FEED) for name in re.findall(r"ray_\w+", query)} == {*KINDS}


@BOARDS
def test_panels_say_what_they_show(board: dashboards.Dashboard) -> None:
    for panel in panels(board):
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        named = {name for target in panel["targets"] for name in re.findall(r"ray_\w+", target["expr"])}
        told = {*re.findall(r"`(ray_\w+)`: \w", panel["description"])}
        assert told
        # A counter that may be missing is paired with one that always exists, as a zero.
        assert named - told <= {"ray_mbaas_samples_prepared_total"}
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) == len({*titles})


@BOARDS
def test_no_two_panels_lie_on_each_other(board: dashboards.Dashboard) -> None:
    everything = shipped(board)["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    places = [panel["gridPos"] for panel in everything]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (one[at] + one[side] <= other[at] or other[at] + other[side] <= one[at] for at, side in ("xw", "yh"))
        assert any(apart), (one, other)


def test_a_metric_of_another_kind_cannot_be_drawn() -> None:
    with pytest.raises(AssertionError, match="mbaas_staged_bytes is a gauge"):
        dashboards.per_second("staged_bytes")
    with pytest.raises(KeyError):
        dashboards.now("nothing")
