"""A recording model, and a `Trainer` with mbaas loaders that a step may stop."""

from __future__ import annotations

import os
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

    def __init__(self, loader: mbaas.Loader, validation: mbaas.Loader, *, stop_at: int = 0, **options: Any) -> None:
        callbacks = [StopAt(stop_at), mbaas.transformers_callback()]
        super().__init__(eval_dataset=validation.dataset, callbacks=callbacks, **options)
        self._loaders = loader, validation

    def get_train_dataloader(self) -> Any:
        return self._loaders[0]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loaders[1]


class StopAt(TrainerCallback):
    """Saves a checkpoint at a step, and stops the run."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._step:
            control.should_save = control.should_training_stop = True
