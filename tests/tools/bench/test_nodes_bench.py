"""The benchmark on several nodes runs as a command with real clusters, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_until

COMMAND = [sys.executable, "-m", "benchmarks", "nodes", "--nodes"]
OPTIONS = ["--images", "90", "--cache-share", "0.5", "--storage", "6 MB/s"]
PATIENCE_S = 100.0


def folders(run: subprocess.Popen[str]) -> list[Path]:
    return list(Path("/tmp").glob(f"mbaas-{run.pid}-*"))


@pytest.mark.long
def test_two_nodes_share_what_each_would_load_alone() -> None:
    with subprocess.Popen([*COMMAND, "2", *OPTIONS, "--json"], stdout=subprocess.PIPE, text=True) as run:
        out, _ = run.communicate(timeout=PATIENCE_S)
    (result,) = json.loads(out)["results"]
    sharing, alone, dataset = result["sharing"], result["alone"], result["dataset_bytes"]
    cached = sum(sharing["cached_bytes"])
    assert 0.45 * dataset < cached <= 0.5 * dataset
    assert sharing["storage_bytes"] == [dataset, *[dataset - cached] * 2]
    assert alone["storage_bytes"] == [2 * dataset, *[2 * dataset - sum(alone["cached_bytes"])] * 2]
    assert alone["prepared_bytes"] == 2 * sharing["prepared_bytes"] == 2 * 90 * result["sample_bytes"]
    assert alone["epoch_s"][0] >= dataset / 6e6, "faster than its link"
    assert (sharing["missing"], sharing["repeated"], alone["missing"], alone["repeated"]) == (0, 0, 0, 0)
    assert (run.returncode == 0) == (not result["faults"])
    assert folders(run) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_well_when_it_is_interrupted(number: int) -> None:
    """For SIGINT the signal goes to the whole process group, like Ctrl-C in a terminal."""
    with subprocess.Popen([*COMMAND, "1", *OPTIONS], stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        me = psutil.Process(run.pid)
        below = _until_it_has(me, "SharingTrial")
        assert folders(run), "they are looked for under another name"
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        assert run.wait(PATIENCE_S) == 130
        assert run.stderr is not None
        assert "interrupted" in run.stderr.read()
    _, alive = psutil.wait_procs(below, timeout=20.0)
    assert alive == []
    assert folders(run) == []


def _until_it_has(process: psutil.Process, actor: str) -> list[psutil.Process]:
    """All descendants of a process, as soon as an ``actor`` is among them."""
    below: list[psutil.Process] = []

    def is_there() -> bool:
        below[:] = process.children(recursive=True)
        return any(actor in " ".join(_command(child)) for child in below)

    wait_until(is_there, f"a {actor} runs", deadline_s=PATIENCE_S)
    return below


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
