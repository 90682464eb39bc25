"""Embedding of matplotlib figures in a page.

A page may be light or dark, wide or narrow, and may not load anything. Therefore matplotlib's SVG is changed: colours
become CSS variables, fonts and sizes are left to the page, ids are made unique to a figure, and namespaces are removed.
"""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from mbaas.analysis import plots

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
