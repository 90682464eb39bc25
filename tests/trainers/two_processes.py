"""Train in two processes started by accelerate, and write the samples of each:

    python two_processes.py own_loop | trainer TRAINING VALIDATING FOLDER

Slow imports happen before the fork; with `accelerate launch` each process would repeat them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, debug_launcher
from trainer_feeds import ids_of, join_feed, loss_of, model

RANKS = 2


def own_loop(training: str, validating: str, folder: str) -> dict[str, Any]:
    """Train for an epoch and 5 minibatches, save, join again, load, and finish the second epoch."""
    seen: dict[str, Any] = {"epochs": [[], []], "stepped": [], "gathered": []}
    for begins in (True, False):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        net = model()
        with join_feed(training, "loop", rank=accelerator.process_index, world_size=RANKS) as loader:
            net, optimizer, prepared = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
            assert prepared is loader
            accelerator.register_for_checkpointing(loader)
            if not begins:
                accelerator.load_state(folder)
            for epoch in range(loader.epoch, 2):
                for number, batch in enumerate(loader, 1):
                    seen["epochs"][epoch].append(ids_of(batch))
                    with accelerator.accumulate(net):
                        accelerator.backward(loss_of(net, batch))
                        optimizer.step()
                        optimizer.zero_grad()
                    if epoch == 0:
                        seen["stepped"] += [number] * accelerator.sync_gradients
                        seen["gathered"] += accelerator.gather_for_metrics(ids_of(batch), use_gather_object=True)
                    elif begins and number == 5:
                        accelerator.save_state(folder)
                        break
            seen["exact"] = loader.ledger.exact
    with torch.no_grad():
        return {**seen, "weights": sum(each.sum().item() for each in net.parameters())}


def trainer(training: str, validating: str, folder: str) -> dict[str, Any]:
    """Train with the Hugging Face `Trainer` for 18 steps (an epoch and 5), restart, and finish the second epoch."""
    from hugging_face import FeedTrainer, Net  # imported here, because it adds seconds to `own_loop`
    from transformers import TrainingArguments

    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    ranks = {"rank": torch.distributed.get_rank(), "world_size": RANKS}
    saved, nets = Path(folder, "checkpoint-18"), (Net(), Net())
    for net, path in zip(nets, (None, saved), strict=True):
        with (
            join_feed(training, "trainer", **ranks) as loader,
            join_feed(validating, "trainer", **ranks) as validation,
        ):
            options = TrainingArguments(
                folder,
                num_train_epochs=2,
                per_device_train_batch_size=loader.batch_size // RANKS,
                eval_strategy="epoch",
                label_names=["label"],
                use_cpu=True,
                **quiet,
            )
            runs = FeedTrainer(loader, validation, model=net, args=options, stop_at=0 if path else 18)
            runs.train(resume_from_checkpoint=path and str(path))
            exact = loader.ledger.exact and validation.ledger.exact
    return {
        "trained": nets[0].trained + nets[1].trained,
        "evaluated": nets[1].evaluated,
        "exact": exact,
        "samples": runs.num_examples(loader),
    }


def main(what: str, training: str, validating: str, folder: str) -> None:
    seen = {"own_loop": own_loop, "trainer": trainer}[what](training, validating, folder)
    Path(folder, f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    debug_launcher(main, args=tuple(sys.argv[1:]), num_processes=RANKS)
