"""The programs of the tutorial run as a reader runs them, on a small machine, with fewer photographs and epochs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages import ROOT, block_with
from support.programs import FORKING_TRIALS, run_program

LIMIT_S = 240

PAGE = ROOT / "docs" / "tutorial.md"

ON_2_CPUS = """
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
"""

SAMPLES, EPOCHS, TRIALS = 96, 3, 4


def run(text: str, here: Path, first: str = ON_2_CPUS) -> str:
    """Run the program that contains a text; return its output."""
    program = here / "pasted.py"
    shown = block_with(PAGE, text).text.replace("1200", str(SAMPLES)).replace("range(10)", f"range({EPOCHS})")
    program.write_text(first + shown)
    return run_program(program, limit_s=LIMIT_S - 20, ray_address="", cwd=here, environment=FORKING_TRIALS).stdout


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_search_with_a_feed_shares_and_is_exact(tmp_path: Path) -> None:
    run("HSV2BGR", tmp_path, first="")
    out = run("mbaas.serve(", tmp_path)
    counted = re.search(r"^(\d+) samples delivered, (\d+) prepared$", out, re.MULTILINE)
    assert counted is not None, out
    delivered, prepared = map(int, counted.groups())
    assert delivered == TRIALS * EPOCHS * SAMPLES
    assert prepared < delivered
    assert f"{TRIALS * EPOCHS} of {TRIALS * EPOCHS} epochs exact" in out


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_the_search_with_dataloaders_runs(tmp_path: Path) -> None:
    run("HSV2BGR", tmp_path, first="")
    assert re.search(r"^\d+ s, best accuracy [\d.]+% with lr", run("class Photos", tmp_path), re.MULTILINE)
