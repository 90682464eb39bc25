"""A hook of MkDocs: makes pages of files that lie outside of docs/, and what pages have from the code.

README.md is the front page; CHANGELOG.md, CONTRIBUTING.md and SECURITY.md are pages, too. A link to any other file of
the repository leads to a copy of it in the site. The same links work where the repository itself is read.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""File of the repository -> page of the site."""

COPIES = "repository"
"""The folder of the site with copies of other files."""

_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_DRAWN = re.compile(r'<img\b[^>]*\ssrc="([^":]+\.svg)"[^>]*>')
_IMAGE = re.compile(r"(!\[[^\]]*\])\((?!https?:)([^)\s]+)\)")
_GENERATED = re.compile(r"<!-- generated: (\w+) ?(.*?) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and copies of the files to which pages link."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for name in sorted({name for uri, text in pages.items() for name in _copied(uri, text)}):
        files.append(File.generated(config, f"{COPIES}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Let links lead to pages and copies, and put in what is made from the code."""
    uri = page.file.src_uri
    text = _outside_code(markdown, lambda part: _LINK.sub(lambda link: _linked(uri, link), part))
    text = _IMAGE.sub(lambda image: f"{image[1]}({_relative(uri, image[2])})", text)
    return _GENERATED.sub(lambda found: GENERATED[found[1]](found[2]), text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Put drawings into the page itself, so that they follow its light or dark switch and have selectable text."""

    def drawn(image: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), image[1]))
        return (ROOT / "docs" / path).read_text(encoding="utf-8").strip()

    return _DRAWN.sub(drawn, html)


def _target(uri: str, link: str) -> str:
    """Return the file of the repository to which a page's link leads."""
    source = _SOURCES.get(uri, f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _relative(uri: str, image: str) -> str:
    """Return the path from a page to an image in docs/, as the site needs it."""
    return posixpath.relpath(_target(uri, image).removeprefix("docs/"), posixpath.dirname(uri) or ".")


def _copied(uri: str, text: str) -> list[str]:
    """Find the files that a page links to and that the site shows as copies."""
    found: list[str] = []

    def look(part: str) -> str:
        found.extend(_target(uri, link) for _, link, _ in _LINK.findall(part) if link and "://" not in link)
        return part

    _outside_code(text, look)
    return [name for name in found if name not in PAGES and not name.startswith("docs/") and (ROOT / name).is_file()]


def _linked(uri: str, link: re.Match[str]) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    if not path or "://" in path or path.startswith("mailto:"):
        return link[0]
    target = _target(uri, path)
    if target in PAGES:
        there = PAGES[target]
    elif target.startswith("docs/"):
        there = target.removeprefix("docs/")
    elif (ROOT / target).is_dir():
        return text  # a folder has no page
    else:
        there = f"{COPIES}/{target}"
    return f"[{text}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"


def _outside_code(text: str, change: Any) -> str:
    """Change the text outside code blocks."""
    blocks = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else change(part) for part in blocks)


def _metrics(_: str) -> str:
    from mbaas.ray_cluster.metrics import METRICS

    rows = [f"| `{metric.exported}` | {metric.kind} | {metric.description} |" for metric in METRICS]
    return "\n".join(["| name | kind | meaning |", "|---|---|---|", *rows])


def _file(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return f"```{Path(name).suffix.removeprefix('.')}\n{text}```"


def _commands(_: str) -> str:
    import typer
    from typer.testing import CliRunner

    from mbaas.cli import app

    def helps(group: Any, words: list[str]) -> list[str]:
        told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
        parts = [f"## {' '.join(['mbaas', *words])}", f"```text\n{told.stdout.strip()}\n```"]
        for name, command in getattr(group, "commands", {}).items():
            parts += helps(command, [*words, name])
        return parts

    return "\n\n".join(helps(typer.main.get_command(app), []))


def _options(_: str) -> str:
    from mbaas.cli.feed_file import schema

    whole = schema()
    parts = {"Top level": whole}
    for name, option in whole["properties"].items():
        for form in (option, *option.get("anyOf", ())):
            if "$ref" in form:
                parts[name] = whole["$defs"][form["$ref"].rpartition("/")[2]]
    parts |= {f"data: {name}": part for name, part in whole["$defs"].items() if name.startswith("read_")}
    heading = ["| key | default | meaning |", "|---|---|---|"]
    return "\n\n".join(
        "\n".join([f"### {title}", "", *heading, *(_row(*option) for option in part["properties"].items())])
        for title, part in parts.items()
    )


def _row(name: str, option: Any) -> str:
    default = option.get("default")
    shown = f"`{json.dumps(default)}`" if default is not None and not isinstance(default, dict) else ""
    meaning = " ".join(option.get("description", "").split()).replace("|", ", ")
    return f"| `{name}` | {shown} | {meaning} |"


GENERATED = {"metrics": _metrics, "file": _file, "commands": _commands, "options": _options}
"""What `<!-- generated: NAME ... -->` in a page stands for."""
