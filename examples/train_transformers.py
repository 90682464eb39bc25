"""Loaders in the Hugging Face Trainer, stopped in mid-epoch and resumed: python examples/train_transformers.py"""

import json
import tempfile
from pathlib import Path

from digit_feeds import CLASSES, digit_feeds
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainerCallback, TrainingArguments

import mbaas

COLUMNS = {"pixel_values": "image", "labels": "label"}  # as the model names them


class LoaderTrainer(Trainer):
    """Trains on mbaas loaders."""

    def __init__(self, model, options, loader, validation, **others):
        super().__init__(model, options, eval_dataset=validation.dataset, **others)
        self.get_train_dataloader = lambda: loader
        self.get_eval_dataloader = lambda eval_dataset=None: validation


class SaveLoader(TrainerCallback):
    def on_save(self, args, state, control, train_dataloader, **others):
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        path.write_text(json.dumps(train_dataloader.state_dict()))


with tempfile.TemporaryDirectory() as folder, digit_feeds():
    size = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**size, num_labels=CLASSES))
    saving = {"output_dir": folder, "save_steps": 100, "eval_strategy": "epoch", "label_names": ["labels"]}
    for saved, steps in ((None, 100), (Path(folder, "checkpoint-100"), 225)):  # an epoch has 45 steps
        state = saved and json.loads((saved / "loader.json").read_text())
        with (
            mbaas.join("train", "me", columns=COLUMNS, state=state) as loader,
            mbaas.join("validation", "me", columns=COLUMNS) as validation,
        ):
            options = TrainingArguments(max_steps=steps, use_cpu=True, report_to="none", learning_rate=0.01, **saving)
            trainer = LoaderTrainer(model, options, loader, validation, callbacks=[SaveLoader()])
            trainer.train(resume_from_checkpoint=saved and str(saved))
