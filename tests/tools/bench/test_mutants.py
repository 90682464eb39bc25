"""Mutants of a function have all expected mistakes, and each mutant really has its mistake."""

from __future__ import annotations

import io
from pathlib import Path
from types import FunctionType

import pytest
from rich.console import Console

from benchmarks import schedules
from benchmarks.mutants.generate import mutants, mutated_code
from benchmarks.mutants.run import EQUIVALENT, Result, core_modules, dotted, table

SOURCE = '''
class Shelf:
    def fits(self, size):
        """Words."""
        if size < 10 and not self.full:
            return True
        self.story.tell("{} does not fit", size)
        self.refused += 1
        return None

    def validate(self):
        assert self.refused >= 0
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "shelf.py"
    path.write_text(SOURCE)
    return path


def test_each_place_has_its_mistakes_and_words_and_checks_have_none(module: Path) -> None:
    found = [(mutant.before, mutant.after) for mutant in mutants("shelf", module)]
    assert found == [
        ("if size < 10 and (not self.full)", "if not (size < 10 and (not self.full))"),
        ("size < 10 and (not self.full)", "size < 10 or not self.full"),
        ("size < 10", "size <= 10"),
        ("size < 10", "size >= 10"),
        ("10", "11"),
        ("10", "9"),
        ("not self.full", "self.full"),
        ("return True", "return None"),
        ("True", "False"),
        ("self.refused += 1", "self.refused -= 1"),
        ("self.refused += 1", "pass"),
        ("1", "2"),
        ("1", "0"),
    ]


def test_the_function_has_the_mistake(module: Path) -> None:
    class Shelf:
        full = False

    (mutant,) = [mutant for mutant in mutants("shelf", module) if mutant.after == "size <= 10"]
    assert mutant.key == "shelf Shelf.fits: size < 10 -> size <= 10"
    fits = FunctionType(mutated_code(mutant, module), {})
    assert fits(Shelf(), 10)


def test_equivalent_mutants_are_there_still() -> None:
    keys = {mutant.key for path in core_modules() for mutant in mutants(dotted(path), path)}
    assert EQUIVALENT.keys() <= keys


def test_a_table_has_a_score_for_each_module_and_the_survivors(module: Path) -> None:
    survivor, *_ = mutants("mbaas.core.shelf", module)
    result = Result(seconds=1.0, survived=[survivor])
    result.killed["mbaas.core.shelf"] = 3
    out = io.StringIO()
    Console(file=out, width=120).print(table(result))
    assert "75 %" in out.getvalue()
    assert "core.shelf:5 Shelf.fits" in out.getvalue()


def test_schedules_tell_the_seeds_of_broken_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.system_schedules import System

    assert schedules.play(range(3)) == {}

    def check_samples(*_: object) -> None:
        raise AssertionError("a sample is missing")

    monkeypatch.setattr(System, "check_samples", check_samples)
    broken = schedules.play(range(3))
    assert "a sample is missing" in broken[0]
    out = io.StringIO()
    Console(file=out, width=120).print(schedules.table(schedules.Result(3, 1.0, broken)))
    assert "seed 0 at" in out.getvalue()
