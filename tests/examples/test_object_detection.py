"""The example of object detection as people run it: in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 240


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
    with tempfile.TemporaryDirectory(prefix="ex", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [sys.executable, str(EXAMPLES / "object_detection.py"), *arguments],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "TMPDIR": folder, "HOME": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S - 20,
        )
        assert not list(Path(folder).glob("tmp*")), "what it wrote is gone"
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    found = re.search(r"^best trial: ([\d.]+)% of the objects found with", ended.stdout, re.MULTILINE)
    assert found, ended.stdout
    assert float(found[1]) >= least
    counts = re.search(r"^([\d,]+) training images prepared, ([\d,]+) delivered$", ended.stdout, re.MULTILINE)
    assert counts, ended.stdout
    prepared, delivered = (int(count.replace(",", "")) for count in counts.groups())
    assert delivered == images
    assert least == 0 or delivered > 1.2 * prepared
