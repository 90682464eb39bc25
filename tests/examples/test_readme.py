"""The README example runs as a reader runs it: pasted into a file, with default options, on a small machine."""

from __future__ import annotations

import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from support.programs import ROOT, run_program

LIMIT_S = 240

ON_2_CPUS = """
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
"""
"""Simulates a small machine. The machine that runs the tests may have more cores, and Ray would use them all."""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_training_and_validation_feeds_with_defaults_leave_room_for_a_search_on_2_cpus(tmp_path: Path) -> None:
    snippet = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert snippet is not None
    for name, samples in (("train", 70), ("validation", 30)):
        for number in range(samples):
            folder = tmp_path / name / f"class-{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / f"{number}.png"), np.full((20, 30, 3), number, np.uint8))
    program = tmp_path / "pasted.py"
    program.write_text(ON_2_CPUS + snippet[1])
    stdout, stderr = run_program(program, limit_s=LIMIT_S - 20, ray_address="", cwd=tmp_path)
    shared, best = stdout.strip().splitlines()[-2:]
    assert re.fullmatch(r"\{'batch_size': (128|256)\}", best), stdout
    counted = re.fullmatch(r"(\d+) samples delivered, (\d+) prepared", shared)
    assert counted is not None, stdout
    delivered, prepared = map(int, counted.groups())
    assert delivered == 2 * 3 * 70, "two trials, three epochs"
    assert prepared < delivered, "they ran side by side"
    assert "no trial can start" not in stderr
