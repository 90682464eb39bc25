"""Figures of matplotlib as part of a page.

A page may be light or dark, wide or narrow, and may load nothing. So the SVG that matplotlib writes for a file is
changed in four ways: colours become variables of the page's style, fonts and sizes are left to the page, parts of
several figures keep apart, and addresses of standards go.
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
"""Colours of figures, and the variables of the page's style that take their place."""

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def inline(figure: Figure, *, name: str, said: str, kind: str = "chart") -> Markup:
    """Make an ``svg`` element without size, fonts, colours and addresses of its own.

    Args:
        name: unlike that of any other figure of the page.
        said: what it shows, for those who do not see it.
        kind: its class.
    """
    written = io.BytesIO()
    # parts that others refer to are named after their content and this salt, so that no two figures share a name
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata=NO_METADATA)
    # a tree, not text: what is changed stays well-formed, and texts of the analysis in it stay texts
    root = ElementTree.fromstring(written.getvalue())
    for node in root.iter():
        _adapt(node)
    # matplotlib sets the shape of line ends for all elements, which would be those of the whole page
    for styles in root.findall("defs[style]"):
        root.remove(styles)
    title = ElementTree.Element("title", id=f"chart-{name}")
    title.text = said
    root.insert(0, title)
    look = {"class": kind, "role": "img", "aria-labelledby": f"chart-{name}", "stroke-linejoin": "round"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **look}
    return Markup(re.sub(r"\s*\n\s*", "", ElementTree.tostring(root, encoding="unicode")))


def _adapt(node: ElementTree.Element) -> None:
    """Make one element part of the page."""
    # without name spaces: in HTML, svg elements need none
    node.tag = node.tag.rpartition("}")[2]
    node.attrib = {key.rpartition("}")[2]: value for key, value in node.attrib.items()}
    # groups are numbered from 1 in every figure, so their names would not be unique; nothing refers to them
    name = node.attrib.pop("id", "") if node.tag == "g" else ""
    if name.startswith(plots.SAYS):
        title = ElementTree.Element("title")
        title.text = name.removeprefix(plots.SAYS)
        node.insert(0, title)
    if node.attrib.get("transform", "").startswith("rotate(-0 "):  # every text has one, and most lie level
        del node.attrib["transform"]
    # a hundredth of a pixel cannot be seen, and six decimals are a good part of the page's size
    for key in node.attrib.keys() & {"d", "x", "y", "transform"}:
        node.attrib[key] = re.sub(r"-?\d+\.\d+", _two_decimals, node.attrib[key])
    style = node.attrib.pop("style", "")
    if "fill" in node.attrib:  # of patterns; only a style may name a variable
        style = f"fill: {node.attrib.pop('fill')}"
    if style:
        # versions of matplotlib differ: some write one property for a font, some one for each of its parts
        style = re.sub(r"font-family: [^;]*(; |$)", "", style)
        style = re.sub(r"font: (?:(\w+) )?([\d.]+px) [^;]*", _weight_and_size, style)
        node.attrib["style"] = re.sub("#[0-9a-f]{6}", lambda found: f"var(--{VARIABLES[found[0]]})", style)


def _weight_and_size(font: re.Match[str]) -> str:
    return f"font-weight: {font[1] or 'normal'}; font-size: {font[2]}"


def _two_decimals(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 2) + 0.0:g}"  # plus 0: without it -0.001 would become -0
