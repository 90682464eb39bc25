"""The detection and segmentation examples run as users run them: in separate processes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from support.programs import FORKING_TRIALS, ROOT, run_program

EXAMPLES = ROOT / "examples"
LIMIT_S = 240


def run(name: str, *arguments: str) -> str:
    return run_program(EXAMPLES / name, *arguments, limit_s=LIMIT_S - 20, environment=FORKING_TRIALS).stdout


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("arguments", "images", "least"),
    [
        (("--images", "60", "--trials", "1", "--epochs", "2"), 2 * 48, 0.0),
        pytest.param((), 4 * 6 * 400, 80.0, marks=pytest.mark.long),
    ],
    ids=["short", "whole"],
)
def test_a_search_finds_a_detector_and_shares(arguments: tuple[str, ...], images: int, least: float) -> None:
    out = run("object_detection.py", *arguments)
    found = re.search(r"^best trial: ([\d.]+)% of the objects found with", out, re.MULTILINE)
    assert found, out
    assert float(found[1]) >= least
    counts = re.search(r"^([\d,]+) training images prepared, ([\d,]+) delivered$", out, re.MULTILINE)
    assert counts, out
    prepared, delivered = (int(count.replace(",", "")) for count in counts.groups())
    assert delivered == images
    assert least == 0 or delivered > 1.2 * prepared


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_own_images_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 of the 40 images are for training: without sharing, 2 trials of 2 epochs prepare 128."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    annotations = importlib.import_module("shapes").write_shapes(tmp_path, 40)
    own = "--data", str(annotations), "--image-folder", str(tmp_path / "images")
    out = run("object_detection.py", *own, "--trials", "2", "--epochs", "2", "--compare")
    assert re.search(r"a DataLoader per trial +[\d.]+% +128 +128 +[\d.]+\n", out), out
    assert re.search(r"one feed +[\d.]+% +[\d,]+ +128 +[\d.]+\n", out), out


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_a_loop_learns_masks() -> None:
    epochs = re.findall(r"^epoch \d: ([\d.]+)% overlap, exact: True$", run("segmentation.py"), re.MULTILINE)
    assert len(epochs) == 4
    assert float(epochs[-1]) > 60
