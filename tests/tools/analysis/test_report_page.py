"""The report page shows the whole analysis, escapes all text, and needs no other files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from jinja2 import UndefinedError
from reported import NASTY, bare_analysis, check_of, full_analysis, split_of_2_s
from stated_rates import about, any_rates, any_setup, decodable_rates, line, round_rates

from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.model.gpu_stages import crossing
from mbaas.model.pace import curve
from mbaas.model.rates import GpuRates, OnGpu, Rates, Setup
from mbaas.tools.analysis.measuring.verify import Verification
from mbaas.tools.analysis.report import page, write_plots, write_report
from mbaas.tools.analysis.report.charts import bars_of, charts, links_of
from mbaas.tools.analysis.report.page import VARIABLES, environment
from mbaas.tools.analysis.report.studies import pace, studies

COMMAND = "mbaas analyze 'a <b>.yaml' --rate 50"


def parsed(html: str) -> ElementTree.Element:
    """Parse the page, which is also valid XML."""
    return ElementTree.fromstring(html)


def said(node: ElementTree.Element) -> str:
    """Return all text of a node with single spaces, and with block elements separated."""

    def texts(part: ElementTree.Element) -> Iterator[str]:
        apart = "" if part.tag in ("a", "abbr", "code", "span", "strong", "tspan") else " "
        yield apart + (part.text or "")
        for child in part:
            yield from texts(child)
            yield child.tail or ""
        yield apart

    return " ".join("".join(texts(node)).split())


def section(html: str, name: str) -> ElementTree.Element:
    return next(node for node in parsed(html).iter("section") if node.get("id") == name)


def written(template: str, it: str) -> str:
    """Render a template of the page with one variable, `it`."""
    return environment().from_string(template).render(it=it)


def box_of(path: ElementTree.Element) -> tuple[float, float] | None:
    """Return width and height of an upright rectangle, or None for another shape."""
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d", ""))]
    xs, ys = sorted(set(numbers[::2])), sorted(set(numbers[1::2]))
    return (xs[1] - xs[0], ys[1] - ys[0]) if (len(xs), len(ys)) == (2, 2) else None


@pytest.fixture(scope="module")
def full_page() -> str:
    return page(full_analysis(), command=COMMAND)


def test_the_verdict_and_the_recommended_change_come_first(full_page: str) -> None:
    """4 trials at 310 samples/s each; a cache of 61.1 MB makes epochs twice as fast."""
    root = parsed(full_page)
    header, first = next(root.iter("header")), next(root.iter("section"))
    assert "Loading is the problem: each of 4 trials waits for data 69 % of the time" in said(header)
    assert "an epoch takes 3.23 s" in said(header)
    assert first.get("id") == "change"
    assert said(first).startswith("What to change Recommended Give the cache 61.1 MB instead of 20 MB.")
    assert said(first).index("instead of 20 MB") < said(first).index("Use storage that is twice as fast")


def test_everything_else_is_there(full_page: str) -> None:
    names = [node.get("id") for node in parsed(full_page).iter("section")]
    assert names == ["change", "pipeline", "epoch", "what-if", "trust", "rates", "how"]
    assert "P is <doubtful>." in said(section(full_page, "trust"))
    how = said(section(full_page, "how"))
    assert all(text in how for text in (COMMAND, "21 November 2026", "4 cores, a <processor>", "Map(<lambda>)"))
    rates = said(section(full_page, "rates"))
    assert all(text in rates for text in ("Training takes G", "Prep makes P", "Storage gives S", "The cache gives C"))


def test_what_workers_make_in_a_feed() -> None:
    """4 workers alone make 800 samples/s. In a feed a sample takes 5 + 1 ms: 4 / 6 ms = 667 samples/s."""
    alone, served = (
        bare_analysis(round_rates(**more), Setup()) for more in ({}, {"serving_s": about(0.001, 0.1, "s")})
    )
    rates = said(section(page(served), "rates"))
    assert "Prep of a feed makes 667 656 to 678 the same workers, who hand on what they made: 1,000 µs more" in rates
    assert "Prep of a feed makes" not in said(section(page(alone), "rates"))


def test_what_decoded_samples_would_bring() -> None:
    """500 MB hold all samples decoded; the cache curve ends a little further, and epochs get shorter until there."""
    analysis = bare_analysis(decodable_rates(), Setup(cache_bytes=300e6))
    html = page(analysis)
    assert "200 MB more memory would keep all of them decoded" in said(section(html, "change"))
    assert "and 500 kB where it is kept decoded" in said(section(html, "rates"))
    assert "Prep of decoded samples makes 8,000" in said(section(html, "rates"))
    assert "to prepare it if it is kept decoded 500" in said(section(html, "rates"))
    (study,) = [each for each in studies(analysis) if each.parameter == "cache_bytes"]
    assert study.values[-1] == pytest.approx(550e6)
    assert any("200 MB more memory" in sentence for sentence in study.sentences)
    seconds = [(value, found.steady.epoch_s.value) for value, found in study.main.points]
    assert (seconds[0][1], seconds[-1][1]) == pytest.approx((1.25, 0.125))
    falling = [epoch_s for value, epoch_s in seconds if value >= 100e6]  # from here on all samples are cached
    assert falling == sorted(falling, reverse=True)
    never = studies(bare_analysis(decodable_rates(), Setup(decoded=False)))
    assert next(each for each in never if each.parameter == "cache_bytes").values[-1] == pytest.approx(110e6)
    assert "kept decoded" not in said(parsed(page(bare_analysis(round_rates(), Setup()))))


def test_where_samples_cross_to_the_gpu_is_said_if_it_was_measured() -> None:
    rates = round_rates()
    plan = crossing(rates, Setup(), GpuRates(gpus=1, decode=OnGpu(per_s=2000, step_per_s=500, cpu_s=1e-4)))
    told = said(section(page(bare_analysis(rates, Setup(), devices=plan), command=COMMAND), "change"))
    assert f"CPU or GPU {words.sentence(plan.sentence)}" in told
    assert "CPU or GPU" not in page(bare_analysis(rates, Setup()), command=COMMAND)


def test_no_text_becomes_markup(full_page: str) -> None:
    """Tags, quotes and forbidden characters in a path appear as text."""
    shown = NASTY.replace("\x1b", "\ufffd").replace("\udcff", "\ufffd")
    root = parsed(full_page)
    assert said(root).count(shown) == 3  # the page title, the header, the list of analyzed data
    assert not list(root.iter("b"))
    assert written('<p title="{{ it }}">{{ it }}</p>', '"<i>') == '<p title="&#34;&lt;i&gt;">&#34;&lt;i&gt;</p>'
    assert written("{{ it }}", "19 % of 3.5 MB in 2 ms 2 sacks") == "19\u00a0% of 3.5\u00a0MB in 2\u00a0ms 2 sacks"
    assert written("{{ it | code }}", "--cache 3 MB <i>") == "<code>--cache 3 MB &lt;i&gt;</code>"
    with pytest.raises(UndefinedError, match="'that' is undefined"):
        written("{{ that }}", "")


def test_it_needs_nothing_else(full_page: str) -> None:
    """No scripts and no addresses; every link target and every reused part of a chart is on the page."""
    root = parsed(full_page)
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import|javascript:|<script|<link|<img|<iframe|\bsrc=", full_page)
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    assert {node.get("href") for tag in ("a", "use") for node in root.iter(tag)} <= {f"#{name}" for name in ids}
    assert set(re.findall(r"url\(#(.*?)\)", full_page)) <= set(ids)
    assert not [key for node in root.iter() for key in node.attrib if key.startswith("on")]


def test_every_picture_has_a_title_and_every_chart_a_table(full_page: str) -> None:
    root = parsed(full_page)
    pictures = list(root.iter("svg"))
    assert len(pictures) == 4 + 6 + 2  # the pipeline and the epoch twice, what-if, P and S
    for picture in pictures:
        title = picture[0]
        assert (title.tag, picture.get("role")) == ("title", "img")
        assert picture.get("aria-labelledby") == title.get("id")
    assert len(list(root.iter("figure"))) == len(list(root.iter("figcaption"))) == 10
    assert len([d for d in root.iter("details") if list(d.iter("table"))]) == 10 + 1  # plus costs


@pytest.mark.parametrize("full", [True, False])
def test_nothing_is_drawn_beyond_the_edge_of_a_chart(full: bool) -> None:
    """Checked with the font of matplotlib, which is wider than most screen fonts."""
    analysis = full_analysis() if full else bare_analysis(round_rates(), Setup(trials=3, nodes=2))
    for chart in charts(analysis, studies(analysis)):
        for figure in (chart.figure, chart.narrow):
            if figure is not None:
                seen = figure.get_tightbbox()
                assert (seen.min >= -0.01).all(), chart.name
                assert (seen.max <= figure.get_size_inches() + 0.01).all(), chart.name


def test_charts_have_no_colours_and_fonts_of_their_own(full_page: str) -> None:
    """Charts use the page's colours and fonts, light or dark."""
    pictures = [node for picture in parsed(full_page).iter("svg") for node in picture.iter()]
    looks = " ".join(f"{key}={value}" for node in pictures for key, value in node.attrib.items())
    assert not re.search(r"=#[0-9a-f]|: #[0-9a-f]|font-family|font: ", looks)
    assert set(re.findall(r"var\(--(.*?)\)", looks)) == set(VARIABLES.values())


def test_landmarks_and_headings(full_page: str) -> None:
    root = parsed(full_page)
    body = root[1]
    assert [node.tag for node in body] == ["a", "header", "nav", "main", "footer"]
    assert (body[0].get("class"), root.get("lang")) == ("skip", "en")
    levels = [int(node.tag[1]) for node in root.iter() if re.fullmatch(r"h\d", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    scrolled = [node for node in root.iter("div") if node.get("class") == "scroll"]
    assert all(node.get("tabindex") == "0" and node.get("aria-label") for node in scrolled)
    assert all(node.get("scope") for node in root.iter("th"))


def test_what_the_pipeline_shows() -> None:
    """Half of 1,000 samples are cached: 0.05 + 2 = 2.05 ms, 487.8/s.

    Storage delivers 250/s and is used to 2 / 2.05 = 98 %. Prep takes 1.25 ms: 800/s, 1.64 times the flow. The step
    takes 1 ms.
    """
    storage, cache, prep, staging, step = links_of(bare_analysis(round_rates(), Setup(cache_bytes=50e6)))
    assert [link.said for link in (storage, cache, prep, staging, step)] == [
        "250/s",
        "10,000/s",
        "800/s",
        "no limit",
        "1,000/s",
    ]
    assert (storage.share, cache.share) == (0.5, 0.5)
    assert storage.room == pytest.approx(1.025)
    assert prep.room == pytest.approx(1.64)
    assert [link.limit for link in (storage, cache, prep, staging, step)] == [True, False, False, False, False]
    assert prep.verb == "prep makes"


def test_the_pipeline_without_a_cache_and_with_a_full_one() -> None:
    """All samples flow through an empty cache; with a full one, nothing comes from storage."""
    empty = links_of(bare_analysis(round_rates(), Setup()))
    assert [(link.said, link.flows) for link in empty[:2]] == [("250/s", True), ("nothing", True)]
    full = links_of(bare_analysis(round_rates(), Setup(cache_bytes=100e6)))
    assert [(link.said, link.flows) for link in full[:2]] == [("not needed", False), ("10,000/s", True)]
    assert full[2].limit


def test_the_limit_is_marked_by_words(full_page: str) -> None:
    """In both pictures and in the table."""
    texts = [said(node) for node in section(full_page, "pipeline").iter() if node.tag in ("text", "td")]
    assert texts.count("sets the pace") == 3


@pytest.mark.parametrize(
    ("rates", "setup", "at"),
    [
        (round_rates(cache=about(1e7, unit="bytes/s")), Setup(cache_bytes=100e6), 1),
        (round_rates(storage=line((1, 1e6))), Setup(), 2),
        (round_rates(storage=line((1, 1e6))), Setup(nodes=2, network_bytes_per_s=1e6), 3),
        (round_rates(storage=line((1, 1e6)), prep=line((1, 1e6))), Setup(trials=8, accelerators=1), 4),
    ],
)
def test_each_part_can_be_the_limit(rates: Rates, setup: Setup, at: int) -> None:
    limits = [link.limit for link in links_of(bare_analysis(rates, setup))]
    assert limits == [number == at for number in range(5)]


def test_the_stall_split() -> None:
    """The runs give 0.5 + 0.125 + 1.375 = 2 s. Loaders waited 0.1 and 1.42 s, which leaves 0.48 s of training."""
    predicted, runs, loaders = bars_of(full_analysis())
    assert sum(predicted.shares) == pytest.approx(1)
    assert runs.shares == (0.25, 0.0625, 0.6875)
    assert loaders.shares == pytest.approx((0.24, 0.05, 0.71))
    assert runs.said == "25 % training, 6.2 % waiting for prep, 69 % waiting for reads"
    assert [words.duration(part) for part in (*runs.parts, runs.epoch_s)] == [
        "500 ms",
        "125 ms (120 ms to 130 ms)",
        "1.38 s (1.32 s to 1.43 s)",
        "2 s (1.92 s to 2.08 s)",
    ]
    assert [words.duration(part) for part in loaders.parts] == [
        "480 ms",
        "100 ms (96 ms to 104 ms)",
        "1.42 s (1.36 s to 1.48 s)",
    ]


def test_the_stall_split_is_drawn_as_it_is(full_page: str) -> None:
    """A full epoch is 976 pixels wide on a desktop: 0.25 is 244 pixels, and 0.6875 is 671."""
    wide, narrow = (figure for figure in section(full_page, "epoch").iter("svg"))
    for picture, pixels in ((wide, 976), (narrow, 330)):
        drawn = [box for box in map(box_of, picture.iter("path")) if box is not None and box[1] == 34]
        assert [width / pixels for width, _ in drawn[3:6]] == pytest.approx([0.25, 0.0625, 0.6875], abs=0.002)
    assert "25 % training, 6.2 % waiting for prep, 69 % waiting for reads" in said(wide)


def test_whether_both_ways_to_split_agree() -> None:
    """0.045 of 2 s is 2.2 %; 1.375 and 0.4 s differ by 49 % of 2 s."""
    assert "both ways agree to 2.2 % of the epoch" in said(section(page(full_analysis()), "epoch"))
    apart = replace(split_of_2_s(), live_fetch_stall_s=about(0.4, unit="s"))
    assert "both ways disagree by 49 % of the epoch" in said(
        section(page(replace(full_analysis(), split=apart)), "epoch")
    )


def test_measured_points_lie_on_their_curves() -> None:
    """A point that ran the unchanged setup belongs to every curve."""
    found = {study.parameter: study for study in studies(full_analysis())}
    assert [value for value, _ in found["cache_bytes"].checks] == [0.0, 50e6, 20e6]
    assert [value for value, _ in found["prep_workers"].checks] == [1, 4]
    assert [value for value, _ in found["nodes"].checks] == [1]
    for study in found.values():
        drawn = dict(study.main.points)
        assert study.now in drawn
        for value, check in study.checks:
            assert drawn[value].steady.trial_per_s == check.predicted


def test_a_measured_curve_is_drawn_as_predictions_follow_it() -> None:
    """The line also follows the fit between measured points."""
    analysis = full_analysis()
    figures = {chart.name: chart.figure for chart in charts(analysis, [])}
    for name, curve_of in (("measured-prep", analysis.rates.prep), ("measured-storage", analysis.rates.storage)):
        drawn = figures[name].axes[0].get_lines()[0]
        for count in np.linspace(0, curve_of.most, 57):
            assert np.interp(count, *drawn.get_data()) == pytest.approx(curve_of.rate(count))


def test_a_measured_point_says_what_it_is(full_page: str) -> None:
    """244.3 measured, 249.2 predicted. Two caches, one number of workers, and the unchanged setup on all 6."""
    titles = [said(node) for node in section(full_page, "what-if").iter("title")]
    assert "0 B: measured 244 (240 to 249), predicted 249 (234 to 264) samples/s, +2.0 %" in titles
    assert len([title for title in titles if "measured" in title and "%" in title]) == 3 + 2 + 4 * 1


def test_sharing_is_drawn_beside_not_sharing() -> None:
    shared = {study.parameter: study for study in studies(full_analysis())}
    assert all(study.other is not None for study in shared.values())
    assert shared["trials"].main.points[3][1].setup.sharing
    alone = {study.parameter: study for study in studies(full_analysis(sharing=False))}
    assert not alone["trials"].main.points[3][1].setup.sharing
    single = {study.parameter: study for study in studies(bare_analysis(round_rates(), Setup()))}
    assert [name for name, study in single.items() if study.other is not None] == ["trials"]


def test_what_a_curve_means() -> None:
    """Storage at 4 ms sets the pace until it is 3.2 times as fast, then prep at 1.25 ms."""
    along = curve(round_rates(), Setup(), "storage_factor", [1, 2, 3, 4])
    assert pace(along) == "Up to 3 times the measured speed the pace is set by storage, then by prep."
    along = curve(round_rates(), Setup(), "trials", [1, 2])
    assert pace(along) == "The pace is set by storage throughout."


def test_a_sentence_names_where_the_pace_changes_hands() -> None:
    """The named crossing is exact, although only neighbouring values are drawn.

    Storage takes 4 ms / 3.2 = 1.25 ms, as long as prep; 2.83 and 3.36 times are drawn. A step takes 1,100 samples/s. 5
    workers prepare fewer and 6 prepare more; 1 and 9 of 256 are drawn.
    """
    found = {study.parameter: study for study in studies(bare_analysis(round_rates(), Setup()))}
    sentence = "Up to 3.2 times the measured speed the pace is set by storage, then by prep."
    assert found["storage_factor"].sentences[0] == sentence
    assert found["cache_bytes"].sentences[0] == "Up to 70.5 MB the pace is set by storage, then by prep."
    cores = bare_analysis(round_rates(step=about(1100), storage=line((1, 1e6)), cores=128), Setup())
    assert studies(cores)[1].sentences[0] == (
        "Up to 5 prep workers the pace is set by prep, then by the training step."
    )


def test_how_much_is_enough() -> None:
    """70.5 of 100 MB, the same as `smallest_cache`."""
    cache, workers, *_ = studies(bare_analysis(round_rates(), Setup()))
    assert cache.enough == 70_512_821
    assert cache.sentences[-1] == (
        "A cache of 70.5 MB, 71 % of the bytes read there, ends fetch stalls; it is 0 B now."
    )
    assert "5 prep cores on each node end prep stalls; it has 4 now." in workers.sentences


def test_errors_of_predictions() -> None:
    """The errors are 2, 3, 6 and 1 %, so the median is 2.5 %."""
    trust = said(section(page(full_analysis()), "trust"))
    assert "4 predictions were run. Half of them are off by at most 2.5 %, all by at most 6.0 %." in trust
    one = Verification((check_of(round_rates(), Setup(), "trials", 2, 0.1),))
    assert "1 prediction was run." in said(
        section(page(bare_analysis(round_rates(), Setup(), verification=one)), "trust")
    )


def test_what_was_not_done_is_said() -> None:
    html = page(bare_analysis(round_rates(), Setup(), changes=()))
    assert "Nothing is recommended." in said(section(html, "change"))
    assert "No feed was run for this analysis" in said(section(html, "epoch"))
    assert "No prediction was run for this report." in said(section(html, "trust"))
    assert "Nothing was seen that makes a figure doubtful." in said(section(html, "trust"))
    assert "command" not in said(section(html, "how"))


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(any_rates(), any_setup())
def test_any_analysis_has_a_page(rates: Rates, setup: Setup) -> None:
    found = bare_analysis(rates, setup)
    html = page(found)
    assert said(next(parsed(html).iter("header"))).count(found.sentence) == 1
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))
    assert page(found) == html


def test_it_is_written(tmp_path: Path, full_page: str) -> None:
    """The encoding is UTF-8 even if the path of the data is not."""
    write_report(full_analysis(), tmp_path / "out.html", command=COMMAND)
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == full_page
    with pytest.raises(ConfigError, match=r"the folder of the report must exist, got .*/nowhere"):
        write_report(full_analysis(), tmp_path / "nowhere" / "out.html")


def test_plots_are_written(tmp_path: Path) -> None:
    """The files are SVG with real text, one for each chart of the page."""
    written = write_plots(full_analysis(), tmp_path / "plots")
    assert [path.name for path in written] == [
        "split.svg",
        "pipeline.svg",
        "what-if-cache-bytes.svg",
        "what-if-prep-workers.svg",
        "what-if-trials.svg",
        "what-if-storage-factor.svg",
        "what-if-accelerator-factor.svg",
        "what-if-nodes.svg",
        "measured-prep.svg",
        "measured-storage.svg",
    ]
    texts = {path.stem: said(ElementTree.parse(path).getroot()) for path in written}
    for text in ("A larger cache", "cache of a node", "one feed for all a feed for each trial measured"):
        assert text in texts["what-if-cache-bytes"]
    assert "waiting for reads" in texts["split"]
    assert texts["pipeline"].count("sets the pace") == 1
    assert "storage gives 249/s 234–264" in texts["pipeline"]
    with pytest.raises(ConfigError, match=r"cannot make the folder of plots .*: No such file"):
        write_plots(full_analysis(), tmp_path / "no" / "plots")


SEEN = [
    ("ink", "paper"),
    ("ink", "panel"),
    ("soft", "paper"),
    ("soft", "panel"),
    ("blue", "panel"),
    ("paper", "red"),
]
"""Text colours and their backgrounds."""

DRAWN = [
    *(("blue", "paper"), ("red", "paper"), ("grey", "paper"), ("ink", "paper"), ("focus", "paper")),
    *(("blue", "pipe"), ("blue", "band"), ("red", "red pipe")),
]
"""Colours of meaningful shapes, and their backgrounds."""


def schemes() -> Iterator[dict[str, str]]:
    """Yield the colours of the light and of the dark page."""
    style = (files("mbaas.tools.analysis.report") / "templates" / "style.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)[:2]
    for text in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))
        assert colours.keys() >= set(VARIABLES.values())
        tints = {"pipe": ("blue", 0.15), "band": ("blue", 0.2), "red pipe": ("red", 0.15)}
        yield colours | {name: mixed(colours[of], colours["paper"], part) for name, (of, part) in tints.items()}


def mixed(one: str, other: str, part: float) -> str:
    """Mix two colours; ``part`` is the fraction of the first."""
    pairs = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(part * a + (1 - part) * b) for a, b in pairs).hex()


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2): 21 between black and white."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", list(schemes()), ids=["light", "dark"])
def test_contrast(colours: dict[str, str]) -> None:
    """WCAG 2 AA requires 4.5 for text and 3 for shapes."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for pair in SEEN:
        assert contrast(*(colours[name] for name in pair)) >= 4.5, pair
    for pair in DRAWN:
        assert contrast(*(colours[name] for name in pair)) >= 3, pair
