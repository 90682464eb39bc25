"""Damaged and hostile input causes an error in every decoder and reader, and nothing worse. Each runs for 1 to 2 s.

`python -m benchmarks fuzz` runs for any length of time. Each bug that it found has a regression test in the tests of
the fixed code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.fuzz.run import fuzz
from benchmarks.fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_hostile_gets_an_error_and_never_more(target: str) -> None:
    if target == "dali":
        pytest.importorskip("nvidia.dali")
    done = fuzz(target, first=0, cases=TARGETS[target].in_suite)
    assert not done.failures, "\n\n".join(f"case {each.case}: {each.kind}: {each.told}" for each in done.failures)
    assert done.cases == TARGETS[target].in_suite


@pytest.mark.parametrize(
    ("target", "kind", "told"),
    [
        ("error", "error", "KeyError: 'no such key'"),
        ("exit", "error", "SystemExit: 0"),
        ("crash", "crash", "Segmentation fault"),
        ("hang", "hang", "planted.py"),
        ("memory", "memory", "bytes more than at its start"),
        ("too much memory", "error", "MemoryError"),
    ],
)
def test_planted_bugs_are_found_and_the_cases_after_them_still_run(
    monkeypatch: pytest.MonkeyPatch, target: str, kind: str, told: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *sys.path]))
    done = fuzz(target, first=0, cases=8, patience_s=2.0 if target == "hang" else 60.0, where="planted")
    (failure,) = done.failures
    assert (failure.case, failure.kind) == (3, kind)
    assert told in failure.told
    assert done.cases == 8
