"""What documents and docstrings name is there: each `Class.member`, and each state of the staging core."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mbaas.core.transitions import BlockState, ConsumerState, PartState, WorkerState

ROOT = Path(__file__).parents[1]

DOCUMENTS = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
"""CHANGELOG.md is left out: it names what there was."""

MODULES = tuple(path for package in ("mbaas", "tune_integration") for path in sorted((ROOT / package).rglob("*.py")))

ELSEWHERE = {"Console", "Callback"}
"""Classes of other libraries: of rich, and of Ray Tune."""

BLOCKS_OF_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`+([^`]+)`+")
MEMBER = re.compile(r"(?<!\w)([A-Z]\w*[a-z]\w*)\.([A-Za-z_]\w*)")  # README.md and FEED.yaml are files, not classes


def members_named(text: str) -> set[tuple[str, str]]:
    """(class, member) of what stands between backticks, `Class.member`."""
    spans = CODE.findall(BLOCKS_OF_CODE.sub("", text))
    return {found for span in spans for found in MEMBER.findall(span) if found[0] not in ELSEWHERE}


def texts_of(source: str) -> Iterator[str]:
    """Docstrings: of a module, a class and a function, and those below a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def defined_in(body: ast.ClassDef) -> set[str]:
    """Names that a class defines: methods, fields, slots, and what its methods set on ``self``."""
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
    """Class -> its members, also those of the classes that it is made from; classes of one name count as one."""
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


MEMBERS = members_of([path.read_text() for path in MODULES])


def stale(text: str) -> list[str]:
    """What a text names that there is not."""
    return [f"{name}.{member}" for name, member in sorted(members_named(text)) if member not in MEMBERS.get(name, ())]


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
        ("see ``mbaas.core.consumers.Cohort.wants(3)``", ["Cohort.wants"]),
        ("see `Cohorts.wanted`", ["Cohorts.wanted"]),
        ("`StagedPart.due` and `StagingState.next_epoch` are there, `Cohort.wanted` and `PartState.PUT_OFF`, too", []),
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
