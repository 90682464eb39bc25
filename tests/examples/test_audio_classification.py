"""The audio example runs as users run it: in a separate process with its own Ray."""

from __future__ import annotations

import re

import pytest

from support.programs import FORKING_TRIALS, ROOT, run_program

EXAMPLE = ROOT / "examples" / "audio_classification.py"
LIMIT_S = 300
CHANCE = 1 / 5
"""Accuracy of guessing among five classes."""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("arguments", "trials", "least"),
    [
        (("--recordings", "200", "--trials", "2", "--epochs", "5"), 2, 3 * CHANCE),
        pytest.param(("--compare",), 6, 0.9, marks=pytest.mark.long),
    ],
    ids=["short", "whole"],
)
def test_it_learns_to_tell_sounds_apart(arguments: tuple[str, ...], trials: int, least: float) -> None:
    out, _ = run_program(EXAMPLE, *arguments, limit_s=LIMIT_S - 20, removed="sounds*", environment=FORKING_TRIALS)
    accuracy = re.search(r"best trial: ([\d.]+)% validation accuracy", out)
    assert accuracy, out
    assert float(accuracy[1]) / 100 > least
    assert f"{trials} trials, exact: True" in out
    counts = re.search(r"([\d,]+) samples prepared, ([\d,]+) delivered", out)
    assert counts, out
    prepared, delivered = (int(count.replace(",", "")) for count in counts.groups())
    assert delivered > prepared, "trials share prepared samples"
    if "--compare" in arguments:
        alone = re.search(r"a DataLoader per trial +([\d.]+)% +([\d,]+) +([\d,]+) +[\d.]+\n", out)
        assert alone, out
        assert float(alone[1]) / 100 > least
        assert alone[2] == alone[3]
        assert re.search(rf"one feed +{accuracy[1]}% +{counts[1]} +{counts[2]} +[\d.]+\n", out)
