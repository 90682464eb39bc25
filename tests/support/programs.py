"""Runs programs as users run them: in a separate process, with a temporary folder as home."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from support import nursery

ROOT = Path(__file__).parents[2]

FORKING = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "forking"), str(ROOT)])}
"""Environment of a program whose Ray forks its workers."""

FORKING_TRIALS = FORKING | {nursery.MORE: "torch tune_integration"}
"""The same for a search: each trial then saves the imports of torch and Ray Tune."""


class Output(NamedTuple):
    """Everything that a program has printed."""

    stdout: str
    stderr: str


def run_program(
    program: Path,
    *arguments: str,
    limit_s: float,
    ray_address: str = "local",
    cwd: Path | None = None,
    removed: str = "tmp*",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Output:
    """Run a Python program to its end, and return its output.

    Fails if the program does, prints a traceback, or leaves files that match ``removed`` in its temporary folder.
    ``environment`` may be `FORKING` or `FORKING_TRIALS`.
    """
    with tempfile.TemporaryDirectory(prefix="ex", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [sys.executable, str(program), *arguments],
            cwd=cwd,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": folder,
                "HOME": folder,
                "RAY_ADDRESS": ray_address,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        left = sorted(path.name for path in Path(folder).glob(removed))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert left == [], "temporary files were left behind"
    return Output(ended.stdout, ended.stderr)
