"""The documentation as a site: it builds without a warning, names everything public, and what it shows works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mbaas.cli import app, feed_file
from mbaas.metrics import METRICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

PUBLIC = {
    "mbaas": ("feeds.md", "data.md", "errors.md"),
    "mbaas.dataset": ("data.md",),
    "mbaas.transforms": ("transforms.md",),
    "mbaas.errors": ("errors.md",),
    "mbaas.analysis": ("analysis.md",),
    "tune_integration": ("tune.md",),
}
"""A public module, and the pages of the reference that have its names."""


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code of a page in a language."""
    return [
        textwrap.dedent(text)
        for text in re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `mkdocs build --strict` does."""
    pytest.importorskip("mkdocstrings", reason="Material and mkdocstrings need Python 3.11")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    """Also those that come from elsewhere, and copies of files to which pages link."""
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert built == {"index.html", "404.html"} | {
        f"{page}/index.html" for page in pages | {"changelog", "contributing", "security"}
    }
    assert (site / "repository/examples/feed.yaml").read_text() == (ROOT / "examples/feed.yaml").read_text()
    assert 'href="../repository/cluster/onprem.yaml"' in (site / "cluster/index.html").read_text()
    assert not (site / "_site").exists()


def test_pages_have_what_the_code_says(site: Path) -> None:
    metrics = (site / "metrics/index.html").read_text()
    assert all(f"<code>{metric.exported}</code>" in metrics for metric in METRICS)
    commands = (site / "reference/commands/index.html").read_text()
    assert all(f'id="mbaas-{name}"' in commands for name in ("serve", "show", "top", "simulate-policies"))
    assert "prep_labels: {zone: a}" in re.sub(r"<[^>]+>", "", (site / "reference/file/index.html").read_text())


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    __import__(module)
    pages = "".join((site / "reference" / page.replace(".md", "/index.html")).read_text() for page in PUBLIC[module])
    anchors = {*re.findall(r'id="((?:mbaas|tune_integration)[\w.]*)"', pages)}
    # Some names are in two modules, and shown once; one is also that of the module where it is defined.
    shown = (f"{module}.{{}}", "mbaas.{}", "mbaas.errors.{}", f"{module}.{{0}}.{{0}}")
    names = sys.modules[module].__all__
    assert [name for name in names if not {each.format(name) for each in shown} & anchors] == []


def test_the_quick_start_runs(
    ray_clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (program,) = blocks(DOCS / "quick-start.md", "python")
    exec(compile(program, "quick-start.md", "exec"), {"__name__": "pasted"})
    ((received, prepared),) = re.findall(r"^received (\{.*\}) prepared (\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert yaml.safe_load(received) == {"ann": 1500, "bob": 1500}
    assert 1500 <= int(prepared) < 2700  # 3,000 if they shared nothing


def test_the_first_question_is_answered_by_its_program() -> None:
    (program,) = blocks(DOCS / "loading.md", "python")
    names: dict[str, Any] = {}
    exec(compile(program, "loading.md", "exec"), names)
    seen: list[int] = []
    assert 0 < names["seconds_per_step"](seen.append, iter(range(50))) < 0.1
    assert seen == list(range(50))


@pytest.mark.parametrize("page", [DOCS / "quick-start.md"], ids=lambda page: page.name)
def test_files_of_feeds_are_read(page: Path, tmp_path: Path) -> None:
    (text,) = blocks(page, "yaml")
    (tmp_path / "feed.yaml").write_text(text)
    assert feed_file.load(tmp_path / "feed.yaml").name == "quick"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_that_is_shown_compiles(page: Path) -> None:
    for number, program in enumerate(blocks(page, "python")):
        compile(program, f"{page.name}, block {number}", "exec")


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of the lines with which a page runs mbaas."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("mbaas "):
                yield shlex.split(line.partition("|")[0].partition(" > ")[0].partition("&")[0], comments=True)[1:]


def misused(words: list[str]) -> list[str]:
    """What of a command line mbaas does not know: the command, or options."""
    command: Any = typer.main.get_command(app)
    for word in words:
        commands = getattr(command, "commands", None)  # of a group
        if commands is None or word.startswith("-"):
            break
        if word not in commands:
            return [word]
        command = commands[word]
    words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
    known = {"--help", *(opt for param in command.params for opt in (*param.opts, *param.secondary_opts))}
    return [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_that_are_shown_exist(page: Path) -> None:
    found = {" ".join(words): misused(words) for words in command_lines(page)}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("serve feed.yaml --detach", []),
        ("serves feed.yaml", ["serves"]),
        ("simulate policies imagenet-1k --plot=a.svg", []),
        ("cluster copy node.env", ["copy"]),
        ("top train --json", ["--json"]),
    ],
)
def test_a_command_line_that_does_not_exist_is_found(line: str, wrong: list[str]) -> None:
    assert misused(line.split()) == wrong
