"""A loader that accelerate saves and restores with the other state: python examples/train_accelerate.py"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from digit_feeds import digit_feeds, network
from torch.nn.functional import cross_entropy

import mbaas


def train(accelerator, folder, steps):
    """Train for up to ``steps`` steps or five epochs; resume from the state in ``folder``, if any."""
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    with mbaas.join("train", "me", device=accelerator.device, **ranks) as loader:
        model = network()
        model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), loader)
        accelerator.register_for_checkpointing(loader)
        if any(folder.iterdir()):
            accelerator.load_state(folder)
        for epoch in range(loader.epoch, 5):
            for batch in loader:
                loss = cross_entropy(model(batch["image"]), batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if (steps := steps - 1) == 0:
                    accelerator.save_state(folder)
                    return
            accelerator.print(f"epoch {epoch}: last loss {loss:.2f}, exact: {loader.ledger.exact}")


with tempfile.TemporaryDirectory() as folder, digit_feeds():
    train(Accelerator(cpu=True), Path(folder), steps=100)  # into the third epoch
    print("stopped, and on")
    train(Accelerator(cpu=True), Path(folder), steps=10**9)
