"""Semantic segmentation with masks from COCO annotations, in a plain PyTorch loop: python examples/segmentation.py"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from shapes import KINDS, SIDE, write_shapes
from torch.nn.functional import cross_entropy

import mbaas
from mbaas import transforms as T

EPOCHS = 4
LYING = {"boxes": T.Boxes(beside=("labels",), min_size=4), "masks": T.Masks()}
SCALE = T.Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
RESIZE = T.Resize((SIDE, SIDE))
TRAIN = T.Pipeline([T.DecodeImage(), T.RandomIoUCrop(0.5), RESIZE, T.RandomHorizontalFlip(), SCALE], **LYING)
VALIDATION = T.Pipeline([T.DecodeImage(), RESIZE, SCALE], **LYING)


def network(width: int = 16) -> torch.nn.Module:
    """Build a network with the output [n, classes, height, width]; class 0 is the background."""
    layers: list[torch.nn.Module] = []
    for channels, out, stride in ((3, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
        layers += [torch.nn.Conv2d(channels, out, 3, stride, padding=1), torch.nn.BatchNorm2d(out), torch.nn.ReLU()]
    head = torch.nn.Conv2d(2 * width, 1 + len(KINDS), 1)
    return torch.nn.Sequential(*layers, head, torch.nn.Upsample(scale_factor=4, mode="bilinear"))


def classes_of(batch: dict[str, Any]) -> torch.Tensor:
    """Return the class of each pixel, int64 [n, height, width]."""
    classes = torch.zeros((len(batch["image"]), SIDE, SIDE), dtype=torch.int64)
    for image, masks, labels in zip(classes, batch["masks"], batch["labels"], strict=True):
        for mask, label in zip(masks, labels, strict=True):
            image[mask > 0] = label + 1
    return classes


@torch.no_grad()
def mean_overlap(model: torch.nn.Module, validation: mbaas.Loader) -> float:
    """Return the intersection over union of predicted and true pixels, averaged over the kinds of shapes."""
    shared, together = torch.zeros(len(KINDS)), torch.zeros(len(KINDS))
    for batch in validation:
        found, true = model(batch["image"]).argmax(1), classes_of(batch)
        for kind in range(len(KINDS)):
            shared[kind] += ((found == kind + 1) & (true == kind + 1)).sum()
            together[kind] += ((found == kind + 1) | (true == kind + 1)).sum()
    return float((shared / together).mean())


def main() -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        annotations = write_shapes(Path(folder, "data"), 300)
        fields = ["boxes", "labels", "segmentation"]
        train, validation = mbaas.read_coco(annotations, Path(folder, "data/images"), fields=fields).split(0.8)
        with (
            mbaas.serve("train", train, TRAIN, batch_size=16),
            mbaas.serve("validation", validation, VALIDATION, batch_size=30, shuffle=False),
            mbaas.join("train", "me") as loader,
            mbaas.join("validation", "me") as check,
        ):
            for epoch in range(EPOCHS):
                model.train()
                for batch in loader:
                    optimizer.zero_grad()
                    cross_entropy(model(batch["image"]), classes_of(batch)).backward()
                    optimizer.step()
                print(f"epoch {epoch}: {mean_overlap(model.eval(), check):.1%} overlap, exact: {loader.ledger.exact}")


if __name__ == "__main__":
    main()
