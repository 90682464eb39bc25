"""The report as one page: no scripts, no network, one file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from mbaas.analysis import words
from mbaas.analysis.answers import bottleneck
from mbaas.analysis.report.advice import advice
from mbaas.analysis.report.amounts import RESOURCES, SHORT, listed, seconds, sentence, with_interval
from mbaas.analysis.report.curves import measured_curves, what_if
from mbaas.analysis.report.markup import Markup, element, joined
from mbaas.analysis.report.picture import pipeline
from mbaas.analysis.report.split import stall_split
from mbaas.analysis.report.trust import checks, costs, doubts, facts, glossary, rates_table
from mbaas.analysis.whole import Analysis

TITLE = "Where the time goes"


@dataclass(frozen=True)
class Section:
    """A part of the page: its id, its heading, and what stands in it."""

    name: str
    title: str
    content: str

    @property
    def link(self) -> str:
        """Short, for the list of sections."""
        return self.name.replace("-", " ").capitalize()

    def markup(self) -> Markup:
        """A landmark with its heading."""
        heading = f"{self.name}-title"
        return element(
            "section",
            element("h2", self.title, id=heading),
            self.content,
            id=self.name,
            aria_labelledby=heading,
            tabindex="-1",
        )


def page(analysis: Analysis, *, command: str | None = None) -> str:
    """The whole page, as HTML that is well-formed XML too; the same for the same analysis.

    Args:
        command: that made the analysis, to be shown.
    """
    sections = [
        Section("change", "What to change", advice(analysis)),
        Section("pipeline", "What flows, and what could", _pipeline(analysis)),
        Section("epoch", "What an epoch is spent on", stall_split(analysis)),
        Section("what-if", "What would happen if", _what_if(analysis)),
        Section("trust", "How good the predictions are", joined([checks(analysis), _doubts(analysis)])),
        Section("rates", "What was measured", _rates(analysis)),
        Section("how", "What was analyzed, and how", joined([facts(analysis, command), glossary()])),
    ]
    links = [element("li", element("a", section.link, href=f"#{section.name}")) for section in sections]
    body = [
        element("a", "Skip to the answer", href=f"#{sections[0].name}", class_="skip"),
        element("header", *_head(analysis)),
        element("nav", element("ul", *links), aria_label="Sections"),
        element("main", *(section.markup() for section in sections)),
        element("footer", element("p", f"mbaas analyze, {analysis.subject.date}")),
    ]
    return f"<!DOCTYPE html>\n{element('html', _meta(analysis), element('body', *body), lang='en')}\n"


def _meta(analysis: Analysis) -> Markup:
    style = (files("mbaas.analysis.report") / "style.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{TITLE}: {analysis.subject.data}"),
        element("style", Markup(style)),
    )


def _head(analysis: Analysis) -> list[Markup]:
    short, colon, rest = analysis.sentence.partition(": ")
    verdict = [element("strong", f"{short}{colon}"), rest] if colon else [analysis.sentence]
    return [
        element("p", analysis.subject.data, class_="subject"),
        element("h1", TITLE),
        element("p", *verdict, class_="verdict"),
        _figures(analysis),
    ]


def _figures(analysis: Analysis) -> Markup:
    """The four numbers that people look for first."""
    steady, first = analysis.prediction.steady, analysis.prediction.first
    waits = steady.prep_stall + steady.fetch_stall
    others = [RESOURCES[name] for name in steady.limits[1:]]
    doubt = f"or, within what was measured, {listed(others)}" if others else "certain, within what was measured"
    entries = [
        (
            "an epoch takes",
            words.seconds(steady.epoch_s.value),
            f"the first, with empty caches: {seconds(first.epoch_s)}",
        ),
        (
            "each trial trains at",
            f"{words.number(steady.trial_per_s.value)}/s",
            f"samples; its step alone could take {with_interval(steady.bounds['step'])}",
        ),
        (
            "it waits for data",
            words.share(waits),
            f"of the time: {words.share(steady.fetch_stall)} reading, {words.share(steady.prep_stall)} preparing",
        ),
        ("the pace is set by", SHORT[steady.limit], doubt),
    ]
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, class_="big"), element("dd", more))
            for name, value, more in entries
        ),
        class_="figures",
    )


def _pipeline(analysis: Analysis) -> Markup:
    found = bottleneck(analysis.rates, analysis.setup)
    return joined([element("p", sentence(found.sentence)), pipeline(analysis)])


def _what_if(analysis: Analysis) -> Markup:
    said = "Each chart changes one thing and leaves the rest as it is. Higher is faster."
    return joined([element("p", said), what_if(analysis)])


def _doubts(analysis: Analysis) -> Markup:
    return joined([element("h3", "What is doubtful"), doubts(analysis)])


def _rates(analysis: Analysis) -> Markup:
    said = (
        "A trial can be no faster than its step, than prep makes samples, and than cache and storage bring them. Each "
        "was measured alone; predictions put them together."
    )
    return joined(
        [
            element("p", said),
            rates_table(analysis),
            measured_curves(analysis),
            costs(analysis.rates),
        ]
    )
