"""The report as one page: a single file without scripts or network access.

The text is in ``templates/page.html``, the style in ``templates/style.css``. A page may be light or dark, wide or
narrow, and may not load anything. Therefore matplotlib's SVG is changed (`inline`): colours become CSS variables, fonts
and sizes are left to the page, ids are made unique to a figure, and namespaces are removed.
"""

from __future__ import annotations

import inspect
import io
import math
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.model.pace import bottleneck
from mbaas.tools.analysis import plots
from mbaas.tools.analysis.advice import DISAGREEMENT
from mbaas.tools.analysis.report import charts
from mbaas.tools.analysis.report.studies import studies
from mbaas.tools.analysis.whole import Analysis

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]|[\ud800-\udfff]")
"""Characters that are allowed in paths, but not in HTML or XML."""

_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s|min|h|days|[kMGTP]?B)(?!\w))")
"""Spaces between a number and its unit, which must not break."""


def page(analysis: Analysis, *, command: str | None = None) -> str:
    """Return the whole page as HTML that is also well-formed XML. The output is reproducible.

    Args:
        command: the command that made the analysis, shown on the page.
    """
    found = studies(analysis)
    return (
        environment()
        .get_template("page.html")
        .render(
            analysis=analysis,
            command=command,
            bottleneck=bottleneck(analysis.rates, analysis.setup),
            boxes=charts.boxes_of(analysis),
            links=charts.links_of(analysis),
            bars=charts.bars_of(analysis),
            parts=[name for name, *_ in charts.PARTS],
            studies=found,
            charts={chart.name: _drawn(chart) for chart in charts.charts(analysis, found)},
            most_room=charts.MOST_ROOM,
            sets_the_pace=charts.SETS_THE_PACE,
            disagreement=DISAGREEMENT,
            readers=analysis.rates.storage.fastest[0],
            infinity=math.inf,  # Jinja has no literal for it
        )
    )


def write_report(analysis: Analysis, path: Path, *, command: str | None = None) -> None:
    """Write the `page` to a file."""
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder of the report must exist, got {path.parent}")
    path.write_text(page(analysis, command=command), encoding="utf-8")


def write_plots(analysis: Analysis, folder: Path) -> list[Path]:
    """Write each chart of the page to an SVG file in a folder, which is created if missing."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder of plots {folder}: {error.strerror}") from None
    written = []
    for chart in charts.charts(analysis, studies(analysis)):
        written.append(folder / f"{chart.name}.svg")
        plots.save(chart.figure, written[-1])
    return written


@cache
def environment() -> Environment:
    """Load the templates with autoescaping and all functions that format values as filters."""
    made = Environment(
        loader=PackageLoader("mbaas.tools.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name raises instead of rendering as an empty string
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for module in (units, words):  # the latter for names that both have
        made.filters.update({name: write for name, write in vars(module).items() if inspect.isfunction(write)})
    made.filters["code"] = code
    return made


def code(text: str) -> Markup:
    """Format text as code with its spaces unchanged, so that it can be copied."""
    # as markup, which `_finalize` does not change: a non-breaking space would be copied into a shell
    return Markup("<code>{}</code>").format(_FORBIDDEN.sub("\ufffd", text))


def _drawn(chart: charts.Chart) -> Markup:
    if chart.narrow is None:
        return inline(chart.figure, name=chart.name, said=chart.said)
    # CSS shows one of the two
    wide = inline(chart.figure, name=chart.name, said=chart.said, kind="wide")
    return wide + inline(chart.narrow, name=f"{chart.name}-narrow", said=chart.said, kind="narrow")


def _finalize(value: Any) -> Any:
    """Replace forbidden characters and spaces before units in text; leave numbers and markup as they are."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _UNIT.sub("\u00a0", _FORBIDDEN.sub("\ufffd", value))


VARIABLES = {
    plots.INK: "ink",
    plots.SOFT: "soft",
    plots.PAPER: "paper",
    plots.BLUE: "blue",
    plots.RED: "red",
    plots.GREY: "grey",
}
"""Colours of figures -> CSS variables of the page."""

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def inline(figure: Figure, *, name: str, said: str, kind: str = "chart") -> Markup:
    """Convert a figure to an ``svg`` element without size, fonts, fixed colours and namespaces.

    Args:
        name: unique name of the figure on the page.
        said: description for screen readers.
        kind: CSS class of the element.
    """
    written = io.BytesIO()
    # ids are hashes of the content and this salt, so that figures do not share ids
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata=NO_METADATA)
    # edited as a tree rather than as text, so that it stays well-formed and strings stay escaped
    root = ElementTree.fromstring(written.getvalue())
    for node in root.iter():
        _adapt(node)
    # matplotlib's global style for line ends would apply to the whole page
    for styles in root.findall("defs[style]"):
        root.remove(styles)
    title = ElementTree.Element("title", id=f"chart-{name}")
    title.text = said
    root.insert(0, title)
    look = {"class": kind, "role": "img", "aria-labelledby": f"chart-{name}", "stroke-linejoin": "round"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **look}
    return Markup(re.sub(r"\s*\n\s*", "", ElementTree.tostring(root, encoding="unicode")))


def _adapt(node: ElementTree.Element) -> None:
    # svg elements in HTML need no namespaces
    node.tag = node.tag.rpartition("}")[2]
    node.attrib = {key.rpartition("}")[2]: value for key, value in node.attrib.items()}
    # groups are numbered from 1 in every figure, so their ids would not be unique; nothing refers to them
    name = node.attrib.pop("id", "") if node.tag == "g" else ""
    if name.startswith(plots.SAYS):
        title = ElementTree.Element("title")
        title.text = name.removeprefix(plots.SAYS)
        node.insert(0, title)
    if node.attrib.get("transform", "").startswith("rotate(-0 "):  # a no-op on every horizontal text
        del node.attrib["transform"]
    # 0.01 pixels are invisible, and six decimals are a large part of the page's size
    for key in node.attrib.keys() & {"d", "x", "y", "transform"}:
        node.attrib[key] = re.sub(r"-?\d+\.\d+", _two_decimals, node.attrib[key])
    style = node.attrib.pop("style", "")
    if "fill" in node.attrib:  # patterns; CSS variables only work in a style
        style = f"fill: {node.attrib.pop('fill')}"
    if style:
        # depending on its version, matplotlib writes one font property or several
        style = re.sub(r"font-family: [^;]*(; |$)", "", style)
        style = re.sub(r"font: (?:(\w+) )?([\d.]+px) [^;]*", _weight_and_size, style)
        node.attrib["style"] = re.sub("#[0-9a-f]{6}", lambda found: f"var(--{VARIABLES[found[0]]})", style)


def _weight_and_size(font: re.Match[str]) -> str:
    return f"font-weight: {font[1] or 'normal'}; font-size: {font[2]}"


def _two_decimals(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 2) + 0.0:g}"  # + 0.0 turns -0 into 0
