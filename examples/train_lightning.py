"""Loaders in Lightning, stopped in mid-epoch and resumed: python examples/train_lightning.py"""

import tempfile

import lightning
import torch
from digit_feeds import digit_feeds, network
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

import mbaas


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, number):
        return cross_entropy(self.network(batch["image"]), batch["label"])

    def validation_step(self, batch, number):
        right = self.network(batch["image"]).argmax(1) == batch["label"]
        self.log("right", right.float().mean(), batch_size=len(right), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, digit_feeds():
        for path in (None, "last"):  # "last": the newest checkpoint, of step 100
            with mbaas.join("train", "me") as loader, mbaas.join("validation", "me") as validation:
                saving = ModelCheckpoint(folder, every_n_train_steps=100, save_last=True)
                trainer = lightning.Trainer(
                    max_epochs=5 if path else 3, callbacks=[saving], logger=False, accelerator="cpu"
                )
                trainer.fit(Classifier(), loader, validation, ckpt_path=path and f"{folder}/last.ckpt")
                right = trainer.callback_metrics["right"]
                print(f"epoch {trainer.current_epoch}: {right:.1%} right, {loader.ledger.exact=}")
