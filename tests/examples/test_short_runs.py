"""Short runs on an open feed: the example, and the work that a new process does until its first minibatch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from support.programs import FORKING, ROOT, run_program

LIMIT_S = 200
MOST_CPU_S = 1.0
"""Measured: 0.45 to 0.55 s, of which Ray's import is 0.3 s."""

MOST_S = 15.0
"""For a machine that runs other tests, too; measured on an idle one: less than 1 s."""

RUN = """
import time
import torch
began, cpu = time.perf_counter(), time.process_time()
import mbaas
with mbaas.join({feed!r}, start="now") as loader:
    loader.peek()
    print(time.perf_counter() - began, time.process_time() - cpu, loader.report().time_to_first_batch_s)
"""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_second_program_has_its_first_minibatch_soon(ray_clean: None, feed_name: str, tmp_path: Path) -> None:
    """Importing torch is not counted, and the best of three counts. CPU time depends little on other processes."""
    program = tmp_path / "run.py"
    program.write_text(RUN.format(feed=feed_name))
    pipeline = T.Pipeline([T.DecodeImage()])
    with mbaas.serve(feed_name, synthetic(2000), pipeline, batch_size=64, prep_workers=1) as feed:
        address = ray.get_runtime_context().gcs_address
        figures = []
        for _ in range(3):
            out, _ = run_program(program, limit_s=60, ray_address=address)
            figures.append([float(figure) for figure in out.split()])
        assert feed.status().delivered_samples == 0, "a peek at the first minibatch begins no epoch"
    took_s, cpu_s, joined_s = map(min, zip(*figures, strict=True))
    assert cpu_s < MOST_CPU_S
    assert joined_s < took_s < MOST_S


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_example_trains_in_programs_of_their_own() -> None:
    example, limit_s = ROOT / "examples" / "short_runs.py", LIMIT_S - 20
    out, err = run_program(example, "--epochs", "4", limit_s=limit_s, removed="mb*", environment=FORKING)
    lines = out.splitlines()
    assert len(lines) == 3, err
    for line in lines:
        right, first_s, all_s = map(float, re.findall(r"([\d.]+)(?=% right| s,)", line))
        assert right > 70
        assert first_s < all_s
        assert line.endswith("exact: True")
