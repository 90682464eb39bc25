"""Loaders in the Hugging Face Trainer, stopped in mid-epoch and resumed: python examples/train_transformers.py"""

import tempfile

from digit_feeds import CLASSES, digit_feeds
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

import mbaas

COLUMNS = {"pixel_values": "image", "labels": "label"}  # as the model names them


class LoaderTrainer(Trainer):
    """Trains on mbaas loaders, and resumes in mid-epoch."""

    def __init__(self, model, options, loader, validation):
        super().__init__(model, options, eval_dataset="validation", callbacks=[mbaas.transformers_callback()])
        self.get_train_dataloader = lambda: loader
        self.get_eval_dataloader = lambda eval_dataset=None: validation


with tempfile.TemporaryDirectory() as folder, digit_feeds():
    size = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**size, num_labels=CLASSES))
    saving = {"output_dir": folder, "save_steps": 100, "eval_strategy": "epoch", "label_names": ["labels"]}
    for saved, steps in ((None, 100), (f"{folder}/checkpoint-100", 225)):  # an epoch has 45 steps
        with (
            mbaas.join("train", "me", columns=COLUMNS) as loader,
            mbaas.join("validation", "me", columns=COLUMNS) as validation,
        ):
            options = TrainingArguments(max_steps=steps, use_cpu=True, report_to="none", learning_rate=0.01, **saving)
            LoaderTrainer(model, options, loader, validation).train(resume_from_checkpoint=saved)
