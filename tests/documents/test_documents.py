"""Documents and docstrings name only existing members, paths and modules; the architecture's tables are complete."""

from __future__ import annotations

import ast
import enum
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from mbaas.core.staging.transitions import BlockState, ConsumerState, PartState, WorkerState

ROOT = Path(__file__).parents[2]

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
"""CHANGELOG.md is left out because it names removed things."""

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

MODULES = tuple(path for package in ("mbaas", "tune_integration") for path in sorted((ROOT / package).rglob("*.py")))

ELSEWHERE = {"Console", "Callback"}
"""Classes of other libraries: rich and Ray Tune."""

BLOCKS_OF_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`+([^`]+)`+")
MEMBER = re.compile(r"(?<!\w)([A-Z]\w*[a-z]\w*)\.([A-Za-z_]\w*)")  # README.md and FEED.yaml are files, not classes


def members_named(text: str) -> set[tuple[str, str]]:
    """(class, member) of each `Class.member` between backticks."""
    spans = CODE.findall(BLOCKS_OF_CODE.sub("", text))
    return {found for span in spans for found in MEMBER.findall(span) if found[0] not in ELSEWHERE}


def texts_of(source: str) -> Iterator[str]:
    """All docstrings: of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def defined_in(body: ast.ClassDef) -> set[str]:
    """Members of a class: methods, fields, slots, and attributes that its methods set on ``self``."""
    names: set[str] = set()
    for node in body.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names.update(target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node.value, ast.Tuple) and "__slots__" in names:
                names.update(each.value for each in node.value.elts if isinstance(each, ast.Constant))
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def members_of(sources: list[str]) -> Mapping[str, set[str]]:
    """Class -> its members, including inherited ones; classes of the same name count as one."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(defined_in(node))
                above = {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases}
                bases.setdefault(node.name, set()).update(above)

    def with_inherited(name: str) -> set[str]:
        return own.get(name, set()).union(*(with_inherited(base) for base in bases.get(name, ()) if base != name))

    return {name: with_inherited(name) for name in own}


@cache  # and not when the tests are collected, which each process does
def members() -> Mapping[str, set[str]]:
    return members_of([path.read_text() for path in MODULES])


def stale(text: str) -> list[str]:
    """Members named in a text that do not exist."""
    return [f"{name}.{member}" for name, member in sorted(members_named(text)) if member not in members().get(name, ())]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(path: Path) -> None:
    assert stale(path.read_text()) == []


def test_what_docstrings_name_is_there() -> None:
    found = {str(path.relative_to(ROOT)): stale("\n\n".join(texts_of(path.read_text()))) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `Cohort.wants`", ["Cohort.wants"]),
        ("see ``mbaas.core.staging.consumers.Cohort.wants(3)``", ["Cohort.wants"]),
        ("see `Cohorts.wanted`", ["Cohorts.wanted"]),
        ("`StagedPart.due` and `StagingState.failed` are there, `Cohort.useful` and `PartState.PUT_OFF`, too", []),
        ("Cohort.wants without backticks, `FEED.yaml`, `T.Map`, `jobs.NAME`", []),
    ],
)
def test_a_name_that_is_not_there_is_found(text: str, found: list[str]) -> None:
    assert stale(text) == found


STATES = re.compile(r"^A \*\*(\w+)\*\*.*?\n\n(\|.*?)\n\n", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("thing", "states"),
    [("part", PartState), ("block", BlockState), ("consumer", ConsumerState), ("worker", WorkerState)],
)
def test_the_tables_of_states_have_each_state_once(thing: str, states: type[enum.Enum]) -> None:
    tables = dict(STATES.findall((ROOT / "docs" / "architecture.md").read_text()))
    assert re.findall(r"^\| `(\w+)` \|", tables[thing], re.MULTILINE) == [state.name for state in states]


TREES = ("mbaas", "tune_integration", "tests", "benchmarks", "examples", "docs", "cluster", ".ci")
"""Folders of this repository whose files may be named in documents."""

FOLDERS = ("train/", "validation/", "records/")
"""Folders of a user."""

PROGRAMS = ("my_prep.py", "search.py", "photos.py", "before.py", "after.py")
"""Programs of a user."""

PATH = re.compile(rf"(?:{'|'.join(map(re.escape, TREES))})/(?:[\w./-]*\w\.\w+|[\w./-]+/)?|[\w/-]+(?:\.py|/)")
"""A path from the root that ends in a suffix or a slash, or its last parts.

Metrics such as `mbaas/stall_share` do not match.
"""

MODULE = re.compile(r"(?:mbaas|tune_integration)(?:\.[A-Za-z_]\w*)+(?![\w/])")
"""A module, or a name in one. The node label `mbaas.io/role` does not match."""


def tails_of(paths: Iterator[Path]) -> set[str]:
    """Each path from the root and all its tails: for `a/b/c.py` also `b/c.py` and `c.py`."""
    parts = [path.relative_to(ROOT).parts for path in paths]
    return {"/".join(each[start:]) for each in parts for start in range(len(each))}


@cache
def places() -> set[str]:
    return tails_of(path for tree in TREES for path in [ROOT / tree, *(ROOT / tree).rglob("*")])


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module, or a name in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def places_missing(text: str) -> list[str]:
    """Paths and modules between backticks that do not exist."""
    words = {word for span in CODE.findall(BLOCKS_OF_CODE.sub("", text)) for word in span.split()}
    paths = {word for word in words if PATH.fullmatch(word)} - {*FOLDERS, *PROGRAMS}
    named = {found for word in words for found in MODULE.findall(word)}
    missing = [path for path in paths if path.rstrip("/") not in places()]
    return sorted([*missing, *(name for name in named if not is_module(name))])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_each_path_and_module_in_a_document_is_there(path: Path) -> None:
    assert places_missing(path.read_text()) == []


def test_each_path_and_module_in_a_docstring_is_there() -> None:
    found = {str(path): places_missing("\n\n".join(texts_of(path.read_text()))) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`coordinator/api.py` and `api.py`", ["api.py", "coordinator/api.py"]),
        ("`pytest -m long tests/core/test_nothing.py -k some`", ["tests/core/test_nothing.py"]),
        ("`mbaas/order.md`, `staged/` and `mbaas/staged/`", ["mbaas/order.md", "mbaas/staged/", "staged/"]),
        (
            "`mbaas.core.order` and ``mbaas.order.Shuffled``",
            ["mbaas.core.order", "mbaas.order.Shuffled"],
        ),
        (
            "`staging/state.py`, `tests/core/`, `cluster/node.env`, `mbaas.errors.shown()`, `mbaas.serve`",
            [],
        ),
        ("api.py without backticks, `mbaas/stall_share`, `mbaas.io/role=prep`, `s3://bucket/train`, `train/`", []),
    ],
)
def test_a_place_that_is_not_there_is_found(text: str, missing: list[str]) -> None:
    assert places_missing(text) == missing


def modules_of(folder: str) -> set[str]:
    """Modules and packages in a folder of mbaas, without `__init__` and other dunder files.

    A folder that holds only compiled files is not a package: git leaves a removed package's compiled files behind.
    """
    paths = (ROOT / "mbaas" / folder).iterdir()
    found = {path.stem for path in paths if path.suffix == ".py" or any(path.glob("*.py"))}
    return {name for name in found if not name.startswith("__")}


def named_in_rows(heading: str) -> list[str]:
    """Names between backticks in the first column of the architecture's table below a heading."""
    (table,) = re.findall(rf"^{re.escape(heading)}\n\n(?:\|.*\n){{2}}((?:\|.*\n)+)", ARCHITECTURE, re.MULTILINE)
    return [name for row in table.splitlines() for name in CODE.findall(row.split("|")[1])]


@pytest.mark.parametrize("folder", ["core", "core/staging", "core/cluster", "coordinator", "client"])
def test_the_map_of_a_package_has_each_module_once(folder: str) -> None:
    rows = re.findall(r"^`(\w+)` ", (ROOT / "mbaas" / folder / "__init__.py").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(modules_of(folder))


def test_the_table_of_packages_has_each_once() -> None:
    rows = [name.removesuffix(".py").rstrip("/") for name in named_in_rows("## Packages")]
    assert sorted(rows) == sorted(modules_of(""))


def test_all_tests_of_the_readme_are_those_of_ci() -> None:
    """Both also install with the same options. In CI pip is quiet and runs in another environment."""
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for shared in ("-m pytest -n ", '-c constraints.txt -e ".[test]"'):
        assert shared in readme
        assert shared in ci
