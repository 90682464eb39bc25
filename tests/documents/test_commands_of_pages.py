"""Command lines of mbaas, its benchmarks and Ray on pages are valid, and mbaas commands that need no cluster run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import page_data
import pytest
import typer
from command_output import run

from benchmarks.__main__ import app as benchmarks_app
from mbaas.cli import app as mbaas_app
from support.pages import PAGES, ROOT, block_with, blocks_of, text_of

RUN = (
    "show feed.yaml --out grid.png",
    "serve --schema",
    "cluster list",
    "cluster write raycluster.yaml",
    "cluster write grafana/feed.json",
    "cluster write grafana/search.json",
    "plan examples/plan/jobs.yaml",
    "plan examples/plan/jobs.yaml --json",
    "simulate presets",
    "simulate presets imagenet-1k",
    "simulate cache --policy page_cache --cached 0.5",
    "simulate frequency --workers 16 --epochs 90 --samples 1281167 --delta 0.8 --monte-carlo",
    "simulate imbalance --nodes 16 --local-batch 64",
)
"""Commands on pages that need no cluster and take at most 1 s. `tests/cli` runs the others."""

LONG = (
    "simulate policies imagenet-1k --set trials=16 --plot policies.svg",
    'simulate sweep imagenet-1k --x "cache_bytes=5 GB,20 GB,80 GB" --y trials=1,4,16 --versus minio',
)
"""Slower commands on pages that need no cluster."""


PROGRAMS = {"mbaas": mbaas_app, "python -m benchmarks": benchmarks_app}
"""Program name on pages -> app."""

SHOWN = re.compile(rf"(?:\.venv/bin/|srun )?({'|'.join(PROGRAMS)}|ray) (.+)")
"""A command line. On pages, the path of a virtual environment may precede the name."""

SEVERAL_WORDS, VARIABLE = re.compile(r" \$\w+(?= |$)"), re.compile(r"\$\w+")
"""Variables of the shell: one for any number of options, and one for a value, which is taken as 4."""


@cache
def command_of(program: str) -> Any:
    """A program's command, including its subcommands."""
    if program == "ray":
        from ray.scripts.scripts import cli  # imported here because it takes a second

        return cli
    return typer.main.get_command(PROGRAMS[program])


def command_lines(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(program, arguments) of each command line in a page's code blocks and between backticks."""
    blocks = [block.text.replace("\\\n", " ") for block in blocks_of(page, "sh")]
    lines = [line for block in blocks for line in block.splitlines()]
    for line in [*lines, *(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text_of(page)))]:
        if found := SHOWN.fullmatch(line):
            # Strip pipes, redirections and background marks.
            words = VARIABLE.sub("4", SEVERAL_WORDS.sub("", re.split(r"[|&]| > ", found[2])[0]))
            yield found[1], shlex.split(words, comments=True)


def misused(words: list[str], program: str = "mbaas") -> str:
    """Message about the first invalid argument, or an empty string. Runs nothing."""
    command = command_of(program)
    words = words[:-1] if words[-1] == "--help" else words
    try:
        context = command.make_context(program, [*words], resilient_parsing=not words)
        while hasattr(context.command, "commands"):  # a group
            left = [*context._protected_args, *context.args]
            if not left:
                return ""
            name, command, rest = context.command.resolve_command(context, left)
            # The text names a command without arguments: do not report them as missing.
            context = command.make_context(name, rest, parent=context, resilient_parsing=not rest)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of click, which Ray uses, or of typer's copy of it
            raise
        return str(error.format_message())
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_that_are_shown_are_taken(page: Path) -> None:
    found = {f"{program} {shlex.join(words)}": misused(words, program) for program, words in command_lines(page)}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("serve feed.yaml --detach", ""),
        ("serve", ""),
        ("simulate sweep --help", ""),
        ("chaos --faults 50 -- python my_search.py --epochs 3", ""),
        ("serves feed.yaml", "No such command 'serves'"),
        ("simulate policies imagenet-1k --plot=a.svg", ""),
        ("cluster copy node.env", "No such command 'copy'"),
        ("top train --json", "No such option: --json"),
        ("show feed.yaml --count many", "Invalid value for '--count': Input should be a valid integer"),
        ("show feed.yaml grid.png", "Got unexpected extra argument"),
        ("ledger --inexact", "Missing argument 'name'"),
    ],
)
def test_a_command_line_that_is_not_taken_is_found(line: str, wrong: str) -> None:
    assert misused(shlex.split(line)).startswith(wrong)
    assert bool(misused(shlex.split(line))) == bool(wrong)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("start --head --num-cpus=0 --labels=mbaas.io/role=head", ""),
        ("symmetric-run --address a:6379 --min-nodes 4 --num-cpus 16 -- python search.py", ""),
        ("symmetric-run --min-nodes 4 -- python search.py", "Missing option '--address'"),
        ("start --heads", "No such option"),
        ("job submit --working-directory . -- python search.py", "No such option"),
        ("ups cluster/aws.yaml", "No such command 'ups'"),
    ],
)
def test_a_command_line_of_ray_that_is_not_taken_is_found(line: str, wrong: str) -> None:
    assert misused(shlex.split(line), "ray").startswith(wrong)
    assert bool(misused(shlex.split(line), "ray")) == bool(wrong)


def test_a_benchmark_that_does_not_exist_is_found() -> None:
    assert misused(["costs", "--trials", "8"], "python -m benchmarks") == ""
    assert misused(["latest"], "python -m benchmarks").startswith("No such command 'latest'")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the feed of the tutorial and the examples of this checkout."""
    monkeypatch.chdir(tmp_path)
    page_data.for_tutorial(tmp_path)
    (block,) = blocks_of(ROOT / "docs" / "tutorial.md", "yaml")
    (tmp_path / "feed.yaml").write_text(block.text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("line", [*RUN, *(pytest.param(line, marks=pytest.mark.long) for line in LONG)])
def test_a_command_line_runs(line: str, here: Path) -> None:
    shown = {shlex.join(words) for page in PAGES for _, words in command_lines(page)}
    assert shlex.join(shlex.split(line)) in shown, "no page shows it any more"
    out = run(line)
    assert out
    for name in re.findall(r"[\w-]+\.(?:png|svg)", line):
        assert (here / name).stat().st_size > 1000


def cells(table: str) -> list[list[str]]:
    """The words of each table row, without rules and spaces."""
    return [words for line in table.splitlines() if (words := re.sub(r"[│┃─━]", " ", line).split())]


def test_the_plan_is_what_its_page_shows(here: Path) -> None:
    page = ROOT / "docs" / "plan.md"
    (shown,) = blocks_of(page, "")
    assert [line.rstrip() for line in run("plan examples/plan/jobs.yaml").splitlines()] == [
        line.rstrip() for line in shown.text.splitlines()
    ]


def test_init_prints_what_its_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have the names and sizes of the tutorial's; their pixels do not matter."""
    monkeypatch.chdir(tmp_path)
    content = cv2.imencode(".jpg", np.zeros((300, 400, 3), np.uint8))[1].tobytes()
    for name in ("leaf", "moss", "pine"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    for number in range(1200):
        (tmp_path / "photos" / ("leaf", "moss", "pine")[number % 3] / f"{number}.jpg").write_bytes(content)
    shown = block_with(ROOT / "docs" / "reference" / "commands.md", "$ mbaas init photos")
    assert [line.rstrip() for line in run("init photos").splitlines()] == shown.text.splitlines()[1:]


@pytest.mark.long
def test_the_simulation_has_the_rows_that_its_page_shows(here: Path) -> None:
    """The page leaves out rows and columns."""
    (shown,) = blocks_of(ROOT / "docs" / "simulate.md", "")
    rows = {row[0]: row for row in cells(run(LONG[0]))}
    for row in cells(shown.text)[2:]:
        there = iter(rows[row[0]])
        assert all(cell in there for cell in row), (row, rows[row[0]])


def test_all_commands_are_in_the_table_of_the_reference() -> None:
    """The rest of that page is generated from the code."""
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    named = re.findall(r"^\| `mbaas ([\w-]+)", page, re.MULTILINE)
    assert sorted(named) == sorted(command_of("mbaas").commands)
