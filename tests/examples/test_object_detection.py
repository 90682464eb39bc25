"""The detection and segmentation examples run as users run them: in separate processes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 240


def run(name: str, *arguments: str) -> str:
    """Run an example with its own Ray, and return its output."""
    with tempfile.TemporaryDirectory(prefix="ex", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(EXAMPLES.parent),
                "TMPDIR": folder,
                "HOME": folder,
                "RAY_ADDRESS": "local",
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S - 20,
        )
        assert not list(Path(folder).glob("tmp*")), "what it wrote is gone"
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


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
