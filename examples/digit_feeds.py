"""Data of the trainer examples: the 1,797 digits of scikit-learn as the feeds "train" and "validation"."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import torch
from sklearn.datasets import load_digits

import mbaas
from mbaas import transforms as T

SIDE, CLASSES = 8, 10
SCALE = T.Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
TRAIN = T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.2), SCALE])
VALIDATION = T.Pipeline([T.DecodeImage(), SCALE])


@contextmanager
def digit_feeds() -> Iterator[None]:
    """Write the digits as PNG files and serve them; every fifth digit is for validation."""
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = Path(folder, "train" if number % 5 else "validation", str(label), f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), (15 * image).astype("uint8"))
        data = {name: mbaas.read_images(f"{folder}/{name}") for name in ("train", "validation")}
        with (
            mbaas.serve("train", data["train"], TRAIN, batch_size=32),
            mbaas.serve("validation", data["validation"], VALIDATION, batch_size=64, shuffle=False),
        ):
            yield


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * SIDE**2, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
    )
