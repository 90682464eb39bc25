"""A loader in a plain PyTorch loop, stopped in mid-epoch and resumed: python examples/train_torch.py"""

import tempfile
from pathlib import Path

import torch
from digit_feeds import digit_feeds, network
from torch.nn.functional import cross_entropy

import mbaas


def train(path, steps):
    """Train for up to ``steps`` steps or five epochs; resume from the checkpoint at ``path``, if any."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved = torch.load(path) if path.exists() else {"model": model.state_dict(), "loader": None}
    model.load_state_dict(saved["model"])
    with mbaas.join("train", "me", state=saved["loader"]) as loader, mbaas.join("validation", "me") as validation:
        for epoch in range(loader.epoch, 5):
            for batch in loader:
                optimizer.zero_grad()
                cross_entropy(model(batch["image"]), batch["label"]).backward()
                optimizer.step()
                torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)
                if (steps := steps - 1) == 0:
                    return
            with torch.no_grad():
                right = torch.cat([model(batch["image"]).argmax(1) == batch["label"] for batch in validation])
            print(f"epoch {epoch}: {right.float().mean():.1%} right, exact: {loader.ledger.exact}")


with tempfile.TemporaryDirectory() as folder, digit_feeds():
    train(Path(folder, "saved.pt"), steps=100)  # into the third epoch
    print("stopped, and on")
    train(Path(folder, "saved.pt"), steps=10**9)
