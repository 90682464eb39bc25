"""Ranks of an elastic Ray Train run: the group grows with new nodes, and shrinks when nodes die or drain."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from node_feeds import BATCH, OPTIONS, SAMPLES, augmented
from numpy.typing import NDArray
from ray import train
from ray.train.torch import TorchTrainer

import mbaas
from support.waiting import wait_until
from tune_integration import get_loader

STEP_S, PER_CHECKPOINT, FIRST_BATCH_S = 0.1, 4, 2.0
NOTICE_S, BEFORE_IT_GOES = 30.0, 20  # two ranks take about ten steps each during the notice
STEPS = SAMPLES // BATCH + 1

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it


@dataclass(frozen=True, eq=False)
class Step:
    """One rank's view of a step.

    Attributes:
        group: start time, seconds since 1970; the same for all workers started together.
        world_size, rank: in this group.
        epoch, step: of the run, from 0.
        sample_ids: the rank's share.
        first_s: seconds from joining to this minibatch, if it is the group's first.
    """

    group: float
    world_size: int
    rank: int
    epoch: int
    step: int
    sample_ids: NDArray[np.int64]
    first_s: float | None


@ray.remote(num_cpus=0)
class Diary:
    """Records all ranks' steps, and decides when the run ends."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._last_epoch: int | None = None

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def steps(self) -> list[Step]:
        return self._steps

    def end_soon(self) -> None:
        """End the run after the next epoch."""
        self._last_epoch = max(step.epoch for step in self._steps) + 1

    def is_last(self, epoch: int) -> bool:
        return self._last_epoch is not None and epoch >= self._last_epoch


@ray.remote(num_cpus=0)
def fit(feed: str, diary: Any, folder: str) -> None:
    """Run the training in a separate process, because the run takes over Ctrl-C handling."""
    # Ray keeps counting a dead node for up to 20 s, and a group with a rank there waits for it, by default for a
    # minute.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "15"
    scaling = train.ScalingConfig(
        num_workers=(1, 3), resources_per_worker={"CPU": 2}, elastic_resize_monitor_interval_s=2.0
    )
    run = train.RunConfig(name="run", storage_path=folder, failure_config=train.FailureConfig(max_failures=-1))
    TorchTrainer(work, train_loop_config={"feed": feed, "diary": diary}, scaling_config=scaling, run_config=run).fit()


def run_until(diary: Any, world_size: int, steps: int = 6) -> None:
    """Wait until the newest group has ``world_size`` ranks, and its rank 0 has made ``steps`` steps."""

    def has_come() -> bool:
        seen = ray.get(diary.steps.remote())
        newest = [step for step in seen if step.group == seen[-1].group and step.rank == 0] if seen else []
        return len(newest) >= steps and newest[0].world_size == world_size

    wait_until(has_come, f"{world_size} ranks", deadline_s=90)


def work(config: dict[str, Any]) -> None:
    """Training loop of a worker: it saves its state every few steps, and resumes from the last checkpoint."""
    context, diary = train.get_context(), config["diary"]
    rank, world_size = context.get_world_rank(), context.get_world_size()
    state: dict[str, Any] = {"epoch": 0, "step": 0, "loader": None}
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = json.loads((Path(folder) / "state.json").read_text())
    epoch, step = state["epoch"], state["step"]
    group = [time.time()]
    torch.distributed.broadcast_object_list(group)
    begun: float | None = time.monotonic()
    with get_loader(config["feed"], format="numpy", batch_size=BATCH, state=state["loader"]) as loader:
        while True:
            for batch in loader:
                first_s, begun = None if begun is None else time.monotonic() - begun, None
                torch.distributed.barrier()  # like the gradients of a step
                seen = Step(group[0], world_size, rank, epoch, step, batch["sample_id"].copy(), first_s)
                ray.get(diary.add.remote(seen))
                step += 1
                time.sleep(STEP_S)
                if step % PER_CHECKPOINT == 0:
                    save(rank, {"epoch": epoch, "step": step, "loader": loader.state_dict()})
            if ray.get(diary.is_last.remote(epoch)):
                return
            epoch, step = epoch + 1, 0


def save(rank: int, state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "state.json").write_text(json.dumps(state))
        train.report({}, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None)


def whole_run(steps: list[Step]) -> dict[int, list[NDArray[np.int64]]]:
    """The run's training data: epoch -> sample ids of each minibatch, over all ranks.

    A group that begins at a checkpoint repeats later steps of the previous group. They must be identical.
    """
    groups: dict[float, dict[tuple[int, int], dict[int, Step]]] = {}
    for step in steps:
        groups.setdefault(step.group, {}).setdefault((step.epoch, step.step), {})[step.rank] = step
    trained: dict[tuple[int, int], NDArray[np.int64]] = {}
    for _, made in sorted(groups.items()):
        for when, ranks in made.items():
            if len(ranks) < ranks[min(ranks)].world_size:
                continue  # it, or another rank, was ended in the middle of this step
            ids = np.sort(np.concatenate([step.sample_ids for step in ranks.values()]))
            assert np.array_equal(ids, trained.setdefault(when, ids)), f"step {when} was another one before"
    epochs: dict[int, list[NDArray[np.int64]]] = {}
    for (epoch, step), ids in sorted(trained.items()):
        assert len(epochs.setdefault(epoch, [])) == step, f"steps of epoch {epoch} before step {step} are missing"
        epochs[epoch].append(ids)
    return epochs


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_group_that_grows_and_shrinks_trains_on_every_sample_once(nodes, data, feed_name, tmp_path):
    """1 rank, 2, 3; a node dies, then 2; a node drains and leaves, then 1. Prep has a CPU of the first node.

    Ray Train counts a node's total CPUs, not the free ones. So a rank requests more than prep leaves over.
    """
    nodes.add(3)
    with mbaas.serve(feed_name, data, augmented(), prep_workers=1, **OPTIONS) as feed:
        diary = Diary.remote()
        run = fit.remote(feed.name, diary, str(tmp_path))
        run_until(diary, 1)
        second = nodes.add(2)
        run_until(diary, 2)
        third = nodes.add(2)
        run_until(diary, 3)
        nodes.kill(third)
        run_until(diary, 2)
        nodes.drain(second, NOTICE_S)
        made = len(ray.get(diary.steps.remote()))
        wait_until(lambda: len(ray.get(diary.steps.remote())) >= made + BEFORE_IT_GOES, "the group uses the notice")
        nodes.kill(second)
        run_until(diary, 1)
        ray.get(diary.end_soon.remote())
        ray.get(run, timeout=90)
        steps = ray.get(diary.steps.remote())
        status = feed.status()
    for epoch in whole_run(steps).values():
        assert [len(ids) for ids in epoch] == [BATCH] * (STEPS - 1) + [SAMPLES % BATCH]
        assert np.array_equal(np.sort(np.concatenate(epoch)), np.arange(SAMPLES))
    waits = [round(step.first_s, 2) for step in steps if step.first_s is not None]
    assert max(waits) < FIRST_BATCH_S, waits
    assert status.inexact_epochs == 0
