"""Run programs that start two processes, each with the loader of one rank, and read their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from trainer_feeds import STEPS

SHARES = [[8] * (STEPS - 1) + [6], [8] * (STEPS - 1) + [5]]
"""Samples per minibatch for each of the two ranks. A minibatch has 16 = 8 + 8, the last one 11 = 6 + 5."""


def run(script: str, *arguments: str) -> None:
    """Run a program of this folder on the current cluster."""
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    """Results of each rank."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]
