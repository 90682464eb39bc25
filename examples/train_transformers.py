"""Loaders in Hugging Face's Trainer, stopped in mid-epoch and resumed: python examples/train_transformers.py"""

import json
import tempfile
from pathlib import Path

import torch
from digit_feeds import digit_feeds, network
from transformers import Trainer, TrainerCallback, TrainingArguments

import mbaas


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, image, label, sample_id):
        logits = self.network(image)
        return {"loss": torch.nn.functional.cross_entropy(logits, label), "logits": logits}


class SaveLoader(TrainerCallback):
    def on_save(self, args, state, control, train_dataloader, **others):
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        path.write_text(json.dumps(train_dataloader.state_dict()))


with tempfile.TemporaryDirectory() as folder, digit_feeds():
    saving = {"output_dir": folder, "save_steps": 100, "eval_strategy": "epoch", "label_names": ["label"]}
    for saved, steps in ((None, 100), (Path(folder, "checkpoint-100"), 225)):  # 45 steps are an epoch
        state = saved and json.loads((saved / "loader.json").read_text())
        with mbaas.join("train", "me", state=state) as loader, mbaas.join("validation", "me") as validation:
            options = TrainingArguments(max_steps=steps, use_cpu=True, report_to="none", learning_rate=0.01, **saving)
            trainer = Trainer(Classifier(), options, eval_dataset=validation.dataset, callbacks=[SaveLoader()])
            trainer.get_train_dataloader = lambda: loader
            trainer.get_eval_dataloader = lambda eval_dataset=None: validation
            trainer.train(resume_from_checkpoint=saved and str(saved))
