"""Train in two processes forked by Lightning, and write the samples of each: lightning_processes.py TRAINING FOLDER"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_feeds import ids_of, join_feed, loss_of, model

import mbaas


class Net(lightning.LightningModule):
    """Model that records the sample ids of each minibatch and writes them to a file when a run ends."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.net, self._notes = model(), notes
        self._seen: dict[int, list[list[int]]] = defaultdict(list)

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        self._seen[self.current_epoch].append(ids_of(batch))
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        assert isinstance(loader, mbaas.Loader)
        assert loader.ledger is not None
        seen = {"epochs": self._seen, "exact": loader.ledger.exact}
        self._notes.with_name(f"{self._notes.name}-{self.global_rank}.json").write_text(json.dumps(seen))


class Feeds(lightning.LightningDataModule):
    """Joins the feed in each process as its rank, as in docs/how-to/trainers.md."""

    def __init__(self, training: str) -> None:
        super().__init__()
        self._training = training

    def train_dataloader(self) -> mbaas.Loader:
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        self._loader = join_feed(self._training, "lightning", **ranks)
        return self._loader

    def teardown(self, stage: str) -> None:
        self._loader.close()


def main(training: str, folder: str) -> None:
    """Train two epochs with a checkpoint after 13 + 5 = 18 minibatches, then resume there and finish a third epoch."""
    for name, epochs, path in (("first", 2, None), ("second", 3, f"{folder}/step=18.ckpt")):
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=18, save_top_k=-1)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            strategy="ddp_fork",
            devices=2,
            accelerator="cpu",
            callbacks=[saving],
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
        )
        trainer.fit(Net(Path(folder, name)), datamodule=Feeds(training), ckpt_path=path)


if __name__ == "__main__":
    main(*sys.argv[1:])
