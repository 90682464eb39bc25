"""A recording model, a `Trainer` with mbaas loaders, and a callback that saves loader state in checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from trainer_feeds import model
from transformers import Trainer, TrainerCallback

import mbaas


class Net(torch.nn.Module):
    """Model that records the sample ids of each minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.trained: list[list[int]] = []
        self.evaluated: list[int] = []

    def forward(self, image: torch.Tensor, label: torch.Tensor, sample_id: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.trained.append(sample_id.tolist())
        else:
            self.evaluated += sample_id.tolist()
        logits = self.net(image)
        return {"loss": torch.nn.functional.cross_entropy(logits, label), "logits": logits}


class FeedTrainer(Trainer):
    """A subclass as users write it; the example replaces the two methods on the instance instead."""

    def __init__(self, loader: mbaas.Loader, validation: mbaas.Loader, **options: Any) -> None:
        super().__init__(eval_dataset=validation.dataset, **options)
        self._loaders = loader, validation

    def get_train_dataloader(self) -> Any:
        return self._loaders[0]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loaders[1]


class SaveLoader(TrainerCallback):
    """Saves the loader's state in the trainer's checkpoint, and stops the run at a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self._stop_at = stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._stop_at:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, train_dataloader: Any, **others: Any) -> None:
        if args.should_save:  # true on one rank only
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
            path.write_text(json.dumps(train_dataloader.state_dict()))
