"""The example as people run it: in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tune_digits.py"
LIMIT_S = 240


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The example, with ``folder`` for its temporary files."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed as one line of single spaces."""
    with start(folder, *arguments) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, " ".join(out.split())


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a short path: Ray's sockets go there."""
    with tempfile.TemporaryDirectory(prefix="ex", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_it_finds_a_good_model_and_shares(folder: Path) -> None:
    code, out = run(folder)
    assert code == 0, out
    accuracy = re.search(r"best trial: ([\d.]+)% validation accuracy", out)
    assert accuracy, out
    assert float(accuracy[1]) > 95
    counts = re.search(r"samples: ([\d,]+) prepared, ([\d,]+) delivered to 8 trials", out)
    assert counts, out
    prepared, delivered = (int(count.replace(",", "")) for count in counts.groups())
    assert delivered > 1.5 * prepared
    assert "Traceback" not in out
    assert list(folder.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_own_images_compared(folder: Path, tmp_path: Path) -> None:
    """40 images of two sizes in two classes; 2 trials of 2 epochs prepare 160 samples without sharing."""
    for number in range(40):
        target = tmp_path / ("dark", "light")[number % 2]
        target.mkdir(exist_ok=True)
        side = (20, 31)[number // 2 % 2]
        cv2.imwrite(str(target / f"{number}.jpg"), np.full((side, side + 5, 3), 200 * (number % 2), np.uint8))
    code, out = run(folder, "--data", str(tmp_path), "--trials", "2", "--epochs", "2", "--compare")
    assert code == 0, out
    assert "32 images to train on, 8 to validate with" in out
    assert re.search(r"without sharing │ [\d.]+% │ 160 │ 160 │", out), out
    assert list(folder.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_interrupted(folder: Path) -> None:
    """Ctrl-C when the first trial has ended: one sentence, exit code 130, nothing left."""
    with start(folder, "--epochs", "3") as process:
        assert process.stdout is not None
        assert any("data stall" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted" in out
    assert "Traceback" not in out
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trials", "0"], "argument --trials: must be a whole number of at least 1, got '0'"),
        (["--epochs", "many"], "argument --epochs: must be a whole number of at least 1, got 'many'"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_arguments(folder: Path, arguments: list[str], sentence: str) -> None:
    code, out = run(folder, *arguments)
    assert code == 2
    assert out.startswith("tune_digits.py: ")
    assert sentence in out
    assert "Traceback" not in out
    assert list(folder.iterdir()) == []
