"""Two processes that a trainer starts, each with a rank's loader: every sample reaches one of them, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ray
from trainer_feeds import EVERY, SAMPLES, STEPS

pytestmark = pytest.mark.usefixtures("ray_clean")

SHARES = [[8] * (STEPS - 1) + [6], [8] * (STEPS - 1) + [5]]
"""Samples of each minibatch of an epoch for the two ranks: the last one has 11."""


def run(script: str, *arguments: str) -> None:
    """Run a program that starts them."""
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each of them wrote down."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def test_an_own_loop_accumulates_saves_and_goes_on(training, validating, tmp_path):
    """An epoch and 5 minibatches of the next, then the rest of it; a step for 4 minibatches and at an epoch's end."""
    run("two_processes.py", "own_loop", training.name, validating.name, str(tmp_path))
    first, second = notes(tmp_path, "rank")
    for epoch in range(2):
        minibatches = [seen["epochs"][epoch] for seen in (first, second)]
        assert [[len(ids) for ids in share] for share in minibatches] == SHARES
        assert sorted(chain(*minibatches[0], *minibatches[1])) == EVERY
    for seen in (first, second):
        assert seen["exact"]
        assert seen["stepped"] == [4, 8, 12, STEPS]
        assert sorted(seen["gathered"]) == EVERY, "accelerate cuts nothing off the last minibatch"
    assert first["weights"] == second["weights"]


@pytest.mark.long
def test_the_trainer_of_hugging_face_evaluates_saves_and_goes_on(training, validating, tmp_path):
    """An epoch and 5 minibatches of the next, then the rest of it and an evaluation."""
    run("two_processes.py", "trainer", training.name, validating.name, str(tmp_path))
    ranks = notes(tmp_path, "rank")
    for epoch in range(2):
        minibatches = [seen["trained"][epoch * STEPS : (epoch + 1) * STEPS] for seen in ranks]
        assert [[len(ids) for ids in share] for share in minibatches] == SHARES
        assert sorted(chain(*minibatches[0], *minibatches[1])) == EVERY
    assert [len(seen["trained"]) for seen in ranks] == [2 * STEPS] * 2
    assert sorted(ranks[0]["evaluated"] + ranks[1]["evaluated"]) == EVERY
    assert [(seen["exact"], seen["samples"]) for seen in ranks] == [(True, SAMPLES)] * 2


@pytest.mark.long
def test_lightning_goes_on_in_the_middle_of_an_epoch(training, tmp_path):
    """Two epochs with a checkpoint behind the 5th minibatch of the second; from there to the end of a third."""
    run("lightning_processes.py", training.name, str(tmp_path))
    first, second = notes(tmp_path, "first"), notes(tmp_path, "second")
    assert all(seen["exact"] for seen in first + second)
    heads, tails = ([seen["epochs"]["1"] for seen in ranks] for ranks in (first, second))
    went_on = [head[:5] + tail for head, tail in zip(heads, tails, strict=True)]
    for minibatches in ([seen["epochs"]["0"] for seen in first], heads, went_on, [s["epochs"]["2"] for s in second]):
        assert [[len(ids) for ids in share] for share in minibatches] == SHARES
        assert sorted(chain(*minibatches[0], *minibatches[1])) == EVERY
