"""The digits example runs as users run it: in a separate process."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest

from support.programs import FORKING_TRIALS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tune_digits.py"
LIMIT_S = 240


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the example with ``folder`` for its temporary files."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code, and the output with all whitespace reduced to single spaces."""
    with start(folder, *arguments, **environment) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, " ".join(out.split())


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder; its path is short, because Ray puts its sockets there."""
    with tempfile.TemporaryDirectory(prefix="ex", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("arguments", "trials", "environment"),
    [(("--trials", "3", "--epochs", "6"), 3, FORKING_TRIALS), pytest.param((), 8, {}, marks=pytest.mark.long)],
    ids=["short", "whole"],
)
def test_it_finds_a_good_model_and_shares(
    folder: Path, arguments: tuple[str, ...], trials: int, environment: dict[str, str]
) -> None:
    """The short search forks its workers; the whole one has Ray's own, as the README's program has."""
    code, out = run(folder, *arguments, **environment)
    assert code == 0, out
    accuracy = re.search(r"best trial: ([\d.]+)% validation accuracy", out)
    assert accuracy, out
    assert float(accuracy[1]) > 95
    counts = re.search(rf"samples: ([\d,]+) prepared, ([\d,]+) delivered to {trials} trials", out)
    assert counts, out
    prepared, delivered = (int(count.replace(",", "")) for count in counts.groups())
    assert delivered > 1.5 * prepared
    assert "Traceback" not in out
    assert list(folder.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_own_images_compared(folder: Path, tmp_path: Path) -> None:
    """40 images of two sizes in two classes. Without sharing, 2 trials of 2 epochs prepare 4 x 40 = 160 samples."""
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
    """Ctrl-C after the first of many trials: one sentence, exit code 130, no files left."""
    with start(folder, "--trials", "40", "--epochs", "3") as process:
        assert process.stdout is not None
        assert any("data stall" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted" in out
    assert "Traceback" not in out
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module, to import its dependencies once instead of in one process per invalid argument."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # it sets variables for Ray, which is already imported
        spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        patch.setitem(sys.modules, spec.name, module := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trials", "0"], "argument --trials: must be a whole number of at least 1, got '0'"),
        (["--epochs", "many"], "argument --epochs: must be a whole number of at least 1, got 'many'"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_arguments(
    example: ModuleType,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    with pytest.raises(SystemExit) as ended:
        example.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"tune_digits.py: {sentence}\n")


def test_a_folder_that_is_not_there(
    example: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(example, "start_ray", lambda _: pytest.fail("Ray was asked for"))
    assert example.main(["--data", "/no/such/folder"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tune_digits.py: ")
    assert "/no/such/folder" in err
    assert list(folder.iterdir()) == []
