"""The documentation site builds without a warning and names everything public.

The examples on its pages are run in `tests/documents/`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mbaas.ray_cluster.metrics import METRICS
from mbaas.settings import GROUPS, FeedOptions
from support.pages import ROOT

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"

PUBLIC = {
    "mbaas": ("feeds.md", "data.md", "errors.md"),
    "mbaas.dataset": ("data.md",),
    "mbaas.transforms": ("transforms.md",),
    "mbaas.errors": ("errors.md",),
    "mbaas.analysis": ("analysis.md",),
    "tune_integration": ("tune.md",),
}
"""Public module -> the reference pages with its names."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `mkdocs build --strict` builds it."""
    pytest.importorskip("mkdocstrings", reason="Material and mkdocstrings need Python 3.11")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    """Also pages from outside docs/, and copies of linked files."""
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert built == {"index.html", "404.html"} | {
        f"{page}/index.html" for page in pages | {"changelog", "contributing", "security"}
    }
    assert (site / "repository/examples/feed.yaml").read_text() == (ROOT / "examples/feed.yaml").read_text()
    assert 'href="../repository/cluster/onprem.yaml"' in (site / "cluster/index.html").read_text()
    assert not (site / "_site").exists()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    """Neither directly nor by the theme's script, which fetches Mermaid for a page with a Mermaid diagram."""
    sources = r"<(?:script|img|iframe)[^>]*\ssrc=.?(?:https?:)?//"
    sheets = r"<link[^>]*rel=.?(?:stylesheet|preload)[^>]*//"
    loads = re.compile(rf"{sources}|{sheets}|class=.?mermaid")
    assert [path.name for path in site.rglob("*.html") if loads.search(path.read_text())] == []


def test_drawings_are_in_the_page(site: Path) -> None:
    """So they follow the light or dark switch of the page."""
    page = (site / "scaling/index.html").read_text()
    assert "47,089 samples/s</text>" in page
    assert "[data-md-color-scheme=slate] .chart" in page
    assert not re.search(r"<img[^>]*\.svg", page)
    assert (site / "results/trials.csv").is_file()


def test_pages_have_what_the_code_says(site: Path) -> None:
    metrics = (site / "metrics/index.html").read_text()
    assert all(f"<code>{metric.exported}</code>" in metrics for metric in METRICS)
    commands = (site / "reference/commands/index.html").read_text()
    assert all(f'id="mbaas-{name}"' in commands for name in ("serve", "show", "top", "simulate-policies"))
    options = (site / "reference/file/index.html").read_text()
    assert all(
        f"<code>{each.name}</code>" in options for kind in (FeedOptions, *GROUPS.values()) for each in fields(kind)
    )
    assert "prep_labels: {zone: a}" in re.sub(r"<[^>]+>", "", (site / "reference/file/index.html").read_text())


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    __import__(module)
    pages = "".join((site / "reference" / page.replace(".md", "/index.html")).read_text() for page in PUBLIC[module])
    anchors = {*re.findall(r'id="((?:mbaas|tune_integration)[\w.]*)"', pages)}
    # Some names are in two modules and shown once; one name is also the name of its module.
    shown = (f"{module}.{{}}", "mbaas.{}", "mbaas.errors.{}", f"{module}.{{0}}.{{0}}")
    names = sys.modules[module].__all__
    assert [name for name in names if not {each.format(name) for each in shown} & anchors] == []
