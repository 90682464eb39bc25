"""Ranks of Lightning in a Ray Train run share a feed and continue from the run's checkpoints."""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import train
from searching import SAMPLES, OneOfMany, final_status
from train_runs import RANKS

from tune_integration import get_loader

EPOCHS, STEPS = 3, 13
EVERY = list(range(SAMPLES))

Minibatches = dict[int, list[list[int]]]
"""The trainer's epoch -> sample ids of each of a rank's minibatches."""

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers run without this folder on their path


def work(config: dict[str, Any]) -> None:
    """Train, and fail twice in the second epoch: once before its checkpoint and once after."""
    import lightning  # imported here because it takes seconds, and most runs leave this test out
    import torch
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
            self.seen: Minibatches = defaultdict(list)

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.seen[self.current_epoch].append(batch["sample_id"].tolist())
            return torch.nn.functional.cross_entropy(self.net(batch["image"] / 255), batch["label"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Report(RayTrainReportCallback):  # type: ignore[misc]
        """Also saves in the middle of the second epoch."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 4 and starts_at == STEPS:
                self.on_train_epoch_end(trainer, module)
            if trainer.current_epoch == 1 and batch_idx == {0: 2, STEPS: 6}.get(starts_at):
                raise EndOfRunError

    checkpoint, path, state, starts_at = train.get_checkpoint(), None, None, 0
    if checkpoint is not None:
        path = Path(checkpoint.path) / RayTrainReportCallback.CHECKPOINT_NAME
        saved = torch.load(path)
        starts_at, (state,) = saved["global_step"], saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    net = Net()
    with get_loader(config["feed"], state=state) as loader:
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[Report()],
            accelerator="cpu",
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        try:
            prepare_trainer(trainer).fit(net, loader, ckpt_path=path)
            assert loader.epoch == EPOCHS
            assert trainer.train_dataloader is loader, "nothing stands between it and the trainer"
        finally:
            rank = train.get_context().get_world_rank()
            ray.get(config["register"].add.remote(str(starts_at), rank, dict(net.seen)))


class EndOfRunError(Exception):
    """Ends a run after its checkpoint."""


def together(ranks: dict[int, list[Minibatches]], epoch: int) -> list[list[int]]:
    """Sample ids of each minibatch of an epoch, over both ranks."""
    minibatches = [ranks[rank][0][epoch] for rank in range(RANKS)]
    return [sorted(first + second) for first, second in zip(*minibatches, strict=True)]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ranks_share_every_epoch_and_go_on_from_checkpoints(
    feed: OneOfMany, driver: Any, register: Any, tmp_path: Path
) -> None:
    """A run of 2 workers fails twice: it continues between two epochs, then after the 5th minibatch."""
    config = {"feed": feed.name, "register": register}
    failures = train.FailureConfig(max_failures=2)
    ray.get(driver.fit.remote(work, config, str(tmp_path), "run", failure_config=failures))
    seen = ray.get(register.seen.remote())
    assert seen.keys() == {"0", f"{STEPS}", f"{STEPS + 5}"}, "steps where it started"
    first, second, third = seen.values()
    assert sorted(chain(*together(first, 0))) == EVERY
    assert together(second, 1)[:3] == together(first, 1), "the interrupted epoch's order continues"
    assert [len(together(ranks, 1)) for ranks in (second, third)] == [7, STEPS - 5]
    assert sorted(chain(*together(second, 1)[:5], *together(third, 1))) == EVERY
    assert sorted(chain(*together(third, 2))) == EVERY
    sizes = [[len(ids) for ids in third[rank][0][2]] for rank in range(RANKS)]
    assert [size[:-1] for size in sizes] == [[8] * (STEPS - 1)] * 2
    assert sorted(size[-1] for size in sizes) == [5, 6]
    status = final_status(feed)
    assert status.inexact_epochs == 0
    assert {consumer for consumer, _ in status.ledgers} == {"run[0]", "run[1]"}
