"""The search over augmentation runs as users run it: in a separate process with its own Ray."""

from __future__ import annotations

import re

import pytest

from support.programs import FORKING_TRIALS, ROOT, run_program

EXAMPLE = ROOT / "examples" / "tune_augmentation.py"
LIMIT_S = 300
PHOTOS = 40
ROW = r" +([\d.]+)% +[\d.]+ +([\d.]+) +([\d,]+) +([\d.]+)"
"""Accuracy, seconds, CPU-seconds, samples trained with, samples decoded for each of them."""


def figures(title: str, out: str) -> list[float]:
    found = re.search(title + ROW, out)
    assert found, out
    return [float(text.replace(",", "")) for text in found.groups()]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scheduler", ["asha", pytest.param("pbt", marks=pytest.mark.long)])
def test_trials_with_pipelines_of_their_own_share_what_is_decoded(scheduler: str) -> None:
    arguments = ("--trials", "4", "--epochs", "4", "--photos", str(PHOTOS), "--scheduler", scheduler)
    out, _ = run_program(EXAMPLE, *arguments, limit_s=LIMIT_S - 20, removed="mb*", environment=FORKING_TRIALS)
    _, _, trained, decoded = figures("one feed", out)
    assert trained >= 4 * 2 * PHOTOS  # each trial has two epochs at least
    assert decoded < 0.75


@pytest.mark.long
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_third_of_the_cpu_time_of_a_dataloader_for_each() -> None:
    out, _ = run_program(EXAMPLE, "--compare", limit_s=3 * LIMIT_S - 20, removed="mb*")
    shared, apart, alone = (
        figures(title, out) for title in ("one feed", "a feed for each trial", "a DataLoader for each")
    )
    assert shared[1] < alone[1] / 3
    assert shared[3] < 0.1 < apart[3] < alone[3] == 1
