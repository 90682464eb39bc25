"""Only `mbaas.base.units` formats numbers: no other module sets digits, percentages or plurals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mbaas"

BY_HAND = {
    "tools/analysis/plots.py": "Matplotlib writes the numbers of an axis itself, by a pattern",
    "tools/analysis/report/page.py": "coordinates of an SVG, which nobody reads",
    "tools/simulator/results.py": "a table whose rows are compared has as many decimals in each",
    "tools/chaos/runner.py": "a log's first column, in which times stand below each other",
    "core/story.py": "a time of the core's clock, to the millisecond, which must sort",
}
"""Modules that format numbers without `units`, and their reasons."""

DIGITS = r"[^{}\s]*[eEfFgGn%]"
SPEC = re.compile(DIGITS)
FIELD = re.compile(rf"\{{\w*:{DIGITS}\}}")  # of str.format
LOGGED = re.compile(r"%[\d.]*[eEfFgG](?!\w)")  # of logging
BINARY = re.compile(r" ?[KMGT]iB\b")


def formats(source: str) -> Iterator[str]:
    """Places where a source sets the digits of a number, or writes a plural or a binary size."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = "".join(_text(part) or "*" for part in node.format_spec.values)
            if SPEC.fullmatch(spec):
                yield f"{node.lineno}: {{{ast.unparse(node.value)}:{spec}}}"
        elif isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and BINARY.match(_text(after)):
                    yield f"{node.lineno}: {{{ast.unparse(value.value)}}}{_text(after)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: {found}" for found in FIELD.findall(node.value) + LOGGED.findall(node.value))
        elif isinstance(node, ast.IfExp | ast.BinOp) and _is_plural(node):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _text(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""


def _is_plural(node: ast.IfExp | ast.BinOp) -> bool:
    parts = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node.left, node.right)
    return any(isinstance(part, ast.Constant) and part.value in ("s", "es") for part in parts)


def test_numbers_are_written_by_units() -> None:
    found = {
        name: [*formats(path.read_text())]
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := str(path.relative_to(PACKAGE))) != "base/units.py"
    }
    by_hand = {name: where for name, where in found.items() if where}
    assert {name: where for name, where in by_hand.items() if name not in BY_HAND} == {}
    assert sorted(by_hand) == sorted(BY_HAND), "an exception that is no longer needed"


@pytest.mark.parametrize(
    "planted",
    [
        'f"{waited_s:g} s"',
        'f"{waited_s:.1f} s"',
        'f"{share:.0%}"',
        'f"{rate:,.0f}/s"',
        'f"{rate:8.{digits}f}"',
        'f"{memory / 2**30} GiB"',
        '"{:.3g} s".format(waited_s)',
        '"{x:,g}"',
        'log.info("after %g s", waited_s)',
        '"%.1f" % share',
        "f\"{amount} sample{'s' * (amount != 1)}\"",
        "f\"{amount} sample{'' if amount == 1 else 's'}\"",
    ],
)
def test_a_format_by_hand_is_found(planted: str) -> None:
    assert [*formats(planted)]


@pytest.mark.parametrize(
    "fine", ['f"{found:,} {name!r:>8}"', 'f"{digest:016x}"', '"100 % of it"', 'f"{count}"', 'f"a feed takes {most}s"']
)
def test_whole_numbers_and_texts_are_no_such_format(fine: str) -> None:
    assert not [*formats(fine)]
